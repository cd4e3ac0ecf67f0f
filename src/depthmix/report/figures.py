"""Charts as PNG images, by matplotlib, which is loaded only here and only when it is needed."""

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from depthmix.describe import format_number
from depthmix.files import replace_file
from depthmix.plot import COLORS, INK, PALE
from depthmix.report.shapes import Chart, Grid, Panel, Series
from depthmix.report.ticks import list_log_ticks, spread_range

MARKERS = ("o", "s", "D")
PANEL_INCHES = 5.2, 4.2
MOST_COLUMNS = 3
DPI = 120


def draw_figures(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write an image for each chart, named by its key."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("images need matplotlib: pip install 'depthmix[plot]'") from error
    paths = []
    for chart in charts:
        columns = min(MOST_COLUMNS, len(chart.panels))
        rows = -(-len(chart.panels) // columns)
        width, height = PANEL_INCHES
        size = (columns * width, rows * height + 0.7)
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        for number, panel in enumerate(chart.panels, 1):
            axes = figure.add_subplot(rows, columns, number)
            if isinstance(panel, Grid):
                _draw_grid(axes, panel)
            else:
                _draw_panel(axes, panel)
            axes.set_title(_plain(panel.title), loc="left", color=INK, fontsize=11)
            axes.set_xlabel(_plain(panel.x_label), color=INK, fontsize=10)
            axes.set_ylabel(_plain(panel.y_label), color=INK, fontsize=10)
            axes.tick_params(which="both", length=0, labelcolor=INK, labelsize=9)
        figure.suptitle(_plain(chart.title), x=0.01, ha="left", color=INK, fontsize=13)
        if handles := [_make_handle(series) for series in chart.list_legend()]:
            shared = {"ncols": min(4, len(handles)), "frameon": False, "fontsize": 9}
            figure.legend(handles=handles, loc="outside lower center", labelcolor=INK, **shared)
        path = folder / f"{chart.key}.png"
        image = io.BytesIO()
        figure.savefig(image)
        replace_file(path, image.getvalue())
        paths.append(path)
    return paths


def _draw_panel(axes: Any, panel: Panel) -> None:
    if panel.log_x:
        every = [math.log(point.x) for series in panel.series for point in series.points]
        low, high = spread_range(every)
        ticks = list_log_ticks(low, high)
        axes.set_xscale("log")
        axes.set_xlim(math.exp(low), math.exp(high))
        axes.set_xticks(ticks, [format_number(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    for series in panel.series:
        xs, ys = [point.x for point in series.points], [point.y for point in series.points]
        axes.plot(xs, ys, **_choose_style(series))


def _draw_grid(axes: Any, grid: Grid) -> None:
    import numpy as np

    values = np.full((len(grid.rows), len(grid.columns)), np.nan)
    for cell in grid.cells:
        values[grid.rows.index(cell.row), grid.columns.index(cell.column)] = cell.value
    axes.imshow(values, cmap="Blues_r", aspect="auto")
    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    axes.spines[:].set_visible(False)
    low, high = np.nanmin(values), np.nanmax(values)
    for cell in grid.cells:
        place = grid.columns.index(cell.column), grid.rows.index(cell.row)
        dark = cell.value < (low + high) / 2 or low == high
        axes.text(
            *place, f"{cell.value:.4f}", ha="center", va="center", color="white" if dark else INK
        )


def _choose_style(series: Series) -> dict[str, Any]:
    color, marker = COLORS[series.color % len(COLORS)], series.color // len(COLORS) % len(MARKERS)
    styles = {
        "dots": {"linestyle": "", "marker": MARKERS[marker], "markersize": 5, "alpha": 0.8},
        "star": {"linestyle": "", "marker": "*", "markersize": 15, "markeredgecolor": "white"},
        "line": {"linewidth": 1.6},
        "guide": {"linewidth": 1.0, "linestyle": ":", "color": INK},
    }
    return {"color": color, **styles[series.style]}


def _make_handle(series: Series) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=_plain(series.name), **_choose_style(series))


def _plain(text: str) -> str:
    # a dollar would start a formula, and a label that begins with _ is left out
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
