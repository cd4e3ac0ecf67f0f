"""The verbs that give a model to transformers and take one back."""

from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import ModelPath, PlainCommand, app


@app.command(cls=PlainCommand)
def export(
    model: ModelPath,
    out: Annotated[Path, typer.Option(help="The folder to write.", metavar="DIR")],
    checkpoint: Annotated[
        str | None, typer.Option(help="best, newest, or a step; the best if it is known.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Where the tokenizer is, for a run whose data is gone.")
    ] = None,
    no_tokenizer: Annotated[
        bool, typer.Option("--no-tokenizer", help="Write none, for a run that was trained on ids.")
    ] = False,
    selector: Annotated[
        str | None,
        typer.Option(
            help="Who decides over depth outside training: predictor, router, topk or all.",
            show_default="the trained head",
        ),
    ] = None,
) -> None:
    """Write a folder that Hugging Face transformers opens.

    After `import depthmix.hf`, AutoModelForCausalLM and AutoTokenizer take it as any other.

    \b
    For example:
      depthmix export runs/demo-20261115-142233 --out exported
    """
    from depthmix.models import open_model

    opened = open_model(model, checkpoint=checkpoint, tokenizer=tokenizer)
    try:
        from depthmix.hf.export import export_model
    except ImportError as error:
        from depthmix.hf import MISSING

        raise ValueError(MISSING) from error
    ids, end_token = (None, None) if no_tokenizer else opened.vocabulary
    export_model(
        opened.network,
        out,
        tokenizer=ids,
        end_token=end_token,
        chat=opened.chat,
        selector=selector,
    )
    print(f"{out}: open it with AutoModelForCausalLM.from_pretrained, after import depthmix.hf")


@app.command("import", cls=PlainCommand)
def import_(
    folder: Annotated[
        Path, typer.Argument(help="A folder that was exported or saved.", metavar="DIR")
    ],
    out: Annotated[Path, typer.Option(help="The run's folder to make.", metavar="RUN")],
) -> None:
    """Make a run of a folder that transformers saved.

    The run has one checkpoint and can be sampled and traced.

    \b
    For example:
      depthmix import exported --out runs/exported
    """
    try:
        from depthmix.hf.export import import_model
    except ImportError as error:
        from depthmix.hf import MISSING

        raise ValueError(MISSING) from error
    run = import_model(folder, out)
    print(f"{run.path}: write with it by depthmix sample {run.path}")
