"""A curve of many records is thinned to few means, and stays where it was."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix.report.curves import thin_curve


def test_few_records_stay_as_they_are() -> None:
    train = [{"step": 5, "loss": 7.0}, {"step": 10, "loss": 6.0}, {"step": 12, "loss": 5.5}]
    assert thin_curve(train) == ((5 / 12, 7.0), (10 / 12, 6.0), (1.0, 5.5))
    assert thin_curve([]) == ()


def test_a_stretch_is_a_mean_of_both() -> None:
    train = [{"step": step, "loss": 10.0 - step} for step in range(1, 9)]
    assert thin_curve(train, most=2) == ((2.5 / 8, 7.5), (6.5 / 8, 3.5))


def test_what_is_not_finite_is_left_out() -> None:
    train = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": math.inf}]
    train += [{"step": 4}, {"step": 5, "loss": 1.0}]
    assert thin_curve(train) == ((0.2, 2.0), (1.0, 1.0))


@given(st.lists(st.floats(0.1, 20), min_size=1, max_size=300), st.integers(1, 50))
def test_means_keep_the_mean_and_the_order(losses: list[float], most: int) -> None:
    train = [{"step": 3 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    curve = thin_curve(train, most)
    assert 1 <= len(curve) <= min(most, len(losses))
    shares = [share for share, _ in curve]
    assert shares == sorted(set(shares))
    assert 0 < shares[0] <= shares[-1] <= 1
    assert min(losses) - 1e-9 <= min(y for _, y in curve)
    assert max(losses) + 1e-9 >= max(y for _, y in curve)
    if len(losses) % most == 0:
        mean = sum(y for _, y in curve) / len(curve)
        assert mean == pytest.approx(sum(losses) / len(losses))
