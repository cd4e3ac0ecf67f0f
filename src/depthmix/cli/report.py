"""`depthmix report`: compare runs on a page with charts. Does not load torch."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import PlainCommand, app


@app.command(cls=PlainCommand)
def report(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder to search for runs, or a file of records.", metavar="DIR"),
    ] = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the page and its images. Default: DIR/report.", metavar="DIR"
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Also add each finished run to this file, a line for each.", metavar="FILE.jsonl"
        ),
    ] = None,
) -> None:
    """Compare the runs in a folder, on a page with charts.

    Fits isoFLOP curves, finds their minima and compares them with the dense ones, at equal FLOPs
    by two conventions and at equal wall clock. Runs that are not finished are listed and left out.
    For example:

        depthmix report runs/isoflop
    """
    from depthmix.report.page import write_report
    from depthmix.report.records import append_records

    command = ["depthmix", "report", str(folder), *(["--out", str(out)] if out else [])]
    found = write_report(folder, out, shlex.join(command))
    for line in found.summary:
        print(line)
    for run in found.runs.left_out:
        print(f"left out: {run.name} ({run.state}): {run.reason}")
    print(found.problem or f"images: {len(found.images)} in {found.page.parent}")
    print(f"page: {found.page}")
    if records is not None:
        added = append_records(found.runs.rows, records)
        print(f"records: {added} added to {records}")
