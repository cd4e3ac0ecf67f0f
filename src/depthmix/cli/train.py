"""`depthmix train`: train a model, or resume a run."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    FIELDS_ALLOWED,
    Data,
    Device,
    Fields,
    RunFieldsCommand,
    app,
    check_device,
    name_flags,
    split_arguments,
)


@app.command(cls=RunFieldsCommand, context_settings=FIELDS_ALLOWED)
def train(
    fields: Fields = None,
    preset: Annotated[
        str | None, typer.Option(help="A preset or .toml file. Default: demo.", metavar="MODEL")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Read model and recipe from this file, such as a run's config.toml.",
            metavar="FILE",
        ),
    ] = None,
    data: Data = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many steps.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Stop after this many tokens.")] = None,
    flops: Annotated[
        float | None, typer.Option(help="Stop after this many executed FLOPs, such as 1e17.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder. Default: runs/MODEL-TIME.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints. Default: one every 3 minutes.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Resume the run in this folder; a longer budget extends it.", metavar="RUN"
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Start from the weights of a run, a checkpoint, or a Hugging Face folder.",
            metavar="RUN|DIR",
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Train a model, or resume a run.

    A preset takes its vocabulary size from the data. Ctrl-C saves and stops; --resume continues as
    if the run had never stopped, even after a kill.

    \b
    For example:
      depthmix train --preset 60m --data data --flops 1e17 train.batch_size=32
      depthmix train --resume runs/60m-20261115-142233 --steps 4000
      depthmix train --from runs/upcycled --data data train.start_capacity=1.0
      depthmix train --config runs/60m-20261115-142233/config.toml train.seed=1
      torchrun --nproc-per-node 8 -m depthmix train --preset 1b --data data
    """
    from depthmix.config.train import BUDGETS
    from depthmix.train.plan import plan_launch

    models, overrides = split_arguments(fields or [], train=True)
    if models:
        raise ValueError(
            f"'{models[0]}' is not a field: write FIELD=VALUE, and name a model with --preset"
        )
    budget = {"steps": steps, "tokens": tokens, "flops": flops}
    both = [f"--{name}" for name, value in budget.items() if value is not None]
    if len(both) > 1:
        raise ValueError(f"give only one of {' and '.join(both)}: a run has one budget")
    check_device(device)
    given = {**budget, "checkpoint_every": checkpoint_every}
    overrides |= {f"train.{name}": value for name, value in given.items() if value is not None}
    sources = {"preset": preset, "config_file": config_file, "start": start, "resume": resume}
    try:
        with name_flags(*BUDGETS, "checkpoint_every", prefix="train."):
            # a mistake is reported before torch is loaded
            plan = plan_launch(overrides, **sources, data=data, out=out, device=device)
            from rich.console import Console

            from depthmix.train.launch import launch

            outcome, _ = launch(plan, Console())
    except KeyboardInterrupt as stopped:
        with suppress(OSError):
            print(str(stopped) or "interrupted", file=sys.stderr, flush=True)
            sys.stdout.flush()
        # not an exception: Python would wait for a checkpoint that is still being written
        os._exit(128 + signal.SIGINT)
    if outcome.state != "finished":
        # what there is to say has been said
        sys.exit(128 + (outcome.signal or 0))
