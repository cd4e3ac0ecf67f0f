"""Shards hold the documents, and a writer goes on from any record."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix.data.writer import ShardWriter, add_bytes
from depthmix.files import hash_file

DOCUMENTS = [list(range(1, 1 + n)) for n in (3, 1, 7, 0, 5, 2, 9, 4)]


def make_writer(folder: Path, state: dict[str, Any] | None = None, **options: Any) -> ShardWriter:
    given: dict[str, Any] = {"dtype": "uint16", "end_token": 0, "shard_tokens": 10, **options}
    return ShardWriter(folder, "train", state=state, **given)


def add(writer: ShardWriter, document: list[int], num_bytes: int | None = 1) -> None:
    writer.append(np.array(document, dtype=writer.dtype), num_bytes)
    writer.end_document()


def read_back(folder: Path, dtype: str = "<u2") -> list[list[int]]:
    documents = []
    for path in sorted(folder.glob("train-*.bin")):
        ids = np.fromfile(path, dtype=dtype)
        offsets = np.fromfile(path.with_suffix(".idx"), dtype="<u8").tolist()
        assert (offsets[0], offsets[-1]) == (0, len(ids))
        for start, stop in pairwise(offsets):
            assert ids[stop - 1] == 0
            documents.append(ids[start : stop - 1].tolist())
    return documents


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_documents_come_back_over_several_shards(tmp_path: Path, dtype: str) -> None:
    writer = make_writer(tmp_path, dtype=dtype)
    for document in DOCUMENTS:
        add(writer, document)
    summary = writer.finish()
    assert read_back(tmp_path, {"uint16": "<u2", "uint32": "<u4"}[dtype]) == DOCUMENTS
    assert [shard.num_documents for shard in summary.shards] == [3, 3, 1, 1]
    assert summary.num_tokens == sum(len(document) + 1 for document in DOCUMENTS)
    assert (summary.num_documents, summary.num_bytes) == (8, 8)
    for shard in summary.shards:
        assert hash_file(tmp_path / shard.file) == shard.sha256
        assert hash_file(tmp_path / shard.index) == shard.index_sha256


def test_a_document_in_pieces_is_one_document(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for part in ([1, 2], list(range(20)), [3]):
        writer.append(np.array(part, dtype="<u2"), 4)
    writer.end_document()
    summary = writer.finish()
    assert (summary.num_documents, summary.num_tokens, summary.num_bytes) == (1, 24, 12)
    assert len(summary.shards) == 1


@given(st.integers(0, len(DOCUMENTS)), st.integers(0, len(DOCUMENTS)), st.booleans())
def test_going_on_from_a_record_gives_the_same_files(first: int, more: int, crash: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        whole = make_writer(Path(a))
        for document in DOCUMENTS:
            add(whole, document)
        expected = whole.finish()

        writer = make_writer(Path(b))
        for document in DOCUMENTS[:first]:
            add(writer, document)
        state = writer.record()
        for document in DOCUMENTS[first : first + more]:
            add(writer, document)
        writer.append(np.array([5, 5, 5], dtype="<u2"), 3)
        if crash:
            writer.close()
        else:
            writer.end_document()
            writer.finish()
        writer = make_writer(Path(b), state)
        assert writer.num_documents == first
        for document in DOCUMENTS[first:]:
            add(writer, document)
        assert writer.finish() == expected
        assert snapshot(Path(a)) == snapshot(Path(b))


def test_without_a_record_everything_is_written_anew(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, shard_tokens=1)
    for _ in range(3):
        add(writer, [1, 2])
    writer.close()
    writer = make_writer(tmp_path)
    add(writer, [3])
    assert writer.finish().num_documents == 1
    assert read_back(tmp_path) == [[3]]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_part_that_got_shorter_is_named(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    add(writer, [1, 2, 3])
    state = writer.record()
    writer.close()
    (tmp_path / "train-00000.bin.part").write_bytes(b"\1\0")
    with pytest.raises(ValueError, match=r"train-00000\.bin\.part is shorter than it was"):
        make_writer(tmp_path, state)


def test_the_last_document_can_be_taken_back(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for document in DOCUMENTS[:4]:
        add(writer, document, len(document))
    ids, num_bytes = writer.take_last()
    assert (ids.tolist(), num_bytes) == ([], 0)
    add(writer, [8, 8], 2)
    ids, num_bytes = writer.take_last()
    assert (ids.tolist(), num_bytes) == ([8, 8], 2)
    summary = writer.finish()
    assert read_back(tmp_path) == DOCUMENTS[:3]
    assert (summary.num_documents, summary.num_tokens, summary.num_bytes) == (3, 14, 11)
    # the shard that held only that document is gone
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "train-00000.bin",
        "train-00000.idx",
    ]


def test_no_documents_make_no_files(tmp_path: Path) -> None:
    summary = make_writer(tmp_path).finish()
    assert (summary.num_tokens, summary.shards) == (0, ())
    assert list(tmp_path.iterdir()) == []


def test_unknown_bytes_stay_unknown(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    add(writer, [1], 5)
    add(writer, [1], None)
    add(writer, [1], 5)
    assert writer.finish().num_bytes is None
    assert add_bytes(1, 2) == 3
