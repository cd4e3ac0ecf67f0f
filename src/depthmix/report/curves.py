"""Loss curves against compute, as an image and as text for a terminal.

Chooses the visible part of a curve, and draws it in characters. Independent of runs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from depthmix.report.figures import Chart, Panel, Point, Series, save_image
from depthmix.units import format_power

Points = Sequence[tuple[int | float, int | float | None]]
"""(x, loss), in any order; a loss that was not finite may be None."""
Pair = tuple[float, float]

DASHES = (1, 1), (4, 8), (1, 3), (8, 12)
# bits of a braille cell: the left column from the top, then the right one
BRAILLE_BITS = (0, 1, 2, 6), (3, 4, 5, 7)


def plot_losses(
    curves: Mapping[str, Points],
    path: str | Path,
    *,
    title: str = "",
    x_label: str = "training FLOPs",
    y_label: str = "loss",
) -> None:
    """Draw loss curves as an image, each named with its last value."""
    view = _choose_view(curves)
    series = []
    for i, (name, points) in enumerate(view.smooth.items()):
        seen = [Point(x, y) for x, y in points if x >= view.x_range[0]]
        series.append(Series(f"{name}  {points[-1][1]:.3f}", i, "line", seen))
    panel = Panel("", x_label, y_label, series, log_x=view.log)
    save_image(Chart("losses", title, "", [panel]), Path(path))


def draw_text_plot(
    curves: Mapping[str, Points],
    width: int = 72,
    height: int = 16,
    *,
    x_label: str = "training FLOPs",
    y_label: str = "loss",
) -> str:
    """The same curves in braille characters, for a terminal; each with its own dashes."""
    view = _choose_view(curves)
    side = min(max(map(len, view.smooth)), max(1, width // 3 - 8))
    labels = [f" {name:.{side}} {points[-1][1]:.3f}" for name, points in view.smooth.items()]
    # bottom, middle and top
    ticks = [f"{sum(view.y_range[k] for k in ends) / 2:.3g}" for ends in ((0, 0), (0, 1), (1, 1))]
    margin, side = max(map(len, ticks)), max(map(len, labels))
    columns = max(8, width - margin - side - 2)
    cells = [[0] * columns for _ in range(height)]
    for i, points in enumerate(view.smooth.values()):
        num_on, period = DASHES[i % len(DASHES)]
        dots = _trace([view.place(*point) for point in points], 2 * columns, 4 * height)
        for k, (column, row) in enumerate(dots):
            if k % period < num_on:
                cells[row // 4][column // 2] |= 1 << BRAILLE_BITS[column % 2][row % 4]
    lines = [
        f"{'':{margin}} │{''.join(chr(0x2800 + cell) if cell else ' ' for cell in row)}"
        for row in cells
    ]
    for row, tick in zip((height - 1, height // 2, 0), ticks, strict=True):
        lines[row] = f"{tick:>{margin}} ┤" + lines[row][margin + 2 :]
    ends = _spread([view.place(*points[-1])[1] for points in view.smooth.values()], 1.001 / height)
    for label, end in zip(labels, ends, strict=True):
        lines[min(height - 1, int((1 - end) * height))] += label
    first, last = map(format_power, view.x_range)
    middle = f"{x_label}, log scale" if view.log else x_label
    room = max(0, columns - len(first) - len(last))
    axis = f"{'':{margin}} └{'─' * columns}", f"{'':{margin}}  {first}{middle:^{room}.{room}}{last}"
    return "\n".join(line.rstrip() for line in (y_label, *lines, *axis))


class _View(NamedTuple):
    """The visible part of the curves, and its scale."""

    smooth: dict[str, list[Pair]]
    log: bool
    x_range: Pair
    y_range: Pair

    def place(self, x: float, y: float) -> Pair:
        """A point as shares of the width and of the height."""
        scale = math.log if self.log else float
        (left, right), (low, high) = map(scale, self.x_range), self.y_range
        return (scale(x) - left) / (right - left), (y - low) / (high - low)


def _choose_view(curves: Mapping[str, Points]) -> _View:
    kept: dict[str, list[Pair]] = {}
    for name, points in curves.items():
        numbers = [(float(x), math.nan if y is None else float(y)) for x, y in points]
        # a logarithmic axis has no place for a measurement before the first step
        if found := sorted((x, y) for x, y in numbers if x > 0 and math.isfinite(y)):
            kept[name] = found
    if not kept:
        raise ValueError("there is nothing to draw: no curve has a point with a finite loss")
    smooth = {name: _smooth(points) for name, points in kept.items()}
    ends = [points[-1] for points in smooth.values()]
    first, last = min(points[0][0] for points in kept.values()), max(ends)[0]
    log = last >= 30 * first
    # the fall of the first steps would flatten the rest
    every = [point for points in smooth.values() for point in points]
    seen = [y for x, y in every if x >= last / 50] + [y for _, y in ends]
    low, high = min(seen), max(seen)
    pad = 0.05 * (high - low) or 0.05 * abs(low) or 1.0
    left = min(x for x, y in every if y <= high)
    if left == last:
        left, last, log = left - 1, last + 1, False
    return _View(smooth, log, (left, last), (low - pad, high + pad))


def _smooth(points: list[Pair]) -> list[Pair]:
    """A running mean over about a fiftieth of a long curve, and less at its steep start."""
    if len(points) < 100:
        return points
    xs, sums = [x for x, _ in points], [0.0, *accumulate(y for _, y in points)]
    smooth = []
    for i, x in enumerate(xs):
        reach = min(i // 8, len(xs) // 100)
        first, stop = i - reach, min(i + reach + 1, len(xs))
        smooth.append((x, (sums[stop] - sums[first]) / (stop - first)))
    return smooth


def _trace(places: list[Pair], num_columns: int, num_rows: int) -> Iterator[tuple[int, int]]:
    """Dots of the line through the places, left to right; row 0 is the top one."""
    previous = None
    for (u, v), (u_next, v_next) in pairwise([*places, places[-1]]):
        num_dots = 1 + int(abs(u_next - u) * num_columns + abs(v_next - v) * num_rows)
        for k in range(num_dots):
            across, up = u + (u_next - u) * k / num_dots, v + (v_next - v) * k / num_dots
            dot = round(across * (num_columns - 1)), round((1 - up) * (num_rows - 1))
            if dot != previous and 0 <= dot[0] < num_columns and 0 <= dot[1] < num_rows:
                yield dot
            previous = dot


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Shares of the height, moved apart to at least `gap` so that labels do not overlap."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved, top = list(heights), -math.inf
    for i in order:
        moved[i] = top = max(moved[i], top + gap)
    top = 1 + gap
    for i in reversed(order):
        moved[i] = top = min(moved[i], top - gap)
    return moved
