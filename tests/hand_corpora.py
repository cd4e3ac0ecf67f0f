"""Data folders of documents that a test writes by hand, without a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from depthmix.data.manifest import MANIFEST_FILE, Manifest
from depthmix.data.shards import ShardWriter

END = 0


def write_folder(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    val: Sequence[Sequence[int]] = ((1, 2),),
    vocab_size: int = 1000,
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
        vocab_size=vocab_size,
        end_token=END,
        tokenizer=None,
        sources=("made for a test",),
        num_skipped_files=0,
        request={},
        splits=splits,
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return folder
