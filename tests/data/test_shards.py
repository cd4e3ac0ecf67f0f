"""A folder is opened only whole, and its documents are read over all shards."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from depthmix.data import shards
from depthmix.data.manifest import MANIFEST_FILE
from depthmix.data.shards import Corpus

FolderMaker = Callable[..., Path]

DOCUMENTS = [list(range(10 * n + 1, 10 * n + 1 + n % 7)) for n in range(20)]


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


def test_what_a_corpus_says_of_itself(make_folder: FolderMaker) -> None:
    corpus = Corpus.open(make_folder([[1, 2, 3], [4]], num_bytes=9))
    assert (corpus.vocab_size, corpus.end_token) == (1000, 0)
    assert corpus.bytes_per_token == corpus.split("train").bytes_per_token == 18 / 6
    assert corpus.split("val").num_bytes == 9
    assert Corpus.open(make_folder([[1]], name="other")).bytes_per_token is None
    with pytest.raises(ValueError, match="no split 'test': use train or val"):
        corpus.split("test")
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
        with pytest.raises(ValueError, match=rf"{name} has {len(changed)} bytes and not the"):
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
    with pytest.raises(ValueError, match=rf"{name} is not what it was"):
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
    with pytest.raises(ValueError, match=r"train-00000\.bin is not what it was"):
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


def test_a_missing_tokenizer_is_named(make_folder: FolderMaker) -> None:
    folder = make_folder(DOCUMENTS)
    path = folder / MANIFEST_FILE
    text = path.read_text().replace('"tokenizer": null', '"tokenizer": "tokenizer.json"')
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        Corpus.open(folder)
