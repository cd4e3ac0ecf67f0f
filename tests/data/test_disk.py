"""Files appear whole or not at all, and the system's refusals are sentences."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from depthmix.data.disk import explain_writing, lock_folder, sync_folder, write_file


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_file(path, b"old")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"cannot write .*a\.json \(No space left on device\): make"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_folder_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .* \(Not a directory\)"):
        write_file(tmp_path / "file" / "a.json", b"")


def test_errors_that_are_not_the_system_s_pass() -> None:
    with pytest.raises(KeyError), explain_writing(Path("a")):
        raise KeyError("a")


def test_syncing_what_is_no_folder_is_harmless(tmp_path: Path) -> None:
    sync_folder(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


LOCK = (
    "import sys; from pathlib import Path; from depthmix.data.disk import lock_folder\n"
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


def test_works_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def fail(number: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with lock_folder(tmp_path):
        held = True
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with lock_folder(tmp_path):
        assert held
