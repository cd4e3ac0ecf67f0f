"""A folder belongs to one request, and where it cannot be written, a sentence says what to do."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from depthmix.data.folder import (
    claim_folder,
    explain_writing,
    find_finished,
    forget_unfinished,
    hash_units,
    write_file,
    write_unfinished,
)
from depthmix.data.manifest import MANIFEST_FILE, UNFINISHED_FILE, Manifest, SplitSummary
from depthmix.data.readers import Unit

REQUEST: dict[str, Any] = {"sources": "aa", "tokenizer": None, "seed": 0, "vocab_size": 300}


def write_manifest(folder: Path) -> Manifest:
    empty = SplitSummary(num_tokens=0, num_documents=0, num_bytes=0, shards=())
    manifest = Manifest(
        dtype="uint16",
        vocab_size=300,
        end_token=0,
        tokenizer=None,
        sources=(),
        num_skipped_files=0,
        request=REQUEST,
        splits={"train": empty, "val": empty},
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json())
    return manifest


def test_a_new_folder_is_claimed(tmp_path: Path) -> None:
    assert find_finished(tmp_path, REQUEST) is None
    assert claim_folder(tmp_path, REQUEST) is None
    assert claim_folder(tmp_path, REQUEST) is None


def test_the_same_request_goes_on(tmp_path: Path) -> None:
    claim_folder(tmp_path, REQUEST)
    write_unfinished(tmp_path, REQUEST, {"place": [1, 2]})
    assert claim_folder(tmp_path, REQUEST) == {"place": [1, 2]}


def test_a_process_that_died_at_once_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / f"{UNFINISHED_FILE}.part").write_text("{")
    assert claim_folder(tmp_path, REQUEST) is None


def test_another_request_is_refused(tmp_path: Path) -> None:
    claim_folder(tmp_path, REQUEST)
    with pytest.raises(ValueError, match=r"is half prepared with seed = 0 and not 1: choose"):
        claim_folder(tmp_path, {**REQUEST, "seed": 1})
    with pytest.raises(ValueError, match=r"half prepared with other sources, other tokenizer"):
        claim_folder(tmp_path, {**REQUEST, "sources": "bb", "tokenizer": "cc"})


def test_a_finished_folder(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path)
    write_unfinished(tmp_path, REQUEST, None)
    assert find_finished(tmp_path, REQUEST) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]
    with pytest.raises(ValueError, match="holds data that was prepared with vocab_size = 300 and"):
        find_finished(tmp_path, {**REQUEST, "vocab_size": 400})


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds other files: choose a new or an empty one"):
        claim_folder(tmp_path, REQUEST)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_record(tmp_path: Path, text: str) -> None:
    (tmp_path / UNFINISHED_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"unfinished\.json is damaged: remove"):
        claim_folder(tmp_path, REQUEST)


def test_a_record_of_another_version(tmp_path: Path) -> None:
    text = '{"format": ["depthmix-data", 99], "request": {}, "state": null}'
    (tmp_path / UNFINISHED_FILE).write_text(text)
    with pytest.raises(ValueError, match="another version"):
        claim_folder(tmp_path, REQUEST)


def test_a_record_is_forgotten(tmp_path: Path) -> None:
    write_unfinished(tmp_path, REQUEST, None)
    (tmp_path / f"{UNFINISHED_FILE}.part").write_text("{")
    forget_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_units_are_named_by_key_and_size() -> None:
    unit = Unit(kind="text", name="/here/a.txt", key="a.txt", num_bytes=3)
    moved = Unit(kind="text", name="/there/a.txt", key="a.txt", num_bytes=3)
    grown = Unit(kind="text", name="/here/a.txt", key="a.txt", num_bytes=4)
    assert hash_units([unit]) == hash_units([moved]) != hash_units([grown])
    assert hash_units([]) is None


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
