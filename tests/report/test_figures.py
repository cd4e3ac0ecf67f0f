"""Images are drawn for every chart, whatever is in it."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from depthmix.report.figures import draw_figures
from depthmix.report.shapes import Cell, Chart, Grid, Panel, Point, Series

POINTS = [Point(1e6, 3.0, "a"), Point(1e7, 4.0, "b")]
GRID = Grid("$t", "x", "y", ["0.1", "0.2"], ["1"], [Cell("0.1", "1", 3.5, "one")])


def make_chart(key: str, *panels: Panel | Grid) -> Chart:
    return Chart(key, r"$\no formula$", "", panels)


def read_colors(path: Path) -> set[tuple[int, ...]]:
    from matplotlib.image import imread

    pixels = (255 * imread(path)[..., :3]).round().astype(int)
    return {tuple(color) for color in pixels.reshape(-1, 3).tolist()}


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
    paths = draw_figures(charts, tmp_path)
    assert paths == [tmp_path / "one.png", tmp_path / "two.png", tmp_path / "point.png"]
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= read_colors(paths[0])
    assert (0x00, 0x72, 0xB2) in read_colors(paths[1])
    assert (0xD5, 0x5E, 0x00) not in read_colors(paths[2])


def test_missing_matplotlib_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"pip install 'depthmix\[plot\]'"):
        draw_figures([make_chart("one", GRID)], tmp_path)
