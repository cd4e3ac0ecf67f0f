"""Curves are drawn where they belong."""

import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from depthmix.report.curves import draw_text_plot, plot_losses
from depthmix.report.figures import NoMatplotlib

# inches of a panel, of title and legend, and dots an inch
SIZE = int(140 * 4.8), int(140 * (3.7 + 0.5 + 0.22))
FALL = [(1e15 * s, 2 + 6 * s**-0.4) for s in range(1, 400)]


def read_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    return width, height


def test_an_image_has_its_size_and_every_curve(tmp_path: Path) -> None:
    from matplotlib.image import imread

    curves = {"dense": FALL, r"mod $\no$": [(x, y - 0.2) for x, y in FALL]}
    plot_losses(curves, tmp_path / "a.png", title=r"$\no formula$", x_label="FLOPs", y_label="loss")
    assert read_size(tmp_path / "a.png") == SIZE
    pixels = (255 * imread(tmp_path / "a.png")[..., :3]).round().astype(int)
    colors = {tuple(color) for color in pixels.reshape(-1, 3).tolist()}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colors
    assert (0x00, 0x9E, 0x73) not in colors, "only two curves"


@pytest.mark.parametrize(
    "curves",
    [
        {"one point": [(5, 3)]},
        {"flat": [(1, 2.0), (2, 2.0)], "zero": [(1, 0.0), (1, 0.0)]},
        {f"run {i}": [(x, y + i) for x, y in FALL] for i in range(30)},
        {"with gaps": [(0, 9.0), (1, math.nan), (2, None), (3, 2.0), (900, math.inf), (901, 1.0)]},
        {"short": FALL[:3], "long": FALL, "none": []},
    ],
    ids=lambda curves: next(iter(curves)),
)
def test_odd_curves_are_drawn(curves: dict[str, Any], tmp_path: Path) -> None:
    plot_losses(curves, str(tmp_path / "a.png"))
    width, height = read_size(tmp_path / "a.png")
    assert width == SIZE[0]
    assert height >= SIZE[1], "a long legend needs more"
    shown = draw_text_plot(curves)
    for name in curves:
        assert (name in shown) == (name != "none")


def test_nothing_to_draw_is_reported(tmp_path: Path) -> None:
    for curves in ({}, {"a": []}, {"a": [(1, math.nan)], "b": [(1, None)], "c": [(0, 1.0)]}):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw_text_plot(curves)
        with pytest.raises(ValueError, match="nothing to draw"):
            plot_losses(curves, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        plot_losses({"a": FALL}, tmp_path / "nowhere" / "a.png")
    assert caught.value.filename == str(tmp_path / "nowhere" / "a.png")


def test_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NoMatplotlib, match=r"pip install 'depthmix\[plot\]'"):
        plot_losses({"a": FALL}, tmp_path / "a.png")


def list_dots(shown: str) -> set[tuple[int, int]]:
    """(column, row) of every dot, rows from the top, decoded by the standard's own numbering."""
    dots = set()
    for row, line in enumerate(line for line in shown.splitlines() if "│" in line or "┤" in line):
        for column, cell in enumerate(line[max(line.find("│"), line.find("┤")) + 1 :]):
            code = ord(cell) - 0x2800
            if 0 <= code < 256:
                for bit, (right, down) in enumerate(
                    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]
                ):
                    if code >> bit & 1:
                        dots.add((2 * column + right, 4 * row + down))
    return dots


def test_text_shows_a_line_as_a_line() -> None:
    shown = draw_text_plot({"up": [(10, 1.0), (20, 2.0)]}, width=60, height=12, x_label="steps")
    dots = list_dots(shown)
    columns = sorted({column for column, _ in dots})
    assert columns == list(range(len(columns))), "no gap from the left edge to the right one"
    # the line starts a twentieth above the bottom and ends as much below the top
    slope, rows = 1 / 1.1, 4 * 12 - 1
    for column, row in dots:
        share = column / (len(columns) - 1)
        assert abs((1 - row / rows) - (0.05 / 1.1 + slope * share)) < 1.5 / rows
    assert shown.splitlines()[-1].split() == ["10", "steps", "20"]
    assert "2.05" in shown.splitlines()[1]
    assert "0.95" in shown


def test_text_has_its_width_and_labels_beside_the_ends() -> None:
    curves = {"high": FALL, "low": [(x, y - 1.0) for x, y in FALL]}
    lines = draw_text_plot(curves, width=72, height=16).splitlines()
    assert len(lines) == 1 + 16 + 2
    assert max(map(len, lines)) <= 72
    (high,) = (i for i, line in enumerate(lines) if "high" in line)
    (low,) = (i for i, line in enumerate(lines) if "low" in line)
    assert high < low == 16
    assert lines[low].endswith(f"low {sum(y - 1 for _, y in FALL[-4:]) / 4:.3f}")
    assert all(ord(character) >= 32 for line in lines for character in line)


def test_labels_at_one_height_are_moved_apart() -> None:
    lines = draw_text_plot({f"run{i}": FALL for i in range(9)}, height=10).splitlines()
    assert [sum(f"run{i} " in line for line in lines) for i in range(9)] == [1] * 9
    assert max(line.count("run") for line in lines) == 1


def test_a_wide_range_is_drawn_on_a_log_scale() -> None:
    assert "log scale" in draw_text_plot({"a": FALL})
    assert "log scale" not in draw_text_plot({"a": [(x, y) for x, y in FALL if x > 1e17]})
    # a validation before the first step, at no FLOPs, does not change that
    assert "log scale" in draw_text_plot({"a": [(0, 9.0), *FALL]})


def test_the_first_fall_does_not_flatten_the_rest() -> None:
    top = draw_text_plot({"a": FALL}).splitlines()[1]
    assert 2 < float(top.split()[0]) < 5 < FALL[0][1]
