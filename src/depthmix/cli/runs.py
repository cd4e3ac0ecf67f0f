"""`depthmix runs`: list runs."""

from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import AsJson, PlainCommand, app


@app.command(cls=PlainCommand)
def runs(
    folder: Annotated[
        Path, typer.Argument(help="A run, or a folder to search for runs.", metavar="FOLDER")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs in a table, with progress and losses.

    A 'stopped' run was killed; resume it like an interrupted one.
    """
    from depthmix.runs import list_runs, print_runs, to_json

    found = list_runs(folder)
    if as_json:
        print(to_json(found))
    else:
        from rich.console import Console

        print_runs(found, Console())
