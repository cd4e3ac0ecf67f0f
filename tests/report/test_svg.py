"""Drawings are well formed, inside their frame, and escape what they are told."""

from xml.etree import ElementTree

import pytest

from depthmix.report.shapes import Cell, Chart, Grid, Panel, Point, Series
from depthmix.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw_chart, draw_panel

EVIL = "</svg><script>alert(1)</script> & \"quoted\" 'too'"


def find_places(root: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    marks = [mark for mark in root.iter("path") if kind in mark.get("class", "").split()]
    texts = [mark.get("transform", "")[len("translate(") : -1].split() for mark in marks]
    return [(float(x), float(y)) for x, y in texts]


def test_points_lie_where_they_belong() -> None:
    points = [Point(1e6, 3.0, "a"), Point(1e7, 4.0, "b"), Point(1e8, 3.5, "c")]
    for log_x, share in ((True, 0.5), (False, 1 / 11)):
        panel = Panel("t", "x", "y", [Series("s", 0, "dots", points)], log_x=log_x)
        root = ElementTree.fromstring(draw_panel(panel))
        (x1, y1), (x2, y2), (x3, y3) = find_places(root, "dot")
        assert (x2 - x1) / (x3 - x1) == pytest.approx(share, abs=2e-3)
        assert y2 < y3 < y1, "up is more"
        assert (y1 - y3) / (y1 - y2) == pytest.approx(0.5, abs=2e-3)
        assert all(LEFT < x < RIGHT for x in (x1, x2, x3))
        assert all(TOP < y < BOTTOM for y in (y1, y2, y3))
        assert [title.text for title in root.iter("title")] == ["a", "b", "c"]
        for text in root.iter("text"):
            assert -1 <= float(text.get("x", "nan")) <= WIDTH
            assert -1 <= float(text.get("y", "nan")) <= HEIGHT


def test_lines_have_marks_to_point_at_and_guides_have_none() -> None:
    points = [Point(0.0, 1.0, "start"), Point(1.0, 2.0, "end")]
    guide = Series("", 0, "guide", [Point(0.0, 1.5), Point(1.0, 1.5)])
    star = Series("", 8, "star", [Point(0.5, 1.2, "best")])
    panel = Panel("t", "x", "y", [Series("s", 9, "line", points), guide, star])
    root = ElementTree.fromstring(draw_panel(panel))
    assert len(find_places(root, "spot")) == 2
    assert len(find_places(root, "star")) == 1
    classes = [line.get("class") for line in root.iter("polyline")]
    # colours come again after seven
    assert classes == ["line c2", "guide c0"]


def test_a_heat_map_has_a_field_for_each_cell() -> None:
    cells = [Cell("0.1", "1", 3.5, "one"), Cell("0.2", "2", 3.7, "two")]
    grid = Grid("t", "x", "y", ["0.1", "0.2"], ["1", "2"], cells)
    root = ElementTree.fromstring(draw_panel(grid))
    fields = list(root.iter("rect"))
    assert [field.get("fill-opacity") for field in fields] == ["1.00", "0.10"], "low is good"
    assert float(fields[0].get("x", 0)) < float(fields[1].get("x", 0))
    assert {"3.5000", "3.7000", "0.1", "2"} <= {text.text for text in root.iter("text")}
    # a single value is neither good nor bad
    alone = Grid("t", "x", "y", ["0.1"], ["1"], cells[:1])
    assert "3.5000" in draw_panel(alone)


def test_what_comes_from_runs_is_escaped() -> None:
    points = [Point(1.0, 2.0, EVIL)]
    panel = Panel(EVIL, EVIL, EVIL, [Series(EVIL, 0, "dots", points)])
    cells = [Cell(EVIL, EVIL, 1.0, EVIL)]
    chart = Chart("k", EVIL, EVIL, [panel, Grid(EVIL, EVIL, EVIL, [EVIL], [EVIL], cells)])
    drawn = draw_chart(chart)
    assert "<script" not in drawn
    root = ElementTree.fromstring(f"<div>{drawn}</div>")
    assert [title.text for title in root.iter("title")] == [EVIL, EVIL]
    (entry,) = root.iter("li")
    assert "".join(entry.itertext()) == EVIL
