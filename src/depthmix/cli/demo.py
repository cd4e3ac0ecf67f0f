"""`depthmix demo`: train a routed model and its dense twin, and compare them."""

from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import Data, Device, app, check_device, name_flags


@app.command()
def demo(
    preset: Annotated[
        str, typer.Option(help="A preset or .toml file with routed blocks.", metavar="MODEL")
    ] = "demo",
    flops: Annotated[
        float,
        typer.Option(help="Training FLOPs for each model. Default: 2e12.", show_default=False),
    ] = 2e12,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for both runs. Default: runs/MODEL-TIME.")
    ] = None,
    device: Device = None,
) -> None:
    """Train a model and its dense twin at equal compute.

    Trains on Python's standard library, in about five minutes on two CPU cores. Ends with a report
    of both runs and a page that shows which tokens the routed model sends through which blocks.
    """
    check_device(device)
    from rich.console import Console

    from depthmix.demo import run_demo

    options = {"flops": flops, "data": data, "out": out, "device": device}
    with name_flags("flops", prefix="train."):
        runs = run_demo(Console(), preset=preset, **options)
    if runs is None:
        raise typer.Exit(130)
