"""What a chart is made of, as data: panels of series of points, and heat maps.

Knows nothing of runs, nor of how a chart is drawn.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple


class Point(NamedTuple):
    """A place, and what to say of it."""

    x: int | float
    y: int | float
    tip: str = ""


class Series(NamedTuple):
    """Points of one colour: dots, a star, a line, or a pale guide for the eye."""

    name: str
    """Shown in the legend; empty for what needs no entry of its own."""
    color: int
    style: Literal["dots", "star", "line", "guide"]
    points: Sequence[Point]


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False


class Cell(NamedTuple):
    """A field of a heat map."""

    column: str
    row: str
    value: float
    tip: str


class Grid(NamedTuple):
    """A heat map; columns and rows in their order."""

    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Cell]


class Chart(NamedTuple):
    """A figure: one or more panels side by side."""

    key: str
    """Names its file."""
    title: str
    caption: str
    panels: Sequence[Panel | Grid]

    def list_legend(self) -> list[Series]:
        """The first series of each name, of all panels, by colour."""
        every = [s for panel in self.panels if isinstance(panel, Panel) for s in panel.series]
        first = {series.name: series for series in reversed(every) if series.name}
        return sorted(first.values(), key=lambda series: (series.color, series.name))
