"""A table of runs, with their progress and losses. Does not import torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from depthmix import flops
from depthmix.config import ModelConfig
from depthmix.runs.folder import RunDir, find_runs
from depthmix.runs.losses import TRAINED, read_metric
from depthmix.units import format_estimate, format_number, format_power

if TYPE_CHECKING:
    from rich.console import Console

Record = Mapping[str, Any]
"""One record of metrics."""

TITLES = ("run", "model", "step", "state", "FLOP", "loss", "top-k", "causal", "tok/s", "age")


class RunSummary(NamedTuple):
    """A run in numbers; None for those that are not known yet."""

    path: str
    state: str = "broken"
    reason: str = ""
    """Why the run ended, or what is wrong with a broken folder."""
    started: str = ""
    updated: str = ""
    step: int = 0
    num_steps: int | None = None
    num_parameters: int | None = None
    flops: int | float | None = None
    """FLOPs spent on training."""
    loss: int | float | None = None
    val_loss_topk: int | float | None = None
    val_loss_causal: int | float | None = None
    tokens_per_second: int | float | None = None

    @property
    def order(self) -> tuple[str, str]:
        """Sort key: the time of the first start."""
        return self.started, self.path


def list_runs(folder: str | Path) -> list[RunSummary]:
    """Every run in a folder and below, broken ones included, in the order of their starts."""
    return sorted((run for run, _ in read_runs(folder)), key=lambda run: run.order)


def read_runs(folder: str | Path) -> Iterator[tuple[RunSummary, Sequence[Record]]]:
    """Every run in a folder and below, in any order, with its metrics.

    A broken run has no metrics.
    """
    paths = list(find_runs(folder))
    if not paths:
        raise ValueError(f"there is no run in '{folder}': make one with 'depthmix train'")
    yield from map(_read_run, paths)


def _read_run(path: Path) -> tuple[RunSummary, Sequence[Record]]:
    try:
        run = RunDir.open(path)
        if "model" not in (config := run.read_config()):
            raise ValueError("its config.toml has no table [model]")
        status, starts = run.read_json("status.json"), run.read_starts()
        records = run.read_metrics()
        last = {record.get("kind"): record for record in records}
        train, val, state = last.get("train", {}), last.get("val", {}), status.get("state")
        if state in (None, "running"):
            # a killed process cannot update its status
            state = "running" if run.is_locked() else "stopped"
        summary = RunSummary(
            path=str(path),
            state=state,
            reason=status.get("reason", ""),
            started=starts[0].get("time", "") if starts else "",
            updated=status.get("updated", ""),
            step=max(status.get("step", 0), train.get("step", 0)),
            num_steps=status.get("num_steps"),
            num_parameters=flops.num_parameters(ModelConfig.from_dict(config["model"])).total,
            flops=train.get("flops"),
            loss=train.get("loss"),
            val_loss_topk=read_metric(val, TRAINED),
            val_loss_causal=read_metric(val, ("causal",)),
            tokens_per_second=train.get("tokens_per_second"),
        )
        return summary, records
    except (OSError, ValueError) as error:
        return RunSummary(str(path), reason=str(error)), ()
    except (AttributeError, LookupError, TypeError) as error:
        reason = f"its files are damaged: {error}"
        return RunSummary(str(path), reason=reason), ()


def to_json(runs: Sequence[RunSummary]) -> str:
    """A JSON list with one object per run."""
    return json.dumps([run._asdict() for run in runs], indent=2)


def print_runs(runs: Sequence[RunSummary], console: "Console") -> None:
    """Print a table of runs, followed by notes on single ones."""
    rows = [TITLES, *map(_list_cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # if the names do not fit beside the numbers, they are printed above them
    fits = sum(widths) + 2 * (len(widths) - 1) <= console.width
    for i, (name, *cells) in enumerate(rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        line = "  ".join((f"{name:{widths[0]}}", *cells)) if fits else f"{name}\n{' '.join(cells)}"
        style = "bold" if i == 0 else ""
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
    for run in runs:
        if run.reason:
            console.print(f"\n{run.path}: {run.reason}", highlight=False, markup=False)


def _list_cells(run: RunSummary) -> tuple[str, ...]:
    losses = run.loss, run.val_loss_topk, run.val_loss_causal
    return (
        run.path,
        "-" if run.num_parameters is None else format_number(run.num_parameters),
        f"{run.step}/{run.num_steps or '?'}",
        run.state,
        "-" if run.flops is None else format_power(run.flops),
        *("-" if loss is None else f"{loss:.3f}" for loss in losses),
        "-" if run.tokens_per_second is None else format_number(run.tokens_per_second),
        _format_age(run.started),
    )


def _format_age(started: str) -> str:
    if not started:
        return "-"
    return format_estimate((datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds())
