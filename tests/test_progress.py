"""A bar shows what it is told, and only of the stage that runs."""

import io

import pytest
from rich.console import Console

from depthmix.progress import show_bar


def open_console(*, terminal: bool = True) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=100, force_terminal=terminal), output


def test_the_bar_shows_label_words_and_the_last_stage() -> None:
    console, output = open_console()
    with show_bar(console) as bar:
        bar.update("reading", 1, 2, "1 of 2", stage="read")
        bar.update("writing", 0, None, "0 of ?", stage="write")
        bar.update("writing fast", 3, 4, "3 of 4", stage="write")
        console.print("a line above it")
    last = output.getvalue().rpartition("\r")[2]
    assert "a line above it" in output.getvalue()
    assert "writing fast" in last
    assert "3 of 4" in last
    assert "reading" not in last


def test_earlier_progress_does_not_count_as_speed() -> None:
    console, _ = open_console()
    now = 100.0
    console.get_time = lambda: now
    with show_bar(console) as bar:
        bar.update("going on", 900, 1000)
        for done in (910, 920):
            now += 10
            bar.update("going on", done, 1000)
        (task,) = bar._display.tasks
        assert task.speed == pytest.approx(1.0)
        assert task.time_remaining == pytest.approx(80)


def test_a_bar_may_be_gone_when_it_is_done() -> None:
    console, output = open_console(terminal=False)
    with show_bar(console, gone=True) as bar:
        bar.update("counting", 1, 2)
    assert output.getvalue().strip() == ""


def test_a_pipe_gets_no_bar() -> None:
    console, output = open_console(terminal=False)
    with show_bar(console) as bar:
        bar.update("counting", 1, 2, "1 of 2")
        console.print("a line")
    assert output.getvalue() == "a line\n"
