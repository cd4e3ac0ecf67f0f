"""A manifest comes back as it was written; anything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from depthmix.data.manifest import (
    MANIFEST_FILE,
    UNFINISHED_FILE,
    Manifest,
    Shard,
    SplitSummary,
    parse_manifest,
    read_manifest,
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


def tree() -> dict[str, Any]:
    return json.loads(MANIFEST.to_json())


def test_comes_back_as_it_was(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="is not of depthmix"):
        parse_manifest(foreign, Path("manifest.json"))


def test_another_version() -> None:
    with pytest.raises(ValueError, match="has version 2, and this depthmix reads version 1"):
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
