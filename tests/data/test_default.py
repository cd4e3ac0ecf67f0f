"""The corpus in the user's cache: made once, also by two processes, and mended."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from depthmix.data import default, stdlib
from depthmix.data.default import find_cache, name_default, prepare_default
from depthmix.data.prepare import Progress
from depthmix.data.shards import Corpus


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library, and a cache of its own."""
    root = tmp_path / "python"
    root.mkdir()
    for i in range(5):
        (root / f"m{i}.py").write_text(f"x = {i}\n" * 20)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(stdlib, "MODULES", ("math",))
    monkeypatch.setenv("DEPTHMIX_CACHE", str(tmp_path / "cache"))
    return root


def test_it_is_made_once(library: Path, tmp_path: Path) -> None:
    reports: list[Progress] = []
    folder = prepare_default(300, progress=reports.append)
    assert folder.parent == tmp_path / "cache"
    assert Corpus.open(folder, verify="full").manifest.sources == ("stdlib",)
    assert reports
    reports.clear()
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert prepare_default(300, progress=reports.append) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    assert not reports
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_another_library_or_vocabulary_has_another_name(library: Path) -> None:
    names = {name_default(300), name_default(301)}
    (library / "m0.py").write_text("changed")
    names.add(name_default(300))
    assert len(names) == 3
    version = ".".join(str(number) for number in sys.version_info[:3])
    assert all(version in name for name in names)


def test_a_damaged_folder_is_replaced(library: Path) -> None:
    folder = prepare_default(300)
    shard = folder / "train-00000.bin"
    good = shard.read_bytes()
    # of another size, and of the same
    for damage in (b"", good[::-1]):
        shard.write_bytes(damage)
        assert prepare_default(300) == folder
        assert shard.read_bytes() == good
        Corpus.open(folder, verify="full")


def test_the_loser_of_a_race_uses_the_winner_s(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = default.prepare

    def slow(*args: object, **options: object) -> object:
        monkeypatch.setattr(default, "prepare", real)
        winner.append(prepare_default(300))
        return real(*args, **options)  # pyrefly: ignore

    winner: list[Path] = []
    monkeypatch.setattr(default, "prepare", slow)
    assert [prepare_default(300)] == winner
    assert [path.name for path in winner[0].parent.iterdir()] == [winner[0].name]


def test_leftovers_of_killed_processes_are_removed_in_time(library: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old, young = cache / f".{name_default(300)}-old", cache / f".{name_default(300)}-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    long_ago = time.time() - 3 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    prepare_default(300)
    assert not old.exists()
    assert young.exists()


def test_a_failure_leaves_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(default, "prepare", fail)
    with pytest.raises(OSError, match="the disk is full"):
        prepare_default(300)
    assert list(find_cache().iterdir()) == []


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DEPTHMIX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert find_cache() == tmp_path / ".cache" / "depthmix"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert find_cache() == Path("/xdg/depthmix")
    monkeypatch.setenv("DEPTHMIX_CACHE", "~/mine")
    assert find_cache() == tmp_path / "mine"


def test_a_cache_that_cannot_be_is_a_sentence(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEPTHMIX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot write .* \(Not a directory\)"):
        prepare_default(300)


@pytest.mark.slow
def test_the_real_library_by_two_processes_at_once(tmp_path: Path) -> None:
    script = (
        "from depthmix.data import stdlib, prepare_default;"
        "real = stdlib.find_files;"
        "stdlib.find_files = lambda: [f for f in real() if '/' not in f[0]][:40];"
        "print(prepare_default(300))"
    )
    environment = {**os.environ, "DEPTHMIX_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", script]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(folders) == 1
    split = Corpus.open(folders.pop(), verify="full").split("train")
    assert split.num_tokens > 10000
    assert len(list(tmp_path.iterdir())) == 1
