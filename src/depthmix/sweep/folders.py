"""The state of planned runs, read from their folders: what is left, the speed, and failures."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from depthmix.config import RunConfig
from depthmix.config.fields import flatten
from depthmix.runs.folder import RunDir
from depthmix.sweep.plan import PlannedRun
from depthmix.units import (
    format_count,
    format_estimate,
    format_flops,
    format_number,
    format_power,
    format_tflops,
)

if TYPE_CHECKING:
    from rich.console import Console

LOG = "log.txt"
# the configuration of a run, for the process that trains it
PLANNED = "planned.toml"

# enough for the last lines of a log or of metrics
_TAIL_BYTES = 2**16

Todo = Literal["start", "resume", "nothing"]
STATES: Mapping[Todo, str] = {"start": "new", "resume": "to resume", "nothing": "finished"}


class Standing(NamedTuple):
    """The state of one run."""

    todo: Todo
    flops: int | float
    """FLOPs spent on training so far."""


def look_at_runs(runs: Sequence[PlannedRun], folder: Path) -> dict[str, Standing]:
    """The state of each run by name; refuses folders that contain something else."""
    found, problems = {}, []
    for run in runs:
        try:
            found[run.name] = _look_at_run(run, folder / run.folder)
        except (OSError, ValueError) as error:
            problems.append(str(error))
    if len(problems) > 1:
        head = f"{len(problems)} folders cannot be resumed, so nothing was started:"
        raise ValueError("\n  ".join([head, *problems]))
    if problems:
        raise ValueError(problems[0])
    return found


def print_plan(
    description: str,
    runs: Sequence[PlannedRun],
    standings: Mapping[str, Standing],
    console: "Console",
    speed: int | float | None,
    is_guess: bool = False,
    *,
    num_jobs: int,
) -> None:
    """Print a row per run, and the total; `speed` is that of all jobs together."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column("run", overflow="fold")
    for title in ("parameters", "steps", "FLOPs", "time", "state"):
        table.add_column(title, justify="right")
    for run in runs:
        seconds = speed and run.flops / speed * num_jobs
        table.add_row(
            run.name,
            format_number(run.num_parameters),
            f"{run.num_steps}",
            format_power(run.flops),
            format_estimate(seconds) if seconds else "-",
            STATES[standings[run.name].todo],
        )
    left = [run for run in runs if standings[run.name].todo != "nothing"]
    flops = sum(run.flops - standings[run.name].flops for run in left)
    ways = sorted({run.config.train.flops_convention for run in runs})
    total = f"{format_count(len(runs), 'run')}, {len(left)} to train, {format_flops(flops)}"
    total += f" ({', '.join(ways)})"
    if speed and left:
        total += f", about {format_estimate(flops / speed)} at {format_tflops(speed)}"
        total += ", as the plan guesses" if is_guess else ""
    elif left:
        total += "; the time is known when a run has finished, or from --tflops"
    for line in filter(None, (description, table, total)):
        console.print(line, highlight=False, markup=False, soft_wrap=isinstance(line, str))


def _look_at_run(run: PlannedRun, path: Path) -> Standing:
    if not (path / "config.toml").exists():
        RunDir(path).check_free()
        return Standing("start", 0)
    opened = RunDir.open(path)
    try:
        present = RunConfig.from_dict(opened.read_config())
    except ValueError as error:
        raise ValueError(f"'{path}' cannot be read: {error}") from error
    if present != run.config:
        names = ", ".join(_list_differences(present, run.config)[:3])
        raise ValueError(
            f"'{path}' was trained with other fields ({names}): choose another --out, or remove it"
        )
    if is_finished(path, run.num_steps):
        return Standing("nothing", run.flops)
    if opened.is_locked():
        raise ValueError(f"another process is training in '{path}': wait for it to end")
    return Standing("resume", read_flops(path))


def _list_differences(present: RunConfig, planned: RunConfig) -> list[str]:
    before, after = flatten(present.to_dict()), flatten(planned.to_dict())
    differing = [name for name in after if before.get(name) != after[name]]
    return [f"{name.removeprefix('model.')} = {before.get(name)}" for name in differing]


def is_finished(path: Path, num_steps: int) -> bool:
    """Whether a run has done all of its steps."""
    try:
        status = RunDir(path).read_json("status.json")
    except ValueError:
        return False
    return status.get("state") == "finished" and status.get("step", 0) >= num_steps


def read_flops(path: Path) -> int | float:
    """FLOPs that a run has spent, from its last line of metrics; cheap enough to poll."""
    # the first line may be cut off, and the last one incomplete
    for line in reversed(_read_tail(path / "metrics.jsonl").split(b"\n")[:-1]):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("kind") == "train":
            return record.get("flops") or 0
    return 0


def measure_speed(runs: Sequence[PlannedRun], folder: Path) -> float | None:
    """Mean FLOP/s of the finished runs that were started once; None if there are none.

    Includes startup and validation, to estimate the waiting time.
    """
    total_flops, total_seconds = 0.0, 0.0
    for run in runs:
        opened = RunDir(folder / run.folder)
        if not is_finished(opened.path, run.num_steps):
            continue
        try:
            starts = opened.read_starts()
            ended = opened.read_json("status.json")["updated"]
            if len(starts) == 1:
                began = datetime.fromisoformat(starts[0]["time"])
                total_seconds += (datetime.fromisoformat(ended) - began).total_seconds()
                total_flops += run.flops
        except (KeyError, TypeError, ValueError):
            # an estimate is not worth an error
            continue
    return total_flops / total_seconds if total_seconds > 0 else None


def find_mixed_data(runs: Sequence[PlannedRun], folder: Path) -> str | None:
    """A warning if runs were trained on different data and cannot be compared."""
    used: dict[str, str] = {}
    for run in runs:
        try:
            start = RunDir(folder / run.folder).read_starts()[0]
            used.setdefault(str(start["data"]["hash"]), run.name)
        except (LookupError, TypeError, ValueError):
            continue
    if len(used) < 2:
        return None
    first, other, *_ = used.values()
    return (
        f"{first} and {other} were trained on different data, so their losses cannot be compared: "
        f"choose another --out for each data"
    )


def read_log_end(path: Path, num_lines: int = 3) -> list[str]:
    """The last lines that a run's process has printed, without empty ones."""
    text = _read_tail(path / LOG).decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-num_lines:]


def _read_tail(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""
