"""`depthmix import`: turn a folder that transformers saved into a run."""

from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import PlainCommand, app


@app.command("import", cls=PlainCommand)
def import_(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder written by 'export' or by save_pretrained.", metavar="DIR"),
    ],
    out: Annotated[Path, typer.Option(help="The new run's folder.", metavar="RUN")],
) -> None:
    """Turn a folder that transformers saved into a run.

    The run has one checkpoint and can be sampled and traced.

    \b
    For example:
      depthmix import exported --out runs/exported
    """
    from depthmix.models import open_model
    from depthmix.models.write import import_model

    run = import_model(open_model(folder), out)
    print(f"{run.path}: sample from it with: depthmix sample {run.path}")
