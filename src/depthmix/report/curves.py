"""A run's records as curves that can be looked at; training losses as few points, each a mean.

Knows records only, as `metrics.jsonl` holds them.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CURVE_POINTS = 40


def thin_curve(
    train: Sequence[Mapping[str, Any]], most: int = CURVE_POINTS
) -> tuple[tuple[float, float], ...]:
    """(share of the run, loss): at most `most` means over stretches of equal length.

    A stretch stands at the mean of its records, so that no loss seems to come before its time.
    Losses that are not finite are left out.
    """
    if not train:
        return ()
    last = train[-1]["step"]
    stretches: dict[int, list[tuple[float, float]]] = {}
    for record in train:
        loss = record.get("loss")
        if loss is not None and math.isfinite(loss):
            # rounded up: what ends a stretch belongs to it
            number = -(-record["step"] * most // last)
            stretches.setdefault(number, []).append((record["step"] / last, float(loss)))
    means = (
        (statistics.fmean(share for share, _ in part), statistics.fmean(loss for _, loss in part))
        for part in stretches.values()
    )
    return tuple(means)


def follow_number(
    records: Iterable[Mapping[str, Any]], name: str, num_steps: int
) -> tuple[tuple[float, float], ...]:
    """(share of the run, number) of every record that has it."""
    found = ((record["step"] / num_steps, record.get(name)) for record in records)
    return tuple((share, float(value)) for share, value in found if value is not None)
