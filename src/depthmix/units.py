"""Format numbers for people: counts, FLOPs, bytes and times."""

from collections.abc import Sequence
from datetime import timedelta

MINUTE, HOUR = 60, 3600


def format_number(value: int | float) -> str:
    """Three digits and a unit: `832`, `60.5 M`."""
    return _scale(value, 1000, ("", "K", "M", "G", "T", "P", "E", "Z", "Y"))


def format_count(count: int, noun: str) -> str:
    """A whole number with its noun: `1 step`, `1,000 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_flops(value: int | float) -> str:
    """Three digits and a unit: `1.23 GFLOP`."""
    number, _, unit = format_number(value).partition(" ")
    return f"{number} {unit}FLOP"


def format_tflops(flops_per_second: int | float) -> str:
    """A speed in the unit that GPUs are compared by: `310 TFLOP/s`."""
    return f"{format_power(flops_per_second / 1e12)} TFLOP/s"


def format_bytes(value: int | float) -> str:
    """Three digits and a binary unit: `12.6 MiB`."""
    return _scale(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def format_power(value: int | float) -> str:
    """Three digits, with a power of ten if the number is long: `250`, `1.3e15`."""
    return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")


def format_difference(percent: int | float) -> str:
    """A difference in words: `1.2 % lower than`, `equal to`."""
    if abs(percent) < 0.05:
        return "equal to"
    return f"{abs(percent):.1f} % {'lower' if percent < 0 else 'higher'} than"


def format_seconds(seconds: int | float) -> str:
    """A measured time in three digits and a unit: `12.3 ms`, `89.5 s`, `3.21 min`, `4 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 2 * MINUTE:
        return f"{seconds:.3g} s"
    return f"{seconds / MINUTE:.3g} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.4g} h"


def format_estimate(seconds: int | float) -> str:
    """An estimated time, coarser if longer: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 1.5 * MINUTE:
        return f"{max(1, round(seconds))} s"
    if seconds < 1.5 * HOUR:
        return f"{round(seconds / MINUTE)} min"
    return f"{seconds / HOUR:.1f} h"


def format_clock(seconds: int | float) -> str:
    """An elapsed time, as on a clock: `0:01:05`."""
    return str(timedelta(seconds=round(seconds)))


def _scale(value: int | float, base: int, units: Sequence[str]) -> str:
    power = 0
    # compared after rounding, so that 999,999 becomes 1.00 M, not 1000 K
    while round(value) >= base and power + 1 < len(units):
        value, power = value / base, power + 1
    decimals = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    digits = f"{value:.{decimals}f}" if value < 10 * base else f"{value:.2e}"
    return f"{digits} {units[power]}".rstrip()
