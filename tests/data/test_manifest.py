"""A folder belongs to one request, and its manifest comes back as it was written."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from depthmix.data.manifest import (
    MANIFEST_FILE,
    UNFINISHED_FILE,
    Manifest,
    Shard,
    SplitSummary,
    claim_folder,
    explain_writing,
    find_finished,
    forget_unfinished,
    parse_manifest,
    read_manifest,
    write_file,
    write_unfinished,
)

SHARD = Shard(
    file="train-00000.bin",
    index="train-00000.idx",
    num_tokens=10,
    num_documents=2,
    sha256="aa",
    index_sha256="bb",
)
MANIFEST = Manifest(
    dtype="uint16",
    vocab_size=300,
    end_token=0,
    tokenizer="tokenizer.json",
    sources=("é.txt",),
    num_skipped_files=1,
    request={"seed": 0},
    splits={
        "train": SplitSummary(num_tokens=10, num_documents=2, num_bytes=30, shards=(SHARD,)),
        "val": SplitSummary(num_tokens=0, num_documents=0, num_bytes=None, shards=()),
    },
)

REQUEST: dict[str, Any] = {"sources": "aa", "tokenizer": None, "seed": 0, "vocab_size": 300}


def tree() -> dict[str, Any]:
    return json.loads(MANIFEST.to_json())


def test_a_manifest_is_read_as_written(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text(MANIFEST.to_json(), encoding="utf-8")
    found = read_manifest(tmp_path)
    assert found == MANIFEST
    assert found.hash == MANIFEST.hash


def test_has_the_documented_names() -> None:
    found = tree()
    assert (found["format"], found["version"]) == ("depthmix-data", 1)
    assert set(found) >= {"dtype", "vocab_size", "end_token", "tokenizer", "sources", "splits"}
    assert set(found["splits"]["train"]) == {"num_tokens", "num_documents", "num_bytes", "shards"}
    assert set(found["splits"]["train"]["shards"][0]) == {
        "file",
        "index",
        "num_tokens",
        "num_documents",
        "sha256",
        "index_sha256",
    }


def test_the_hash_covers_the_shards() -> None:
    changed = tree()
    changed["splits"]["train"]["shards"][0]["sha256"] = "cc"
    assert parse_manifest(changed, Path("m")).hash != MANIFEST.hash


def test_the_hash_covers_the_tokenizer_and_older_ones_stay() -> None:
    # as noted by runs on folders without a hash of their tokenizer
    assert MANIFEST.hash == "82d1988a7372abb3a9323522015d27549ef0ecf363f3bd5e81fc4fac681da7ad"
    assert dataclasses.replace(MANIFEST, tokenizer_sha256="cc").hash != MANIFEST.hash
    damaged = tree() | {"tokenizer_sha256": 3}
    with pytest.raises(ValueError, match="tokenizer_sha256 is not a string"):
        parse_manifest(damaged, Path("m"))


def test_a_folder_without_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no data folder .*gone: make one with"):
        read_manifest(tmp_path / "gone")
    with pytest.raises(ValueError, match="is not a data folder"):
        read_manifest(tmp_path)
    (tmp_path / UNFINISHED_FILE).write_text("{}")
    with pytest.raises(ValueError, match=r"is not finished: run the same `depthmix prepare`"):
        read_manifest(tmp_path)


def test_broken_json(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text('{"format": ')
    with pytest.raises(ValueError, match=r"manifest\.json is not valid JSON"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("foreign", [[], {}, {"name": "web app"}, {"format": "other"}])
def test_somebody_else_s(foreign: Any) -> None:
    with pytest.raises(ValueError, match="was not written by depthmix"):
        parse_manifest(foreign, Path("manifest.json"))


def test_another_version() -> None:
    with pytest.raises(ValueError, match="has version 2, but this depthmix reads version 1"):
        parse_manifest({**tree(), "version": 2}, Path("manifest.json"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("dtype"), "'dtype' is missing"),
        (lambda t: t["splits"].pop("val"), "'val' is missing"),
        (lambda t: t.update(dtype="int7"), "no dtype 'int7'"),
        (lambda t: t.update(vocab_size="many"), "many"),
        (lambda t: t.update(splits=[]), "damaged"),
        (lambda t: t["splits"]["train"].update(num_tokens=11), "do not add up"),
        (lambda t: t["splits"]["train"]["shards"][0].pop("sha256"), "damaged"),
        (lambda t: t["splits"]["train"]["shards"][0].update(file="../x"), "outside its folder"),
        (lambda t: t.update(tokenizer="/etc/passwd"), "outside its folder"),
    ],
)
def test_a_damaged_one(change: Any, words: str) -> None:
    damaged = tree()
    change(damaged)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged .*: prepare") as info:
        parse_manifest(damaged, Path("manifest.json"))
    assert words in str(info.value)


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


def test_the_same_request_resumes(tmp_path: Path) -> None:
    claim_folder(tmp_path, REQUEST)
    write_unfinished(tmp_path, REQUEST, {"place": [1, 2]})
    assert claim_folder(tmp_path, REQUEST) == {"place": [1, 2]}


def test_a_process_that_died_at_once_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / f"{UNFINISHED_FILE}.part").write_text("{")
    assert claim_folder(tmp_path, REQUEST) is None


def test_another_request_is_refused(tmp_path: Path) -> None:
    claim_folder(tmp_path, REQUEST)
    with pytest.raises(ValueError, match=r"is half prepared with --seed 0, not 1: choose"):
        claim_folder(tmp_path, {**REQUEST, "seed": 1})
    with pytest.raises(ValueError, match=r"half prepared with other sources, other tokenizer"):
        claim_folder(tmp_path, {**REQUEST, "sources": "bb", "tokenizer": "cc"})


def test_a_finished_folder(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path)
    write_unfinished(tmp_path, REQUEST, None)
    assert find_finished(tmp_path, REQUEST) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]
    with pytest.raises(ValueError, match="holds data that was prepared with --vocab-size 300, not"):
        find_finished(tmp_path, {**REQUEST, "vocab_size": 400})


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="contains other files: choose a new or an empty one"):
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
    with pytest.raises(
        OSError, match=r"cannot write .*a\.json \(No space left on device\): free some space"
    ):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_folder_that_is_a_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .* \(Not a directory\)"):
        write_file(tmp_path / "file" / "a.json", b"")


def test_errors_that_are_not_the_system_s_pass() -> None:
    with pytest.raises(KeyError), explain_writing(Path("a")):
        raise KeyError("a")
