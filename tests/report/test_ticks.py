"""Ticks are round numbers inside their axis."""

import math

from hypothesis import given
from hypothesis import strategies as st

from depthmix.report.ticks import NUM_TICKS, list_log_ticks, list_ticks, spread_range, tell_tick


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_ticks_are_inside_few_and_even(low: float, width: float) -> None:
    ticks = list_ticks(low, low + width)
    assert 2 <= len(ticks) <= NUM_TICKS + 1
    slack = 1e-9 * (abs(low) + width)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)
    step = ticks[1] - ticks[0]
    digits = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(digits - k) for k in (1, 2, 5)) < 1e-3 + 1e-9 * abs(low) / step
    assert len({tell_tick(tick, width) for tick in ticks}) == len(ticks) or abs(low) >= 1e5


def test_logarithmic_ticks() -> None:
    assert list_log_ticks(math.log(9e5), math.log(2.1e7)) == [1e6, 2e6, 5e6, 1e7, 2e7]
    # too narrow for 1, 2, 5
    assert list_log_ticks(math.log(2.1e6), math.log(4.9e6)) == [2.5e6, 3e6, 3.5e6, 4e6, 4.5e6]


def test_a_range_is_never_empty() -> None:
    assert spread_range([1.0, 2.0]) == (0.94, 2.06)
    assert spread_range([2.0]) == (1.9, 2.1)
    assert spread_range([0.0, 0.0]) == (-1.0, 1.0)


def test_ticks_show_the_digits_that_differ() -> None:
    assert [tell_tick(value, 0.5) for value in (3.7, 3.75)] == ["3.70", "3.75"]
    assert [tell_tick(value, 30) for value in (10.0, 25.0)] == ["10", "25"]
