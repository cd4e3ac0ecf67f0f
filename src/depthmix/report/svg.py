"""Charts as drawings inside a page: plain SVG text, styled by the page, with a word at each point.

Knows nothing of files. Every text that is not its own is escaped.
"""

import math
from collections.abc import Callable, Iterator
from html import escape

from depthmix.describe import format_number
from depthmix.plot import COLORS
from depthmix.report.shapes import Chart, Grid, Panel, Point, Series
from depthmix.report.ticks import list_log_ticks, list_ticks, spread_range, tell_tick

WIDTH, HEIGHT = 400, 310
LEFT, RIGHT, TOP, BOTTOM = 60, WIDTH - 16, 30, HEIGHT - 46
"""Where the axes lie."""

# outlines about the origin: the marks of the first seven variants, of the next, …
OUTLINES = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "M0 -5L5 0L0 5L-5 0Z",
)
STAR = "M" + "L".join(
    f"{r * math.sin(k * math.pi / 5):.1f} {-r * math.cos(k * math.pi / 5):.1f}"
    for k in range(10)
    for r in ((9.0, 3.8)[k % 2],)
)


def draw_chart(chart: Chart) -> str:
    """A chart's panels, and their legend."""
    panels = "\n".join(draw_panel(panel) for panel in chart.panels)
    entries = "".join(_draw_entry(series) for series in chart.list_legend())
    legend = f'<ul class="legend">{entries}</ul>' if entries else ""
    return f'<div class="panels">{panels}</div>{legend}'


def draw_panel(panel: Panel | Grid) -> str:
    """One pair of axes, or a heat map."""
    inside = _draw_grid(panel) if isinstance(panel, Grid) else _draw_axes(panel)
    label = escape(panel.title or f"{panel.y_label} by {panel.x_label}")
    turned = f"translate(13 {(TOP + BOTTOM) / 2:.0f}) rotate(-90)"
    return "\n".join(
        (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
            _write(LEFT, 16, panel.title, "start", kind="title"),
            _write((LEFT + RIGHT) / 2, HEIGHT - 6, panel.x_label, kind="label"),
            f'<g transform="{turned}">{_write(0, 0, panel.y_label, kind="label")}</g>',
            *inside,
            "</svg>",
        )
    )


def _draw_axes(panel: Panel) -> Iterator[str]:
    points = [point for series in panel.series for point in series.points]
    scale: Callable[[float], float] = math.log if panel.log_x else float
    left, right = spread_range(scale(point.x) for point in points)
    low, high = spread_range(point.y for point in points)

    def place(x: int | float, y: int | float) -> tuple[float, float]:
        across, up = (scale(x) - left) / (right - left), (y - low) / (high - low)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)

    for tick in list_ticks(low, high):
        _, y = place(points[0].x, tick)
        yield _rule(LEFT, y, RIGHT, y)
        yield _write(LEFT - 6, y + 4, tell_tick(tick, high - low), "end")
    for tick in list_log_ticks(left, right) if panel.log_x else list_ticks(left, right):
        x, _ = place(tick, low)
        yield _rule(x, TOP, x, BOTTOM)
        words = format_number(tick) if panel.log_x else tell_tick(tick, right - left)
        yield _write(x, BOTTOM + 16, words)
    for series in panel.series:
        yield from _draw_series(series, [place(point.x, point.y) for point in series.points])


def _draw_series(series: Series, places: list[tuple[float, float]]) -> Iterator[str]:
    if series.style in ("line", "guide"):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline class="{series.style} {_name_color(series)}" points="{path}"/>'
    for point, (x, y) in zip(series.points, places, strict=True):
        if point.tip:
            yield _draw_mark(series, point, x, y)


def _draw_mark(series: Series, point: Point, x: int | float, y: int | float) -> str:
    # a line is too thin to be pointed at: its points have marks that show when they are
    kind = {"dots": "dot", "star": "dot star", "line": "spot"}[series.style]
    outline = STAR if series.style == "star" else _choose_outline(series)
    return (
        f'<path class="{kind} {_name_color(series)}" d="{outline}"'
        f' transform="translate({x:.1f} {y:.1f})"><title>{escape(point.tip)}</title></path>'
    )


def _draw_grid(grid: Grid) -> Iterator[str]:
    width, height = (RIGHT - LEFT) / len(grid.columns), (BOTTOM - TOP) / len(grid.rows)
    low, high = (pick(cell.value for cell in grid.cells) for pick in (min, max))
    for i, name in enumerate(grid.columns):
        yield _write(LEFT + (i + 0.5) * width, BOTTOM + 16, name)
    for i, name in enumerate(grid.rows):
        yield _write(LEFT - 6, TOP + (i + 0.5) * height + 4, name, "end")
    for cell in grid.cells:
        x = LEFT + grid.columns.index(cell.column) * width
        y = TOP + grid.rows.index(cell.row) * height
        good = 1.0 if high == low else (high - cell.value) / (high - low)
        size = f'width="{width - 2:.1f}" height="{height - 2:.1f}"'
        yield (
            f'<g class="cell{" good" if good > 0.5 else ""}"><title>{escape(cell.tip)}</title>'
            f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" {size} fill-opacity="{0.1 + 0.9 * good:.2f}"/>'
            f"{_write(x + width / 2, y + height / 2 + 4, f'{cell.value:.4f}')}</g>"
        )


def _draw_entry(series: Series) -> str:
    mark = f'd="{_choose_outline(series)}" transform="translate(8 6)"'
    mark = f'<path class="dot {_name_color(series)}" {mark}/>'
    if series.style == "line":
        mark = f'<polyline class="line {_name_color(series)}" points="0,6 16,6"/>'
    drawn = f'<svg viewBox="0 0 16 12" width="16" height="12" aria-hidden="true">{mark}</svg>'
    return f"<li>{drawn}{escape(series.name)}</li>"


def _write(
    x: int | float, y: int | float, words: str, anchor: str = "middle", kind: str = ""
) -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _rule(x1: int | float, y1: int | float, x2: int | float, y2: int | float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _choose_outline(series: Series) -> str:
    return OUTLINES[series.color // len(COLORS) % len(OUTLINES)]


def _name_color(series: Series) -> str:
    return f"c{series.color % len(COLORS)}"
