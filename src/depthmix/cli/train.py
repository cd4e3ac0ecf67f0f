"""The verb that trains a model, or goes on with a run."""

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
    read_length,
    split_arguments,
)


@app.command(cls=RunFieldsCommand, context_settings=FIELDS_ALLOWED)
def train(
    fields: Fields = None,
    preset: Annotated[
        str | None, typer.Option(help="A preset or .toml file; 'demo' if empty.", metavar="MODEL")
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="Model and recipe as in this file: a run's config.toml, or one like it.",
            metavar="FILE",
        ),
    ] = None,
    data: Data = None,
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Stop after so many tokens.")] = None,
    flops: Annotated[
        float | None, typer.Option(help="Stop after so many FLOPs, such as 1e17.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; runs/MODEL-TIME if empty.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; every 3 minutes if empty.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder.", metavar="RUN")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Begin with the weights of a run, a checkpoint, or a Hugging Face folder.",
            metavar="RUN|DIR",
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Train a model, or go on with a run.

    Ctrl-C saves and stops; --resume goes on, also after a kill, as if nothing had happened.

    \b
    For example:
      depthmix train --preset 60m --data data --flops 1e17 train.batch_size=32
      depthmix train --resume runs/60m-20261115-142233
      depthmix train --from runs/upcycled --data data train.start_capacity=1.0
      depthmix train --config runs/60m-20261115-142233/config.toml train.seed=1
      torchrun --nproc-per-node 8 -m depthmix train --preset 1b --data data
    """
    from depthmix.config import START_RATES, RunConfig, load_run_config, make_run_config

    models, overrides = split_arguments(fields or [], train=True)
    if models:
        raise ValueError(
            f"'{models[0]}' is no field: write FIELD=VALUE, and name a model with --preset"
        )
    budget = {"steps": steps, "tokens": tokens, "flops": flops}
    given = {**budget, "checkpoint_every": checkpoint_every}
    given = {f"train.{name}": value for name, value in given.items() if value is not None}
    if resume is not None and (given or overrides or preset or config_file or out or start):
        raise ValueError(
            "--resume goes on with a run as it was: leave out the model, its fields, the budget "
            "and --out"
        )
    if start is not None and preset is not None:
        raise ValueError(f"the model of {start} is known: leave out --preset {preset}")
    if config_file is not None and (preset or start):
        other = "--preset" if preset else "--from"
        raise ValueError(f"--config {config_file} says what the model is: leave out {other}")
    check_device(device)
    config = None
    name = preset or "demo"
    if config_file is not None:
        name = config_file.resolve().parent.name
        config = load_run_config(config_file).override({**overrides, **given})
    elif resume is None and start is None:
        config = make_run_config(name, {**overrides, **given})
    from rich.console import Console

    from depthmix.models import open_model
    from depthmix.train.launch import Launch, launch

    source = None
    if start is not None:
        name = start.resolve().name
        source = open_model(start, max_seq_len=read_length(overrides))
        config = RunConfig.from_overrides(source.config, {**START_RATES, **overrides, **given})

    label = Path(name).stem if name.endswith(".toml") else name
    plan = Launch(run=config, name=label, data=data, out=out, resume=resume, device=device)
    plan = plan._replace(start=source)
    try:
        outcome, _ = launch(plan, Console())
    except KeyboardInterrupt as stopped:
        with suppress(OSError):
            print(str(stopped) or "interrupted", file=sys.stderr, flush=True)
            sys.stdout.flush()
        # not by an exception: Python would wait for a checkpoint that is still being written
        os._exit(128 + signal.SIGINT)
    if outcome.state != "finished":
        # what there is to say has been said
        sys.exit(128 + (outcome.signal or 0))
