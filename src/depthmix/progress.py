"""What a terminal shows while something takes long: sentences, a line that goes, a progress bar.

Training has a display of its own (`train.log`), which must not draw from a thread.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.console

LINE_WIDTH = 79

# if a reader of stdout exits, as `| tee` does on Ctrl-C, the work continues; rich raises the second
READER_GONE = (OSError, SystemExit)


def say(console: "rich.console.Console", sentence: str) -> None:
    """Print a sentence without wrapping or markup, above the bar if there is one."""
    with suppress(*READER_GONE):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def show_line(what: str) -> Iterator[Callable[[], object] | None]:
    """Yields a function that shows a line on stderr until the block ends, or None if stderr is not
    a terminal."""
    screen = sys.stderr
    if not screen.isatty():
        yield None
        return

    written = False

    def write() -> None:
        nonlocal written
        written = True
        screen.write(f"\r{what[:LINE_WIDTH]:<{LINE_WIDTH}}")
        screen.flush()

    try:
        yield write
    finally:
        if written:
            screen.write(f"\r{'':<{LINE_WIDTH}}\r")
            screen.flush()


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
