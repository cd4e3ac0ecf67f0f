"""How far a preparation is, as a value, and as a bar on a console.

Owns the words and the look. Knows nothing of what is being prepared.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import rich.console

Stage = Literal["check", "tokenizer", "encode", "ready"]


class Progress(NamedTuple):
    """One report: the stage, and what is done of it."""

    stage: Stage
    """check (sources), tokenizer (training), encode, ready (it was there already)."""
    done_bytes: int = 0
    """Of the sources, on disk."""
    total_bytes: int = 0
    """0 where nobody knows."""
    num_tokens: int = 0
    num_documents: int = 0


Report = Callable[[Progress], None]

LABELS = {
    "check": "checking the sources",
    "tokenizer": "training a tokenizer",
    "encode": "tokenising",
    "ready": "already prepared",
}


@contextmanager
def show_progress(console: "rich.console.Console") -> Iterator[Report]:
    """A bar with an estimate of the time left; gives the function to report to."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("MB  {task.fields[tokens]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    tasks = {}
    with bar:

        def report(progress: Progress) -> None:
            total = progress.total_bytes // 10**6 or None
            done = progress.done_bytes // 10**6
            tokens = f"{progress.num_tokens / 1e6:.1f} M tokens" if progress.num_tokens else ""
            if progress.stage not in tasks:
                for task in tasks.values():
                    bar.stop_task(task)
                    bar.update(task, visible=False)
                # what an earlier run has done must not count as this run's speed
                label = LABELS[progress.stage]
                tasks[progress.stage] = bar.add_task(
                    label, total=total, completed=done, tokens=tokens
                )
            bar.update(tasks[progress.stage], completed=done, total=total, tokens=tokens)

        yield report
