"""How far a preparation is, as a value, and in words beside a bar.

Knows nothing of what is being prepared, nor of how a bar looks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

from depthmix.progress import show_bar

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
    with show_bar(console) as bar:

        def report(progress: Progress) -> None:
            done, total = progress.done_bytes // 10**6, progress.total_bytes // 10**6 or None
            words = f"{done}/{total or '?'} MB"
            if progress.num_tokens:
                words += f"  {progress.num_tokens / 1e6:.1f} M tokens"
            bar.update(LABELS[progress.stage], done, total, words, stage=progress.stage)

        yield report
