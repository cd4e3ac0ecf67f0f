"""Tiny data folders, written without a tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from depthmix.data.manifest import MANIFEST_FILE, Manifest
from depthmix.data.shards import ShardWriter

END = 0

FolderMaker = Callable[..., Path]


def write_folder(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    val: Sequence[Sequence[int]] = ((1, 2),),
    shard_tokens: int = 1 << 20,
    num_bytes: int | None = None,
) -> Path:
    """A complete data folder of documents of ids, each of which gets the end token 0."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, contents in (("train", documents), ("val", val)):
        writer = ShardWriter(
            folder, split, dtype="uint16", end_token=END, shard_tokens=shard_tokens
        )
        for content in contents:
            writer.append(np.array(content, dtype="<u2"), num_bytes)
            writer.end_document()
        splits[split] = writer.finish()
    manifest = Manifest(
        dtype="uint16",
        vocab_size=1000,
        end_token=END,
        tokenizer=None,
        sources=("made for a test",),
        num_skipped_files=0,
        request={},
        splits=splits,
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def folder_writer() -> FolderMaker:
    """`write_folder`, for tests that make many folders of their own."""
    return write_folder


@pytest.fixture
def make_folder(tmp_path: Path) -> FolderMaker:
    def make(documents: Sequence[Sequence[int]], name: str = "data", **options: object) -> Path:
        return write_folder(tmp_path / name, documents, **options)  # pyrefly: ignore

    return make
