"""Files are replaced whole, on disk when that is said, hashed and locked.

A full disk leaves the old file, and the error says which it was.
"""

import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from depthmix import files
from depthmix.cli import main
from depthmix.files import (
    hash_content,
    hash_file,
    lock_folder,
    replace_file,
    sync_folder,
    take_lock,
)
from depthmix.report.figures import Chart, Panel, Point, Series, save_images
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


def test_a_file_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "a.txt", []
    path.write_text("old")
    sync, replace = os.fsync, os.replace

    def record_sync(number: int) -> None:
        done.append("folder" if os.path.isdir(f"/dev/fd/{number}") else path.read_text())
        sync(number)

    def record_replace(part: Path, whole: Path) -> None:
        done.append(Path(part).read_text())
        replace(part, whole)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    replace_file(path, "new")
    assert done == ["old", "new", "folder"]


def test_whatever_stops_it_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_that_was_meant_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "a.txt"
    with pytest.raises(FileNotFoundError) as error:
        replace_file(path, "new")
    assert error.value.filename == str(path)


def test_special_files_and_links_stay_what_they_are(tmp_path: Path) -> None:
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
    save_images(charts, tmp_path)
    before = {path: path.read_bytes() for path in (trace, page, image)}
    with full_disk():
        with pytest.raises(OSError, match="File too large"):
            write_trace(make_trace(), trace)
        with pytest.raises(OSError, match="File too large"):
            save_images(charts, tmp_path)
        assert main(["view", str(trace)]) == 2
    assert capsys.readouterr().err == f"depthmix: {page}: File too large\n"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_syncing_a_path_that_is_not_a_folder_is_harmless(tmp_path: Path) -> None:
    sync_folder(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


def test_a_folder_that_cannot_be_synced_is_one_thing_and_a_full_disk_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    number = errno.EINVAL
    sync_folder(tmp_path)
    number = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        sync_folder(tmp_path)


def test_a_file_has_its_sha256(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(content)
    assert hash_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()
    assert hash_content(content) == hash_file(tmp_path / "a")
    assert hash_content("é") == hash_content("é".encode())


LOCK = (
    "import sys; from pathlib import Path; from depthmix.files import lock_folder\n"
    "with lock_folder(Path(sys.argv[1])): print('held')"
)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    command = [sys.executable, "-c", LOCK, str(tmp_path)]
    with lock_folder(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "another process is writing to" in done.stderr
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"held\n"
    assert list(tmp_path.iterdir()) == []


def test_shared_locks_keep_out_only_one_that_is_not(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    (tmp_path / "a").touch()
    with open(tmp_path / "a") as one, open(tmp_path / "a") as other:
        assert take_lock(one.fileno(), shared=True)
        assert not take_lock(other.fileno())
        assert take_lock(other.fileno(), shared=True)
    with open(tmp_path / "a") as one, open(tmp_path / "a") as other:
        assert take_lock(one.fileno())
        assert not take_lock(other.fileno(), shared=True)


def test_works_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def fail(number: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with lock_folder(tmp_path):
        held = True
    monkeypatch.setattr(files, "fcntl", None)
    assert take_lock(-1)
    with lock_folder(tmp_path):
        assert held


def test_loads_where_there_is_no_fcntl() -> None:
    code = "import sys; sys.modules['fcntl'] = None; import depthmix.files, depthmix.runs.folder"
    subprocess.run([sys.executable, "-c", code], check=True)
