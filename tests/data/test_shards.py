"""Shards hold the documents, a writer goes on from any record, a folder is opened only whole."""

import dataclasses
import hashlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix.data import shards
from depthmix.data.manifest import MANIFEST_FILE
from depthmix.data.prepare import prepare
from depthmix.data.shards import Corpus, ShardWriter, add_bytes
from depthmix.data.tokenizer import train_tokenizer
from depthmix.files import hash_file
from depthmix.models.vocabulary import read_vocabulary

WRITTEN = [list(range(1, 1 + n)) for n in (3, 1, 7, 0, 5, 2, 9, 4)]

FolderMaker = Callable[..., Path]

DOCUMENTS = [list(range(10 * n + 1, 10 * n + 1 + n % 7)) for n in range(20)]


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
    for document in WRITTEN:
        add(writer, document)
    summary = writer.finish()
    assert read_back(tmp_path, {"uint16": "<u2", "uint32": "<u4"}[dtype]) == WRITTEN
    assert [shard.num_documents for shard in summary.shards] == [3, 3, 1, 1]
    assert summary.num_tokens == sum(len(document) + 1 for document in WRITTEN)
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


@given(st.integers(0, len(WRITTEN)), st.integers(0, len(WRITTEN)), st.booleans())
def test_going_on_from_a_record_gives_the_same_files(first: int, more: int, crash: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        whole = make_writer(Path(a))
        for document in WRITTEN:
            add(whole, document)
        expected = whole.finish()

        writer = make_writer(Path(b))
        for document in WRITTEN[:first]:
            add(writer, document)
        state = writer.record()
        for document in WRITTEN[first : first + more]:
            add(writer, document)
        writer.append(np.array([5, 5, 5], dtype="<u2"), 3)
        if crash:
            writer.close()
        else:
            writer.end_document()
            writer.finish()
        writer = make_writer(Path(b), state)
        assert writer.num_documents == first
        for document in WRITTEN[first:]:
            add(writer, document)
        assert writer.finish() == expected
        assert snapshot(Path(a)) == snapshot(Path(b))


def test_without_a_record_everything_is_written_again(tmp_path: Path) -> None:
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
    for document in WRITTEN[:4]:
        add(writer, document, len(document))
    ids, num_bytes = writer.take_last()
    assert (ids.tolist(), num_bytes) == ([], 0)
    add(writer, [8, 8], 2)
    ids, num_bytes = writer.take_last()
    assert (ids.tolist(), num_bytes) == ([8, 8], 2)
    summary = writer.finish()
    assert read_back(tmp_path) == WRITTEN[:3]
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


@pytest.mark.parametrize("shard_tokens", [1, 9, 1 << 20])
def test_documents_are_numbered_through_all_shards(
    make_folder: FolderMaker, shard_tokens: int
) -> None:
    corpus = Corpus.open(make_folder(DOCUMENTS, shard_tokens=shard_tokens), verify="full")
    split = corpus.split("train")
    assert split.num_documents == len(DOCUMENTS)
    assert split.num_tokens == sum(len(document) + 1 for document in DOCUMENTS)
    assert split.document_lengths.tolist() == [len(document) + 1 for document in DOCUMENTS]
    for number, document in enumerate(DOCUMENTS):
        assert split.read(number).tolist() == [*document, 0]
        assert split.read(number, 1, 3).tolist() == [*document, 0][1:3]
        assert split.read(number, 2).tolist() == [*document, 0][2:]
    stream = [number for document in DOCUMENTS for number in [*document, 0]]
    numbers = np.random.default_rng(0).integers(0, len(stream), (5, 40))
    assert np.array_equal(split.gather(numbers), np.array(stream)[numbers])


def test_a_corpus_describes_itself(make_folder: FolderMaker) -> None:
    corpus = Corpus.open(make_folder([[1, 2, 3], [4]], num_bytes=9))
    assert (corpus.vocab_size, corpus.end_token) == (1000, 0)
    assert corpus.bytes_per_token == corpus.split("train").bytes_per_token == 18 / 6
    assert corpus.split("val").num_bytes == 9
    assert Corpus.open(make_folder([[1]], name="other")).bytes_per_token is None
    with pytest.raises(ValueError, match="there is no split 'held': use train or val"):
        corpus.split("held")
    with pytest.raises(IndexError, match="no document 2 in 'train', which has 2"):
        corpus.split("train").read(2)
    with pytest.raises(ValueError, match="without a tokenizer"):
        corpus.load_tokenizer()


def test_a_tokenizer_is_copied_once(make_folder: FolderMaker, tmp_path: Path) -> None:
    folder, place = make_folder([[1]]), tmp_path / "place"
    place.mkdir()
    corpus = Corpus.open(folder)
    corpus.copy_tokenizer(place)
    assert list(place.iterdir()) == []
    origin = {"folder": str(folder), "hash": corpus.manifest_hash, "end_token": 0}
    assert corpus.describe_origin() == {**origin, "tokenizer_hash": None}
    corpus.manifest = dataclasses.replace(corpus.manifest, tokenizer="words.json")
    for content in ("first", "second"):
        (folder / "words.json").write_text(content)
        corpus.copy_tokenizer(place)
        sha256 = hashlib.sha256(content.encode()).hexdigest()
        assert corpus.describe_origin() == {**origin, "tokenizer_hash": sha256}
        # what is there is not written over
        assert [path.name for path in place.iterdir()] == ["tokenizer.json"]
        assert (place / "tokenizer.json").read_text() == "first"


def test_an_empty_split(make_folder: FolderMaker) -> None:
    split = Corpus.open(make_folder([[1]], val=()), verify="full").split("val")
    assert (split.num_tokens, split.num_documents, split.bytes_per_token) == (0, 0, None)
    assert split.document_lengths.tolist() == []


def test_the_hash_is_of_the_content(make_folder: FolderMaker) -> None:
    hashes = [
        Corpus.open(make_folder(documents, name=name)).manifest_hash
        for name, documents in (("a", [[1, 2]]), ("b", [[1, 2]]), ("c", [[1, 3]]))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("name", ["train-00001.bin", "train-00001.idx", "val-00000.bin"])
def test_a_missing_or_cut_file_is_named(make_folder: FolderMaker, name: str) -> None:
    folder = make_folder(DOCUMENTS, shard_tokens=9)
    path = folder / name
    data = path.read_bytes()
    for changed in (data[:-1], data + b"\0\0"):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{name} has {len(changed)} bytes, but the"):
            Corpus.open(folder)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing: copy it again"):
        Corpus.open(folder)


@pytest.mark.parametrize("name", ["train-00000.bin", "val-00000.idx"])
def test_changed_content_is_found_by_a_full_check(make_folder: FolderMaker, name: str) -> None:
    folder = make_folder(DOCUMENTS)
    path = folder / name
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    Corpus.open(folder)
    with pytest.raises(ValueError, match=rf"{name} has changed"):
        Corpus.open(folder, verify="full")


def test_content_is_checked_where_that_takes_no_time(
    make_folder: FolderMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(DOCUMENTS)
    path = folder / "train-00000.bin"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    size = len(data) + (folder / "val-00000.bin").stat().st_size
    monkeypatch.setattr(shards, "FULL_CHECK_BYTES", size)
    with pytest.raises(ValueError, match=r"train-00000\.bin has changed"):
        Corpus.open(folder, verify="auto")
    monkeypatch.setattr(shards, "FULL_CHECK_BYTES", size - 1)
    Corpus.open(folder, verify="auto")
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"train-00000\.bin has"):
        Corpus.open(folder, verify="auto")


@pytest.mark.parametrize("offsets", [[1, 3, 5], [0, 5, 5], [0, 3, 4]])
def test_an_index_that_does_not_fit_is_named(make_folder: FolderMaker, offsets: list[int]) -> None:
    folder = make_folder([[1, 2], [3]])
    (folder / "train-00000.idx").write_bytes(np.array(offsets, dtype="<u8").tobytes())
    with pytest.raises(ValueError, match=r"train-00000\.idx does not fit its shard"):
        _ = Corpus.open(folder).split("train").document_lengths


@pytest.mark.parametrize("has_own", [False, True])
def test_a_swapped_tokenizer_is_refused(tmp_path: Path, has_own: bool) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other.json"
    text.write_text("one and two and three\n" * 50)
    train_tokenizer(["another text " * 50], 300, parallel=False).save(str(other))
    tokenizer = tmp_path / "own.json"
    train_tokenizer(["one and two " * 50], 300, parallel=False).save(str(tokenizer))
    folder = tmp_path / "data"
    prepare([str(text)], folder, tokenizer=tokenizer if has_own else None, num_workers=1)
    first = Corpus.open(folder).manifest
    assert first.tokenizer_sha256 == hash_file(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer that made the ids"):
        Corpus.open(folder)
    with pytest.raises(ValueError, match=r"is not the tokenizer that made the ids"):
        read_vocabulary(folder)
    # a folder of an earlier release has the hash only where a tokenizer was given
    older = dataclasses.replace(first, tokenizer_sha256=None)
    (folder / MANIFEST_FILE).write_text(older.to_json())
    assert "tokenizer_sha256" not in older.to_json()
    if has_own:
        with pytest.raises(ValueError, match=r"is not the tokenizer that made the ids"):
            Corpus.open(folder)
    else:
        assert Corpus.open(folder).manifest == older


def test_a_missing_tokenizer_is_named(make_folder: FolderMaker) -> None:
    folder = make_folder(DOCUMENTS)
    path = folder / MANIFEST_FILE
    text = path.read_text().replace('"tokenizer": null', '"tokenizer": "tokenizer.json"')
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        Corpus.open(folder)
