"""Loss curves against compute for the eye, as an image and as text.

Owns what is shown and how. Knows nothing of runs, and no torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

Points = Sequence[tuple[int | float, int | float | None]]
"""(x, loss), in any order; a loss that was not finite may be None."""
Pair = tuple[float, float]

# Okabe and Ito's colours, told apart by colour-blind eyes too; dark ones first
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
LINES, DASHES = ("-", "--", ":", "-."), ((1, 1), (4, 8), (1, 3), (8, 12))
INK, PALE = "#333333", "#DDDDDD"
# of a braille cell's left column from the top, then of its right one
BRAILLE_BITS = (0, 1, 2, 6), (3, 4, 5, 7)


def plot_losses(
    curves: Mapping[str, Points],
    path: str | Path,
    *,
    title: str = "",
    x_label: str = "training FLOPs",
    y_label: str = "loss",
) -> None:
    """Draw loss curves, 800 x 500 pixels, each named with its last value at its end."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator
    except ImportError as error:
        raise ValueError("images need matplotlib: pip install 'depthmix[plot]'") from error
    view = _choose_view(curves)
    figure = Figure(figsize=(8, 5), dpi=100, layout="constrained")
    axes = figure.add_subplot(xlim=view.x_range, ylim=view.y_range)
    if view.log:
        axes.set_xscale("log")
        few = view.x_range[1] < 100 * view.x_range[0]
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.xaxis.set_minor_formatter(lambda value, place: "")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: _format_x(value)))
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(which="both", length=0, labelcolor=INK, labelsize=10)
    axes.set_xlabel(x_label, color=INK, fontsize=11)
    axes.set_ylabel(y_label, color=INK, fontsize=11)
    # a dollar would start a formula
    axes.set_title(title.replace("$", r"\$"), loc="left", color=INK, fontsize=13, pad=12)
    heights = _spread([view.place(*points[-1])[1] for points in view.smooth.values()], gap=0.05)
    for i, (name, points) in enumerate(view.smooth.items()):
        color, line = COLORS[i % len(COLORS)], LINES[i // len(COLORS) % len(LINES)]
        if points != view.curves[name]:
            axes.plot(*zip(*view.curves[name], strict=True), color=color, linewidth=0.6, alpha=0.3)
        axes.plot(*zip(*points, strict=True), color=color, linestyle=line, linewidth=2)
        axes.plot(*points[-1], "o", color=color, markersize=5, clip_on=False)
        label = f"{name}  {points[-1][1]:.3f}".replace("$", r"\$")
        axes.text(1.015, heights[i], label, color=color, va="center", transform=axes.transAxes)
    figure.savefig(path)


def draw_text_plot(
    curves: Mapping[str, Points],
    width: int = 72,
    height: int = 16,
    *,
    x_label: str = "training FLOPs",
    y_label: str = "loss",
) -> str:
    """The same curves in braille characters, for a terminal; each has dashes of its own."""
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
    first, last = map(_format_x, view.x_range)
    middle = f"{x_label}, log scale" if view.log else x_label
    room = max(0, columns - len(first) - len(last))
    axis = f"{'':{margin}} └{'─' * columns}", f"{'':{margin}}  {first}{middle:^{room}.{room}}{last}"
    return "\n".join(line.rstrip() for line in (y_label, *lines, *axis))


class _View(NamedTuple):
    """What of the curves is in sight, and on which scale."""

    curves: dict[str, list[Pair]]
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
        # a logarithm has no place for what was measured before the first step
        if found := sorted((x, y) for x, y in numbers if x > 0 and math.isfinite(y)):
            kept[name] = found
    if not kept:
        raise ValueError("there is nothing to draw: no curve has a point with a finite loss")
    smooth = {name: _smooth(points) for name, points in kept.items()}
    ends = [points[-1] for points in smooth.values()]
    first, last = min(points[0][0] for points in kept.values()), max(ends)[0]
    log = last >= 30 * first
    # the fall of the first steps would flatten all that follows
    every = [point for points in smooth.values() for point in points]
    seen = [y for x, y in every if x >= last / 50] + [y for _, y in ends]
    low, high = min(seen), max(seen)
    pad = 0.05 * (high - low) or 0.05 * abs(low) or 1.0
    left = min(x for x, y in every if y <= high)
    if left == last:
        left, last, log = left - 1, last + 1, False
    return _View(kept, smooth, log, (left, last), (low - pad, high + pad))


def _smooth(points: list[Pair]) -> list[Pair]:
    """A running mean over about a fiftieth of a long curve, less at its steep start."""
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


def _format_x(value: int | float) -> str:
    return f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
