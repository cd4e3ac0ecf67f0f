"""How far a piece of work is: a bar on a console, with the time it took and what is left of it.

Owns the look. Knows nothing of what is done. Training has a display of its own (`train.log`), which
must not draw from a thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.console


class Bar:
    """Shows the latest stage; see `show_bar`."""

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
        """Say what is done of how much; `total` is None if unknown.

        Another `stage` is other work, and begins a bar of its own.
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
    """A bar while the block runs, `gone` afterwards or not.

    The time left follows from the speed of the last `speed_seconds`.
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
        # a file or a pipe gets what was done, not the bar
        disable=not console.is_terminal,
        speed_estimate_period=speed_seconds,
    )
    with display:
        yield Bar(display)
