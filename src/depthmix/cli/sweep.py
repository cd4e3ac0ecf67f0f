"""`depthmix sweep`: train all runs of a plan."""

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthmix.cli.arguments import (
    FIELDS_ALLOWED,
    Data,
    Device,
    RunFieldsCommand,
    app,
    check_device,
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
    from depthmix.sweep.execute import Executor, show_runs
    from depthmix.sweep.folders import find_mixed_data, look_at_runs, measure_speed, print_plan
    from depthmix.sweep.plan import check_vocabulary, expand_plan, load_plan, plan_names
    from depthmix.units import format_count

    names, overrides = split_arguments(arguments or [], train=True)
    if len(names) != 1:
        raise ValueError(f"name one plan: {', '.join(plan_names())}, or a .toml file")
    check_device(device)
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs {jobs} must be at least 1")
    if tflops is not None and not 0 < tflops < float("inf"):
        raise ValueError(f"--tflops {tflops} must be greater than 0")
    plan = load_plan(names[0], size)
    corpus = data or (Path(plan.data) if plan.data else None)
    vocab_size = find_vocab_size(corpus, plan.vocab_size)
    runs = expand_plan(plan, overrides, vocab_size=vocab_size)
    check_vocabulary(runs, vocab_size)
    folder = out or Path("runs", "-".join(filter(None, (plan.name, plan.scale))))
    standings = look_at_runs(runs, folder)
    from rich.console import Console

    console = Console()
    measured = measure_speed(runs, folder)
    is_guess = not tflops and not measured
    tflops = tflops or (plan.tflops if is_guess else None)
    speed = tflops * 1e12 if tflops else measured and measured * (jobs or 1)
    print_plan(plan.description, runs, standings, console, speed, is_guess, num_jobs=jobs or 1)
    if dry_run:
        return
    num_left = sum(standing.todo != "nothing" for standing in standings.values())
    compare = f"compare them with: depthmix report {shlex.quote(str(folder))}"
    if not num_left:
        say(console, f"all runs ({len(runs)}) are already finished; {compare}")
        return
    if corpus is None:
        made = prepare_once(vocab_size, console)
        # without --data, each run finds the default corpus by itself, on any machine
        corpus = made if plan.vocab_size else None
    options: dict[str, Any] = {"data": corpus, "device": device}
    if slurm:
        from depthmix.sweep.cluster import submit_runs

        parameters = parse_parameters(slurm)
        ids = submit_runs(runs, standings, folder, num_jobs=jobs, parameters=parameters, **options)
        look = f"look at them with: depthmix runs {shlex.quote(str(folder))}"
        say(console, f"submitted {format_count(len(ids), 'job')}, {ids[0]} to {ids[-1]}; {look}")
        return
    executor = Executor(runs, standings, folder, num_jobs=jobs or 1, **options)
    with show_runs(console, sum(run.flops for run in runs), num_left) as report:
        summary = executor.run(report)
    named = {"--size": size, "--out": out, "--data": data, "--jobs": jobs, "--device": device}
    given = [text for name, value in named.items() if value for text in (name, str(value))]
    again = shlex.join(["depthmix", "sweep", *(arguments or []), *given])
    mixed = find_mixed_data(runs, folder)
    if mixed:
        say(console, mixed)
    end_sweep(summary, folder, num_left, again, console)
    say(console, f"all runs ({len(runs)}) are finished; {compare}")


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


def end_sweep(
    summary: "Summary", folder: Path, num_left: int, again: str, console: "Console"
) -> None:
    """Report unfinished runs and how to resume them, and exit with the code for that."""
    from depthmix.progress import say
    from depthmix.sweep.folders import LOG

    for name, lines in summary.failed.items():
        say(console, f"{name} failed; {folder / name.partition('/')[2] / LOG} ends with:")
        say(console, "\n".join(f"  {line}" for line in lines))
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
