"""`depthmix report`: compare runs on a page with charts. Does not load torch."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import PlainCommand, app


@app.command(cls=PlainCommand)
def report(
    folder: Annotated[
        Path, typer.Argument(help="A folder to search for runs.", metavar="DIR")
    ] = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the page and its images. Default: DIR/report.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Compare the runs in a folder, on a page with charts.

    Fits isoFLOP curves, finds their minima and compares them with dense models. Unfinished runs
    are listed and left out. For example:

    depthmix report runs/isoflop
    """
    from depthmix.report.page import summarize, write_report

    command = ["depthmix", "report", str(folder), *(["--out", str(out)] if out else [])]
    found = write_report(folder, out, shlex.join(command))
    for line in summarize(found.runs, found.comparisons):
        print(line)
    for run in found.runs.left_out:
        print(f"left out: {run.name} ({run.state}): {run.reason}")
    print(found.problem or f"images: {len(found.images)} in {found.page.parent}")
    print(f"page: {found.page}")
