"""Ranges of axes, and the round numbers on them."""

import math
from collections.abc import Iterable

NUM_TICKS = 7


def spread_range(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """From the least to the largest value, and a little room; never empty."""
    values = list(values)
    low, high = min(values), max(values)
    pad = share * (high - low) or 0.05 * abs(low) or 1.0
    return low - pad, high + pad


def list_ticks(low: float, high: float) -> list[float]:
    """Round numbers inside a range, at most about `NUM_TICKS` of them."""
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]


def list_log_ticks(low: float, high: float) -> list[float]:
    """Numbers such as 1, 2, 5, 10 between two logarithms; round ones where those are too few."""
    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    steps = [k * 10.0**power for power in powers for k in (1, 2, 5)]
    inside = [x for x in steps if low <= math.log(x) <= high]
    return inside if len(inside) > 1 else list_ticks(math.exp(low), math.exp(high))


def tell_tick(value: float, width: int | float) -> str:
    """A tick's number, with the digits that tell it from its neighbours."""
    digits = max(0, 1 - math.floor(math.log10(width)))
    return f"{value:.{digits}f}" if digits < 7 and abs(value) < 1e6 else f"{value:.3g}"
