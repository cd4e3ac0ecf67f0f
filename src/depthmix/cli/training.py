"""Verbs about data and runs."""

import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from depthmix.cli.arguments import (
    FIELDS_ALLOWED,
    PlainCommand,
    RunFieldsCommand,
    app,
    check_device,
    read_length,
    split_arguments,
)

# of weights that know something already: low, and embeddings no higher than matrices; but routers
# and predictors, which mostly do not, must follow a capacity that falls
START_RATES: dict[str, Any] = {
    "train.learning_rate": 3e-4,
    "train.scale_by_width": False,
    "train.router_rate_factor": 10.0,
}


@app.command(cls=PlainCommand)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Text, JSONL, Parquet or token files, folders of them, hf:OWNER/NAME, stdlib.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tokenised data.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer.json, a folder with one, or a Hugging Face name."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Ids of the tokenizer that is trained where none is given (4096)."),
    ] = None,
    val: Annotated[
        list[str] | None,
        typer.Option(help="A source for validation; may be repeated.", metavar="SOURCE"),
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(help="Share of documents for validation, without --val.")
    ] = 0.02,
    text_field: Annotated[str, typer.Option(help="Field of JSONL and Parquet.")] = "text",
    token_dtype: Annotated[
        str | None, typer.Option(help="Type of the ids in a .bin file: uint16 or uint32.")
    ] = None,
    end_token: Annotated[
        int | None, typer.Option(help="Id that ends a document, where it cannot be found.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Threads; one for each core if empty.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which documents are for validation.")] = 0,
) -> None:
    """Tokenise text into a folder that training reads.

    Stopped by whatever, the same command goes on where it was.

    \b
    For example:
      depthmix prepare books/ notes.jsonl --out data --vocab-size 8192
    """
    from rich.console import Console

    from depthmix.data.prepare import prepare as prepare_data
    from depthmix.data.progress import show_progress
    from depthmix.units import format_number

    console = Console()
    with show_progress(console) as report:
        manifest = prepare_data(
            sources,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            val_sources=val or (),
            val_fraction=val_fraction,
            text_field=text_field,
            token_dtype=token_dtype,
            end_token=end_token,
            num_workers=workers,
            seed=seed,
            progress=report,
        )
    parts = [
        f"{name}: {format_number(split.num_tokens)} tokens, documents: {split.num_documents}"
        for name, split in manifest.splits.items()
    ]
    next_command = f"depthmix train --data {shlex.quote(str(out))}"
    for line in (f"{out}: {'; '.join(parts)}", f"next: {next_command}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(cls=RunFieldsCommand, context_settings=FIELDS_ALLOWED)
def train(
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIELD=VALUE", help="Fields to change.", show_default=False),
    ] = None,
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
    data: Annotated[
        Path | None,
        typer.Option(help="A folder made by 'prepare'; Python's standard library if empty."),
    ] = None,
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
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
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
    from depthmix.config import RunConfig, load_config, load_run_config

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
        config = RunConfig.from_overrides(load_config(name), {**overrides, **given})
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


@app.command(cls=PlainCommand)
def runs(
    folder: Annotated[
        Path, typer.Argument(help="A run, or a folder to look for runs in.", metavar="FOLDER")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """List runs in a table: how far each came, and how good it is.

    A run that is 'stopped' was killed; it can be resumed as an interrupted one can.
    """
    from depthmix.runs import list_runs, print_runs, to_json

    found = list_runs(folder)
    if as_json:
        print(to_json(found))
    else:
        from rich.console import Console

        print_runs(found, Console())


@app.command()
def demo(
    preset: Annotated[
        str, typer.Option(help="A preset or .toml file with routed blocks.", metavar="MODEL")
    ] = "demo",
    flops: Annotated[float, typer.Option(help="Compute for each model.")] = 1e13,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder made by 'prepare'; Python's standard library if empty."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for both runs; runs/MODEL-TIME if empty.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
) -> None:
    """Train a model and its dense twin at equal compute.

    On Python's own standard library; two CPU cores take a few minutes. Ends with a report of both
    runs, and a page of which tokens the routed model sends through which blocks.
    """
    from rich.console import Console

    from depthmix.demo import run_demo

    options = {"flops": flops, "data": data, "out": out, "device": device}
    if run_demo(Console(), preset=preset, **options) is None:
        raise typer.Exit(130)
