"""`depthmix train`: train a model, or resume a run."""

import os
import signal
import sys
from contextlib import suppress
from functools import partial
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
    read_length,
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
    from depthmix.config import load_run_config, make_run_config, make_start_config
    from depthmix.config.presets import sets_vocabulary
    from depthmix.config.train import BUDGETS

    models, overrides = split_arguments(fields or [], train=True)
    if models:
        raise ValueError(
            f"'{models[0]}' is not a field: write FIELD=VALUE, and name a model with --preset"
        )
    budget = {"steps": steps, "tokens": tokens, "flops": flops}
    given = {**budget, "checkpoint_every": checkpoint_every}
    given = {f"train.{name}": value for name, value in given.items() if value is not None}
    longer = {name: v for name, v in {**overrides, **given}.items() if name[6:] in BUDGETS}
    others = longer.keys() != {**overrides, **given}.keys()
    both = [f"--{name}" for name, value in budget.items() if value is not None]
    if len(both) > 1:
        raise ValueError(f"give only one of {' and '.join(both)}: a run has one budget")
    if resume is not None and (others or preset or config_file or out or start):
        raise ValueError(
            "--resume takes the model, its fields and the folder from the run, so leave them out; "
            "only a longer budget (--steps, --tokens or --flops) may be given"
        )
    if start is not None and preset is not None:
        raise ValueError(f"--from {start} already sets the model: leave out --preset {preset}")
    if config_file is not None and (preset or start):
        other = "--preset" if preset else "--from"
        raise ValueError(f"--config {config_file} already sets the model: leave out {other}")
    check_device(device)
    config = None
    name = preset or "demo"
    named = partial(name_flags, *BUDGETS, "checkpoint_every", prefix="train.")
    with named():
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
        with named():
            config = make_start_config(source.config, {**overrides, **given})

    label = Path(name).stem if name.endswith(".toml") else name
    plan = Launch(run=config, name=label, data=data, out=out, resume=resume, device=device)
    fits = config_file is None and source is None and "vocab_size" not in overrides
    plan = plan._replace(
        start=source, budget=longer, fit_vocabulary=fits and not sets_vocabulary(name)
    )
    try:
        with named():
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
