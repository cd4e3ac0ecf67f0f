"""A progress bar with the elapsed and the remaining time.

Training has a display of its own (`train.log`), which must not draw from a thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.console


class Bar:
    """A bar for the current stage; see `show_bar`."""

    def __init__(self, display: Any) -> None:
        self._display, self._stages = display, {}

    def update(
        self,
        label: str,
        done: int | float,
        total: int | float | None,
        words: str = "",
        *,
        stage: str = "",
    ) -> None:
        """Show the progress; `total` is None if unknown.

        A new `stage` begins a new bar.
        """
        shown = {"description": label, "completed": done, "total": total, "words": words}
        if stage not in self._stages:
            for task in self._stages.values():
                self._display.stop_task(task)
                self._display.update(task, visible=False)
            self._stages[stage] = self._display.add_task(**shown)
        self._display.update(self._stages[stage], **shown)


@contextmanager
def show_bar(
    console: "rich.console.Console", *, gone: bool = False, speed_seconds: int | float = 30
) -> Iterator[Bar]:
    """A bar while the block runs, removed afterwards if `gone`.

    The remaining time is estimated from the speed of the last `speed_seconds`.
    """
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    display = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=gone,
        # a file or a pipe gets no bar, only what was done
        disable=not console.is_terminal,
        speed_estimate_period=speed_seconds,
    )
    with display:
        yield Bar(display)
