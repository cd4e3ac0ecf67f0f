"""The bar shows what is reported."""

import io

from rich.console import Console

from depthmix.data.progress import Progress, show_progress


def test_the_bar_shows_stage_share_and_tokens() -> None:
    output = io.StringIO()
    with show_progress(Console(file=output, width=100, force_terminal=True)) as report:
        report(Progress("check"))
        report(Progress("encode", 1_000_000, 8_000_000, 250_000, 3))
        report(Progress("encode", 8_000_000, 8_000_000, 2_000_000, 24))
    text = output.getvalue()
    assert "tokenising" in text
    assert "8/8" in text
    assert "2.0 M tokens" in text


def test_a_total_that_nobody_knows() -> None:
    output = io.StringIO()
    with show_progress(Console(file=output, width=100, force_terminal=True)) as report:
        report(Progress("encode", 3_000_000, 0, 500_000, 3))
    assert "3/?" in output.getvalue()
