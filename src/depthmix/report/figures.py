"""Charts, and how to draw them: as an image file, and as SVG inside a page.

Defines shapes, colours and marks. matplotlib draws both from the same data; it is loaded only here,
and only to draw. Independent of runs.
"""

import io
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

from depthmix.files import hash_content, replace_file
from depthmix.units import format_number

# Okabe and Ito's colours, also distinct for colour-blind readers; dark ones first
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444")
INK, FAINT, PALE, PAPER = "#333333", "#6a6a6a", "#dddddd", "#ffffff"
# a page has its own colour for each, in light and dark mode
PAGE_COLORS = {color: f"var(--c{i})" for i, color in enumerate(COLORS)}
PAGE_COLORS |= {INK: "var(--ink)", FAINT: "var(--faint)", PALE: "var(--rule)"}
PAGE_COLORS |= {PAPER: "var(--paper)"}
# for the first seven series, the next seven, …; each with its sign in a legend
MARKERS, MARKER_SIGNS = ("o", "s", "D"), "●■◆"
LINES, LINE_SIGNS = ("-", "--", ":"), ("━━", "╍╍", "┅┅")
PANEL_INCHES = 4.8, 3.7
MOST_COLUMNS = 3
STEPS = 1, 2, 5, 10
"""Steps between the ticks of an axis, times a power of ten."""
MOST_LETTERS = 44
"""Entries in a line of an image's legend: as many as fit below one panel."""
DPI = 140
NUM_COLORS = 256
"""Colours of an image: its few own, and their blends at edges."""


class Point(NamedTuple):
    """A place, and its tooltip."""

    x: int | float
    y: int | float
    tip: str = ""


class Series(NamedTuple):
    """Points of one colour: dots, a star, a line, or a pale guide for the eye."""

    name: str
    """Name in the legend; empty for no entry."""
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
    """A heat map, with columns and rows in order."""

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

    @property
    def digest(self) -> str:
        """Equal for charts that show the same; numbers count by their first six digits."""
        plain = json.dumps(self, default=str)
        short = re.sub(r"-?\d+\.\d+(e[-+]?\d+)?", lambda number: f"{float(number[0]):.6g}", plain)
        return hash_content(short)

    def list_legend(self) -> list[Series]:
        """The first series of each name, of all panels, by colour."""
        every = [s for panel in self.panels if isinstance(panel, Panel) for s in panel.series]
        first = {series.name: series for series in reversed(every) if series.name}
        return sorted(first.values(), key=lambda series: (series.color, series.name))


class NoMatplotlib(ValueError):  # noqa: N818
    """matplotlib is not installed."""


def save_image(chart: Chart, path: Path) -> None:
    """Write a chart as a PNG image, with its title and its legend."""
    # four panels form a square
    columns = 2 if len(chart.panels) == 4 else min(MOST_COLUMNS, len(chart.panels))
    rows = -(-len(chart.panels) // columns)
    width, height = columns * PANEL_INCHES[0], rows * PANEL_INCHES[1]
    legend = chart.list_legend()
    names = [textwrap.fill(series.name, MOST_LETTERS) for series in legend]
    # in inches: a letter, and the mark beside a name with some room
    longest = max((len(line) for name in names for line in name.splitlines()), default=0)
    num_columns = max(1, min(4, len(names), int(width / (0.09 * longest + 0.7))))
    num_lines = sum(name.count("\n") + 1 for name in names) / num_columns
    with _style():
        figure = _start_figure(width, height + 0.5 + 0.22 * num_lines)
        for number, panel in enumerate(chart.panels, 1):
            _draw(figure.add_subplot(rows, columns, number), panel)
        figure.suptitle(chart.title, x=0.01, ha="left", color=INK, fontsize=13)
        if legend:
            handles = [_make_handle(*pair) for pair in zip(legend, names, strict=True)]
            look = {"ncols": num_columns, "frameon": False, "fontsize": 10, "labelcolor": INK}
            figure.legend(handles=handles, loc="outside lower center", **look)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=DPI)
    replace_file(path, _shrink(image, chart.digest))


def read_digest(path: Path) -> str | None:
    """The digest of the chart that an image shows; None if it has none."""
    found = re.search(rb"tEXtDigest\0([0-9a-f]{64})", path.read_bytes())
    return None if found is None else found[1].decode()


def _shrink(image: io.BytesIO, digest: str) -> bytes:
    """The same image in few colours, with a third of the bytes, and with a digest."""
    # matplotlib writes images with it
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("Digest", digest)
    small = io.BytesIO()
    plain = Image.open(image).convert("RGB")
    plain.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(
        small, format="png", optimize=True, dpi=(DPI, DPI), pnginfo=info
    )
    return small.getvalue()


def save_images(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write an image for each chart, named by its key."""
    paths = []
    for chart in charts:
        paths.append(folder / f"{chart.key}.png")
        save_image(chart, paths[-1])
    return paths


def draw_chart(chart: Chart) -> str:
    """A chart's panels and its legend as HTML, coloured by the page, with tooltips."""
    panels = "\n".join(_draw_inline(p, f"{chart.key}-{i}") for i, p in enumerate(chart.panels))
    entries = "".join(_draw_entry(series) for series in chart.list_legend())
    legend = f'<ul class="legend">{entries}</ul>' if entries else ""
    return f'<div class="panels">{panels}</div>{legend}'


def _draw_inline(panel: Panel | Grid, name: str) -> str:
    """A panel as SVG for a page; `name` makes its ids distinct from other panels'."""
    with _style({"svg.hashsalt": name}):
        figure = _start_figure(*PANEL_INCHES)
        tips = _draw(figure.add_subplot(facecolor="none"), panel)
        drawn = io.BytesIO()
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(drawn, format="svg", facecolor="none", metadata=unsaid)
    root = ElementTree.fromstring(drawn.getvalue())
    # a style for strokes, which would apply to the whole page
    root.remove(root[0])
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = dict(_translate_attributes(element))
        element.tail = None
        if element.tag != "text":
            element.text = None
    for group in root.iter("g"):
        gid = group.attrib.pop("id", "")
        if gid in tips:
            group.set("class", gid.split()[0])
            # definitions with an id are not drawn by themselves
            marks = (e for e in group.iter() if e.tag in ("use", "path") and "id" not in e.attrib)
            for mark, tip in zip(marks, tips[gid], strict=True):
                if tip:
                    ElementTree.SubElement(mark, "title").text = tip
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img"}
    root.set("aria-label", panel.title or f"{panel.y_label} by {panel.x_label}")
    return ElementTree.tostring(root, encoding="unicode")


def _translate_attributes(element: ElementTree.Element) -> Iterator[tuple[str, str]]:
    for name, value in element.attrib.items():
        if name == "style":
            if element.tag == "path" and "id" in element.attrib:
                # a shared mark takes its style from each place that uses it
                continue
            # the page sets the font
            value = re.sub(r"font-family:[^;]*;? ?", "", value)
            value = re.sub(r"#[0-9a-f]{6}", lambda c: PAGE_COLORS.get(c[0], c[0]), value)
        elif name in ("d", "x", "y", "transform"):
            value = re.sub(r"\d+\.\d{2,}", lambda n: f"{float(n[0]):.1f}", " ".join(value.split()))
        yield name.rpartition("}")[2], value


def _draw_entry(series: Series) -> str:
    signs = LINE_SIGNS if series.style == "line" else MARKER_SIGNS
    sign, color = signs[_count_rounds(series) % len(signs)], series.color % len(COLORS)
    return f'<li><b class="c{color}" aria-hidden="true">{sign}</b>{escape(series.name)}</li>'


@contextmanager
def _style(more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """The same look on every machine, regardless of the user's settings."""
    try:
        from matplotlib import style
    except ImportError as error:
        raise NoMatplotlib("pictures need matplotlib: pip install 'depthmix[plot]'") from error
    # a dollar sign does not begin a formula; text in a drawing stays text
    ours = {"text.parse_math": False, "svg.fonttype": "none", **(more or {})}
    with style.context(["default", ours]):
        yield


def _start_figure(width: int | float, height: int | float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw(axes: Any, panel: Panel | Grid) -> dict[str, list[str]]:
    """Fill a pair of axes; returns the tooltips of each group of marks, by its name."""
    axes.set_title(panel.title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlabel(panel.x_label, color=INK, fontsize=10)
    axes.set_ylabel(panel.y_label, color=INK, fontsize=10)
    axes.tick_params(which="both", length=0, labelcolor=FAINT, labelsize=9.5)
    return _draw_grid(axes, panel) if isinstance(panel, Grid) else _draw_panel(axes, panel)


def _draw_panel(axes: Any, panel: Panel) -> dict[str, list[str]]:
    axes.margins(0.06)
    if panel.log_x:
        axes.set_xscale("log")
    # nothing lies outside, so nothing is clipped
    axes.grid(color=PALE, linewidth=0.6, clip_on=False)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    tips = {}
    for number, series in enumerate(panel.series):
        xs, ys, words = zip(*series.points, strict=True)
        kind, look = series.style, _choose_look(series)
        if kind in ("line", "guide"):
            axes.plot(xs, ys, clip_on=False, **look)
            # a line is too thin to point at: its points have marks that appear under the pointer
            kind, look = "spot", {**_choose_look(series._replace(style="dots")), "alpha": 0}
        if kind != "spot" or any(words):
            gid = f"{kind} {number}"
            axes.plot(xs, ys, clip_on=False, gid=gid, **look)
            tips[gid] = list(words)
    _choose_ticks(axes, panel.log_x)
    return tips


def _choose_ticks(axes: Any, log_x: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    for axis in (axes.yaxis,) if log_x else (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, steps=STEPS))
        # each tick shows its whole number, without an offset
        axis.get_major_formatter().set_useOffset(False)
    if log_x:
        low, high = axes.get_xlim()
        locator = LogLocator(subs=(1, 2, 5))
        if sum(low <= tick <= high for tick in locator.tick_values(low, high)) < 3:
            locator = MaxNLocator(7, steps=STEPS)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: format_number(value)))
        axes.xaxis.set_minor_locator(NullLocator())


def _draw_grid(axes: Any, grid: Grid) -> dict[str, list[str]]:
    from matplotlib.patches import Rectangle

    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    axes.set_xlim(-0.5, len(grid.columns) - 0.5)
    # the first row is at the top
    axes.set_ylim(len(grid.rows) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    low, high = (pick(cell.value for cell in grid.cells) for pick in (min, max))
    tips = {}
    for number, cell in enumerate(grid.cells):
        x, y = grid.columns.index(cell.column), grid.rows.index(cell.row)
        good, gid = 1.0 if high == low else (high - cell.value) / (high - low), f"cell {number}"
        look = {"facecolor": COLORS[0], "alpha": 0.1 + 0.9 * good, "linewidth": 0}
        place = (x - 0.49, y - 0.49)
        axes.add_patch(Rectangle(place, 0.98, 0.98, clip_on=False, gid=gid, **look))
        words = {"color": PAPER, "fontweight": "bold"} if good > 0.5 else {"color": INK}
        axes.text(x, y, f"{cell.value:.4f}", ha="center", va="center", fontsize=10, **words)
        tips[gid] = [cell.tip]
    return tips


def _choose_look(series: Series) -> dict[str, Any]:
    marker, line = (kinds[_count_rounds(series) % len(kinds)] for kinds in (MARKERS, LINES))
    dot = {"linestyle": "", "markeredgecolor": PAPER, "markeredgewidth": 0.6}
    looks: dict[str, dict[str, Any]] = {
        "dots": {**dot, "marker": marker, "markersize": 6, "alpha": 0.8},
        "star": {**dot, "marker": "*", "markersize": 15},
        "line": {"linewidth": 1.7, "linestyle": line},
        "guide": {"linewidth": 1.0, "linestyle": (0, (2, 3)), "color": FAINT},
    }
    return {"color": COLORS[series.color % len(COLORS)], **looks[series.style]}


def _count_rounds(series: Series) -> int:
    """How often all colours have been used before this one."""
    return series.color // len(COLORS)


def _make_handle(series: Series, name: str) -> Any:
    from matplotlib.lines import Line2D

    # matplotlib leaves out labels that begin with _
    name = f" {name}" if name.startswith("_") else name
    return Line2D([], [], label=name, **_choose_look(series))
