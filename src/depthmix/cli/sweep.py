"""`depthmix sweep`: train all runs of a plan."""

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthmix.cli.arguments import (
    FIELDS_ALLOWED,
    Data,
    Device,
    RunFieldsCommand,
    app,
    check_device,
    name_flags,
    split_arguments,
)

if TYPE_CHECKING:
    from rich.console import Console

    from depthmix.sweep.execute import Summary


@app.command(cls=RunFieldsCommand, context_settings=FIELDS_ALLOWED)
def sweep(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PLAN|FIELD=VALUE",
            help="A built-in plan or a .toml file, and fields to change in all of its runs.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="The size of the plan: smoke or gpu. Default: smoke.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for all runs. Default: runs/PLAN-SIZE.")
    ] = None,
    data: Data = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Runs in parallel. Default: 1 on this machine, all with --slurm."),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            help="TFLOP/s of all jobs together, to estimate the time. Default: measured, or "
            "guessed by the plan until a run has finished."
        ),
    ] = None,
    device: Device = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            help="Submit the runs to SLURM, with a submitit parameter such as timeout_min=600; "
            "may be repeated. Needs the extra 'slurm'.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and exit.")] = (False),
) -> None:
    """Train all runs of a plan, or resume them.

    Ctrl-C saves and stops every run; the same command resumes. Finished runs are kept.

    \b
    For example:
      depthmix sweep isoflop --dry-run
      depthmix sweep isoflop --size gpu --data data --out runs/isoflop --jobs 4
    """
    from depthmix.progress import say
    from depthmix.sweep.execute import Jobs
    from depthmix.sweep.launch import open_sweep
    from depthmix.sweep.plan import load_plan, plan_names
    from depthmix.units import format_count

    names, overrides = split_arguments(arguments or [], train=True)
    if len(names) != 1:
        raise ValueError(f"name one plan: {', '.join(plan_names())}, or a .toml file")
    check_device(device)
    with name_flags("tflops", jobs="num_jobs"):
        means = Jobs(num_jobs=jobs, device=device, tflops=tflops)
    plan = load_plan(names[0], size)
    corpus = data or (Path(plan.data) if plan.data else None)
    vocab_size = find_vocab_size(corpus, plan.vocab_size)
    opened = open_sweep(plan, overrides, vocab_size=vocab_size, folder=out)
    from rich.console import Console

    console = Console()
    opened.show(console, means)
    if dry_run:
        return
    folder, num_runs = shlex.quote(str(opened.folder)), len(opened.runs)
    compare = f"compare them with: depthmix report {folder}"
    if not opened.num_left:
        say(console, f"all runs ({num_runs}) are already finished; {compare}")
        return
    if corpus is None:
        made = prepare_once(vocab_size, console)
        # without --data, each run finds the default corpus by itself, on any machine
        corpus = made if plan.vocab_size else None
    means = replace(means, data=corpus)
    if slurm:
        ids = opened.submit(means, parse_parameters(slurm))
        look = f"look at them with: depthmix runs {folder}"
        say(console, f"submitted {format_count(len(ids), 'job')}, {ids[0]} to {ids[-1]}; {look}")
        return
    summary = opened.train(console, means)
    named = {"--size": size, "--out": out, "--data": data, "--jobs": jobs, "--device": device}
    given = [text for name, value in named.items() if value for text in (name, str(value))]
    end_sweep(
        summary, opened.num_left, shlex.join(["depthmix", "sweep", *(arguments or []), *given])
    )
    say(console, f"all runs ({num_runs}) are finished; {compare}")


def parse_parameters(texts: Sequence[str]) -> dict[str, int | str]:
    """Parse `timeout_min=600` for submitit: whole numbers as int, all else as text."""
    from depthmix.config.fields import parse_override

    pairs = map(parse_override, texts)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def find_vocab_size(data: Path | None, default: int | None) -> int:
    """The vocabulary size of a prepared folder, or of the default corpus, prepared or not."""
    if data is None:
        from depthmix.data.prepare import DEFAULT_VOCAB_SIZE

        return default or DEFAULT_VOCAB_SIZE
    from depthmix.data.shards import Corpus

    return Corpus.open(data).vocab_size


def prepare_once(vocab_size: int, console: "Console") -> Path:
    """Prepare the default corpus once, so that parallel runs do not each do it."""
    from depthmix.data.default import prepare_default
    from depthmix.data.prepare import show_progress

    with show_progress(console) as report:
        return prepare_default(vocab_size, progress=report)


def end_sweep(summary: "Summary", num_left: int, again: str) -> None:
    """Exit with the code for a sweep that did not finish, and say how to resume it."""
    if summary.signal is not None:
        message = f"stopped with {len(summary.finished)} of {num_left} runs finished"
        print(f"{message}; resume with: {again}", file=sys.stderr, flush=True)
        if summary.signal == signal.SIGINT:
            raise typer.Exit(130)
        sys.exit(128 + summary.signal)
    if summary.failed:
        message = f"{len(summary.failed)} of {num_left} runs failed twice"
        print(f"depthmix: {message}; try them again with: {again}", file=sys.stderr, flush=True)
        raise typer.Exit(1)
