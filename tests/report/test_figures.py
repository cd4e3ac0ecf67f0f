"""Every chart is drawn, as an image and in a page, and its points lie where they belong."""

import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthmix.report.figures import (
    COLORS,
    PAGE_COLORS,
    Cell,
    Chart,
    Grid,
    NoMatplotlib,
    Panel,
    Point,
    Series,
    draw_chart,
    read_digest,
    save_image,
    save_images,
)

POINTS = [Point(1e6, 3.0, "a"), Point(1e7, 4.0, "b")]
GRID = Grid("$t", "x", "y", ["0.1", "0.2"], ["1"], [Cell("0.1", "1", 3.5, "one")])
EVIL = "</svg><script>alert(1)</script> & \"quoted\" 'too'"
TEMPLATE = Path(__file__).parents[2] / "src/depthmix/report/template.html"


def make_chart(key: str, *panels: Panel | Grid) -> Chart:
    return Chart(key, r"$\no formula$", "", panels)


def read_colors(path: Path) -> set[tuple[int, ...]]:
    from matplotlib.image import imread

    pixels = (255 * imread(path)[..., :3]).round().astype(int)
    return {tuple(color) for color in pixels.reshape(-1, 3).tolist()}


def draw(*panels: Panel | Grid) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{draw_chart(make_chart('k', *panels))}</div>")


def find_marks(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    groups = [group for group in root.iter("g") if group.get("class") == kind]
    return [mark for group in groups for mark in group.iter("path" if kind == "cell" else "use")]


def find_places(root: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    return [(float(mark.attrib["x"]), float(mark.attrib["y"])) for mark in find_marks(root, kind)]


def list_words(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter("text")]


def test_every_chart_becomes_an_image(tmp_path: Path) -> None:
    series = [
        Series("dense", 0, "line", POINTS),
        Series("_hidden", 1, "star", POINTS[:1]),
        Series("", 9, "dots", POINTS),
        Series("", 0, "guide", POINTS),
    ]
    charts = [
        make_chart("one", Panel("$", "x", "y", series, log_x=True)),
        make_chart("two", *(Panel("t", "x", "y", series) for _ in range(4)), GRID),
        make_chart("point", Panel("t", "x", "y", [Series("s", 0, "dots", POINTS[:1])], True)),
    ]
    paths = save_images(charts, tmp_path)
    assert paths == [tmp_path / "one.png", tmp_path / "two.png", tmp_path / "point.png"]
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= read_colors(paths[0])
    assert (0x00, 0x72, 0xB2) in read_colors(paths[1])
    assert (0xD5, 0x5E, 0x00) not in read_colors(paths[2])


def test_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw_it in (lambda chart: save_images([chart], tmp_path), draw_chart):
        with pytest.raises(NoMatplotlib, match=r"pip install 'depthmix\[plot\]'"):
            draw_it(make_chart("one", GRID))
    assert list(tmp_path.iterdir()) == []


def test_a_legend_has_each_name_once_by_colour() -> None:
    points = [Point(1.0, 2.0, "a")]
    first = [Series("mod", 1, "dots", points), Series("", 1, "line", points)]
    second = [Series("mod", 1, "line", []), Series("dense", 0, "dots", points)]
    grid = Grid("", "x", "y", ["a"], ["b"], [Cell("a", "b", 1.0, "")])
    chart = Chart("k", "t", "c", [Panel("", "x", "y", first), Panel("", "x", "y", second), grid])
    legend = chart.list_legend()
    assert [series.name for series in legend] == ["dense", "mod"]
    assert legend[1].style == "dots", "as it appears first"


def test_points_lie_where_they_belong() -> None:
    points = [Point(1e6, 3.0, "a"), Point(1e7, 4.0, "b"), Point(1e8, 3.5, "c")]
    for log_x, share in ((True, 0.5), (False, 1 / 11)):
        root = draw(Panel("t", "x", "y", [Series("s", 0, "dots", points)], log_x=log_x))
        (drawn,) = root.iter("svg")
        _, _, width, height = map(float, drawn.attrib["viewBox"].split())
        (x1, y1), (x2, y2), (x3, y3) = find_places(root, "dots")
        assert (x2 - x1) / (x3 - x1) == pytest.approx(share, abs=2e-3)
        assert y2 < y3 < y1, "up is more"
        assert (y1 - y3) / (y1 - y2) == pytest.approx(0.5, abs=2e-3)
        assert all(0 < x < width for x in (x1, x2, x3))
        assert all(0 < y < height for y in (y1, y2, y3))
        assert [title.text for title in root.iter("title")] == ["a", "b", "c"]
        for text in root.iter("text"):
            x, y = re.findall(r"-?[\d.]+", text.attrib["transform"])[-2:]
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height


def test_lines_have_marks_to_point_at_and_guides_have_none() -> None:
    points = [Point(0.0, 1.0, "start"), Point(1.0, 2.0, "end")]
    guide = Series("", 0, "guide", [Point(0.0, 1.5), Point(1.0, 1.5)])
    star = Series("", 8, "star", [Point(0.5, 1.2, "best")])
    root = draw(Panel("t", "x", "y", [Series("s", 9, "line", points), guide, star]))
    spots = find_marks(root, "spot")
    assert ["".join(spot.itertext()) for spot in spots] == ["start", "end"]
    assert all("fill-opacity: 0;" in spot.attrib["style"] for spot in spots)
    # colours come again after seven, with other marks and dashes
    assert "var(--c1)" in find_marks(root, "star")[0].attrib["style"]
    styles = [path.get("style", "") for path in root.iter("path")]
    (line,) = (style for style in styles if "stroke: var(--c2)" in style)
    assert "stroke-dasharray" in line
    (guide_line,) = (style for style in styles if "stroke: var(--faint)" in style)
    assert "stroke-dasharray" in guide_line


def test_a_heat_map_has_a_field_for_each_cell() -> None:
    cells = [Cell("0.1", "1", 3.5, "one"), Cell("0.2", "2", 3.7, "two")]
    grid = Grid("t", "x", "y", ["0.1", "0.2"], ["1", "2"], cells)
    root = draw(grid)
    fields = find_marks(root, "cell")
    shown = [re.search(r"opacity: ([\d.]+)", field.attrib["style"]) for field in fields]
    # what is not transparent says nothing of it
    assert [found and found[1] for found in shown] == [None, "0.1"], "low is good"
    corners = [[float(n) for n in field.attrib["d"].split()[1:3]] for field in fields]
    assert corners[0][0] < corners[1][0]
    assert corners[0][1] < corners[1][1], "the first row is on top"
    assert [title.text for title in root.iter("title")] == ["one", "two"]
    assert {"3.5000", "3.7000", "0.1", "2"} <= set(list_words(root))
    # a single value is neither good nor bad
    assert "3.5000" in list_words(draw(Grid("t", "x", "y", ["0.1"], ["1"], cells[:1])))


def test_text_from_runs_is_escaped() -> None:
    points = [Point(1.0, 2.0, EVIL)]
    panel = Panel(EVIL, EVIL, EVIL, [Series(EVIL, 0, "dots", points)])
    cells = [Cell(EVIL, EVIL, 1.0, EVIL)]
    chart = Chart("k", EVIL, EVIL, [panel, Grid(EVIL, EVIL, EVIL, [EVIL], [EVIL], cells)])
    drawn = draw_chart(chart)
    assert "<script" not in drawn
    root = ElementTree.fromstring(f"<div>{drawn}</div>")
    assert [title.text for title in root.iter("title")] == [EVIL, EVIL]
    assert list_words(root).count(EVIL) == 8, "title, labels, and the heat map's names"
    (entry,) = root.iter("li")
    assert "".join(entry.itertext()) == f"●{EVIL}"


def test_a_drawing_is_the_same_each_time_and_no_other_ones() -> None:
    panel = Panel("t", "x", "y", [Series("s", 0, "dots", POINTS)])
    drawn = draw_chart(make_chart("k", panel, panel))
    assert drawn == draw_chart(make_chart("k", panel, panel))
    names = re.findall(r' id="([^"]*)"', drawn)
    assert len(set(names)) == len(names) == 2, "two panels share no id"
    assert set(re.findall(r'href="#([^"]*)"', drawn)) == set(names)


def test_the_page_has_a_colour_for_each_of_ours() -> None:
    panel = Panel("t", "x", "y", [Series(f"{i}", i, "dots", POINTS) for i in range(len(COLORS))])
    drawn = draw_chart(make_chart("k", panel, GRID))
    assert not re.search("#[0-9a-f]{6};", drawn), "none is left that the page could not change"
    template = TEMPLATE.read_text()
    for color, name in PAGE_COLORS.items():
        # by day and by night
        variable = name.removeprefix("var(").removesuffix(")")
        assert template.count(f"{variable}: #") == 2
        assert f"{variable}: {color};" in template or color not in COLORS


def read_ticks(*xs: float, log_x: bool) -> list[str]:
    points = [Point(x, float(i)) for i, x in enumerate(xs)]
    words = list_words(draw(Panel("t", "x", "y", [Series("", 0, "line", points)], log_x)))
    return words[: words.index("x")]


def test_logarithmic_ticks() -> None:
    ticks = read_ticks(1e6, 2e7, log_x=True)
    assert ticks == ["1.00 M", "2.00 M", "5.00 M", "10.0 M", "20.0 M"]
    # too narrow for 1, 2, 5
    ticks = read_ticks(2.1e6, 4.9e6, log_x=True)
    assert ticks == ["2.00 M", "2.50 M", "3.00 M", "3.50 M", "4.00 M", "4.50 M", "5.00 M"]


def test_ticks_tell_all_of_their_number() -> None:
    ticks = read_ticks(3.70001, 3.70005, log_x=False)
    assert len(ticks) == len(set(ticks)) > 2
    assert all(3.7 <= float(tick) <= 3.7001 for tick in ticks)


@settings(max_examples=10, deadline=None)
@given(low=st.floats(-1e4, 1e4), width=st.floats(1e-2, 1e4))
def test_ticks_are_inside_few_and_even(low: float, width: float) -> None:
    ticks = [float(tick.replace("−", "-")) for tick in read_ticks(low, low + width, log_x=False)]
    assert 2 <= len(ticks) <= 9
    assert low - 0.1 * width <= ticks[0] < ticks[-1] <= low + 1.1 * width
    steps = [after - before for before, after in pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps), abs=1e-6 * abs(low) + 1e-9)
    digits = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-6)
    assert min(abs(digits - k) for k in (1, 2, 5)) < 1e-2


def test_an_image_records_its_chart(tmp_path: Path) -> None:
    dots = [Point(1.0, 2.0), Point(3.0, 4.0)]
    chart = Chart("a", "title", "", [Panel("", "x", "y", [Series("one", 0, "dots", dots)])])
    save_image(chart, tmp_path / "a.png")
    assert read_digest(tmp_path / "a.png") == chart.digest
    # what rounding alone moves is the same picture
    for y, same in ((4.0000000001, True), (4.01, False)):
        moved = [Series("one", 0, "dots", [dots[0], Point(3.0, y)])]
        other = chart._replace(panels=[Panel("", "x", "y", moved)])
        assert (other.digest == chart.digest) == same
    (tmp_path / "other.png").write_bytes(b"no picture")
    assert read_digest(tmp_path / "other.png") is None
