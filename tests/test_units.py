"""Numbers are short, and never wrong by more than their last digit."""

import pytest

from depthmix.units import (
    format_bytes,
    format_clock,
    format_count,
    format_difference,
    format_estimate,
    format_flops,
    format_number,
    format_power,
    format_seconds,
    format_tflops,
)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (832, "832"),
        (999, "999"),
        (1000, "1.00 K"),
        (9994, "9.99 K"),
        (9996, "10.0 K"),
        (60_500_000, "60.5 M"),
        (999_499, "999 K"),
        (999_999, "1.00 M"),
        (1.23e9, "1.23 G"),
        (4e24, "4.00 Y"),
        (4e30, "4.00e+06 Y"),
    ],
)
def test_numbers_have_three_digits(value: float, written: str) -> None:
    assert format_number(value) == written


def test_units() -> None:
    assert format_flops(1.234e9) == "1.23 GFLOP"
    assert format_flops(12) == "12 FLOP"
    assert format_bytes(512) == "512 B"
    assert format_bytes(12.6 * 2**20) == "12.6 MiB"
    assert format_bytes(1023.9 * 2**20) == "1.00 GiB"


def test_powers_of_ten_are_short() -> None:
    values = (1e12, 1.6e13, 4.321e15, 1e5, 250, 1e-7)
    written = [format_power(value) for value in values]
    assert written == ["1e12", "1.6e13", "4.32e15", "1e5", "250", "1e-07"]


def test_measured_times() -> None:
    values = (0.01234, 1.5, 0.0, 119.4, 121, 7100, 7300, 360_000)
    written = [format_seconds(value) for value in values]
    assert written[:4] == ["12.3 ms", "1.5 s", "0 ms", "119 s"]
    assert written[4:] == ["2.02 min", "118 min", "2.028 h", "100 h"]


def test_estimated_times_are_coarse() -> None:
    seconds = (0.2, 89, 91, 3600, 4 * 3600)
    assert [format_estimate(s) for s in seconds] == ["1 s", "89 s", "2 min", "60 min", "4.0 h"]


def test_times_that_run() -> None:
    assert [format_clock(s) for s in (0.4, 65, 3600)] == ["0:00:00", "0:01:05", "1:00:00"]


def test_nouns_are_counted() -> None:
    told = [format_count(count, "step") for count in (0, 1, 2, 12345)]
    assert told == ["0 steps", "1 step", "2 steps", "12,345 steps"]


@pytest.mark.parametrize(
    ("percent", "words"),
    [(-1.24, "1.2 % lower than"), (0.05, "0.1 % higher than"), (-0.049, "equal to")],
)
def test_differences(percent: float, words: str) -> None:
    assert format_difference(percent) == words


def test_speeds() -> None:
    assert [format_tflops(x) for x in (3.1e14, 1.23e10, 1e6)] == [
        "310 TFLOP/s",
        "0.0123 TFLOP/s",
        "1e-06 TFLOP/s",
    ]
