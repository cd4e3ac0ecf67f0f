"""A legend names every series once."""

from depthmix.report.shapes import Cell, Chart, Grid, Panel, Point, Series

POINTS = [Point(1.0, 2.0, "a")]


def test_a_legend_has_each_name_once_by_colour() -> None:
    first = [Series("mod", 1, "dots", POINTS), Series("", 1, "line", POINTS)]
    second = [Series("mod", 1, "line", []), Series("dense", 0, "dots", POINTS)]
    grid = Grid("", "x", "y", ["a"], ["b"], [Cell("a", "b", 1.0, "")])
    chart = Chart("k", "t", "c", [Panel("", "x", "y", first), Panel("", "x", "y", second), grid])
    legend = chart.list_legend()
    assert [series.name for series in legend] == ["dense", "mod"]
    assert legend[1].style == "dots", "as it appears first"
