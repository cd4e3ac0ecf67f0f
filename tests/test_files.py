"""Files are replaced whole: a full disk leaves the old one, and says which file it was."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from depthmix.cli import main
from depthmix.files import replace_file
from depthmix.report.figures import draw_figures
from depthmix.report.shapes import Chart, Panel, Point, Series
from depthmix.report.traces import write_trace
from hand_traces import make_trace


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may become larger than 100 bytes; Python ignores the signal that comes with it."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("content", ["naïve\n", b"\x00\xff"])
def test_a_file_is_replaced(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "a.txt"
    for _ in range(2):
        replace_file(path, content)
        told = content.encode() if isinstance(content, str) else content
        assert path.read_bytes() == told
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with full_disk(), pytest.raises(OSError, match="File too large") as error:
        replace_file(path, "new" * 100)
    assert error.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_that_was_meant_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "a.txt"
    with pytest.raises(FileNotFoundError) as error:
        replace_file(path, "new")
    assert error.value.filename == str(path)


def test_what_is_no_plain_file_stays_what_it_is(tmp_path: Path) -> None:
    link, path = tmp_path / "link", tmp_path / "a.txt"
    link.symlink_to(path)
    replace_file(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    replace_file(null, "gone")
    assert Path("/dev/null").is_char_device()
    assert null.is_symlink()


def test_nothing_that_was_seen_or_drawn_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page, image = (tmp_path / name for name in ("t.json", "t.html", "c.png"))
    panel = Panel("", "x", "y", [Series("a", 0, "dots", [Point(1.0, 2.0)])])
    charts = [Chart("c", "C", "", [panel])]
    write_trace(make_trace(), trace)
    assert main(["view", str(trace)]) == 0
    draw_figures(charts, tmp_path)
    before = {path: path.read_bytes() for path in (trace, page, image)}
    with full_disk():
        with pytest.raises(OSError, match="File too large"):
            write_trace(make_trace(), trace)
        with pytest.raises(OSError, match="File too large"):
            draw_figures(charts, tmp_path)
        assert main(["view", str(trace)]) == 2
    assert capsys.readouterr().err == f"depthmix: {page}: File too large\n"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
