"""The split of a document, places to start again, and ids in order on any number of threads."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix.data import encode as encode_module
from depthmix.data.encode import (
    Encoder,
    Piece,
    Reading,
    ReadingPlace,
    cut_document,
    pack_pieces,
    sample_texts,
)
from depthmix.data.sources import Unit, list_source
from depthmix.data.tokenizer import END_OF_TEXT, measure_tokens, train_tokenizer

TEXTS = [f"{'é' * (i % 7)} document number {i}\n" * (1 + i % 5) for i in range(60)]
TOKENIZER = train_tokenizer(TEXTS, 300, parallel=False)


def made(*texts: str, name: str = "made") -> Unit:
    return Unit(kind="made", name=name, key=name, make=lambda: list(texts))


def gather(pieces: list[Piece]) -> list[tuple[str, str]]:
    """(split, text) of each document."""
    documents, parts = [], []
    for piece in pieces:
        parts.append(piece.content)
        if piece.ends_document:
            documents.append((piece.split, "".join(parts)))
            parts = []
    assert not parts
    return documents


DOCUMENTS = [f"document {i}" for i in range(400)]


def test_about_the_asked_share_is_for_validation() -> None:
    reading = Reading(units=[made(*DOCUMENTS)], val_fraction=0.25)
    documents = gather(list(reading.read_pieces(ReadingPlace(0, 0))))
    assert [text for _, text in documents] == DOCUMENTS
    assert 70 < sum(split == "val" for split, _ in documents) < 130


def test_the_content_and_the_seed_decide() -> None:
    first = {
        t: Reading(units=[made(*DOCUMENTS)], val_fraction=0.5).choose_split(t) for t in DOCUMENTS
    }
    turned = Reading(units=[made(*reversed(DOCUMENTS))], val_fraction=0.5)
    assert {
        text: split for split, text in gather(list(turned.read_pieces(ReadingPlace(0, 0))))
    } == first
    other = Reading(units=[made()], val_fraction=0.5, seed=1)
    assert {text: other.choose_split(text) for text in DOCUMENTS} != first


def test_ids_of_either_size_go_the_same_way() -> None:
    reading = Reading(units=[], val_fraction=0.5)
    for i in range(20):
        ids = [i, i + 1]
        assert reading.choose_split(np.array(ids, "<u2")) == reading.choose_split(
            np.array(ids, "<u4")
        )


def test_validation_sources_take_all_of_it() -> None:
    reading = Reading(units=[made(*DOCUMENTS[:50])], val_units=[made("a", "b")], val_fraction=0.5)
    documents = gather(list(reading.read_pieces(ReadingPlace(0, 0))))
    assert documents == [("train", text) for text in DOCUMENTS[:50]] + [("val", "a"), ("val", "b")]


def test_no_validation() -> None:
    reading = Reading(units=[made(*DOCUMENTS)], val_fraction=0.0)
    assert {split for split, _ in gather(list(reading.read_pieces(ReadingPlace(0, 0))))} == {
        "train"
    }
    alone = Reading(units=[made("only one")], val_fraction=0.0)
    assert gather(list(alone.read_pieces(ReadingPlace(0, 0)))) == [("train", "only one")]


def test_empty_documents_are_dropped_and_counted() -> None:
    reading = Reading(units=[made("", "a", "", "b", ""), made("")], val_fraction=0.0)
    found = list(reading.read_pieces(ReadingPlace(0, 0)))
    assert [(piece.content, piece.place) for piece in found] == [
        ("a", ReadingPlace(0, 2)),
        ("b", ReadingPlace(0, 4)),
    ]
    assert reading.num_first == 2
    assert Reading(units=[made(""), made()]).num_first == 0


def test_a_single_document_is_shared() -> None:
    text = "line\n" * 1000
    reading = Reading(units=[made(""), made(text)])
    found = list(reading.read_pieces(ReadingPlace(0, 0)))
    assert gather(found) == [("train", "line\n" * 980), ("val", "line\n" * 20)]
    # between its parts reading cannot start again
    assert [piece.place for piece in found] == [None, ReadingPlace(1, 1)]


@given(st.text("ab\n", min_size=1, max_size=300), st.floats(0.001, 0.99))
def test_a_single_document_loses_nothing(text: str, fraction: float) -> None:
    found = gather(
        list(Reading(units=[made(text)], val_fraction=fraction).read_pieces(ReadingPlace(0, 0)))
    )
    assert "".join(part for _, part in found) == text
    assert [split for split, _ in found] == ["train", "val"][: min(2, len(text))]
    assert all(part for _, part in found)


def test_a_single_document_of_ids_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "a.u16"
    path.write_bytes(np.arange(1, 101, dtype="<u2").tobytes())
    reading = Reading(units=list_source(str(path)).units, end_token=0)
    train, val = reading.read_pieces(ReadingPlace(0, 0))
    assert np.array_equal(train.content, np.arange(1, 99))
    assert np.array_equal(val.content, [99, 100])


def test_reading_starts_again_anywhere() -> None:
    reading = Reading(units=[made("a", "", "b"), made("c"), made("d", "e")], val_units=[made("f")])
    everything = list(reading.read_pieces(ReadingPlace(0, 0)))
    assert [piece.content for piece in everything] == list("abcdef")
    for number, piece in enumerate(everything):
        assert piece.place is not None
        assert list(reading.read_pieces(piece.place)) == everything[number + 1 :]


def test_progress_counts_the_bytes_on_disk(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 10)
    reading = Reading(units=list_source(str(tmp_path)).units, val_fraction=0.0)
    assert [piece.done_bytes for piece in reading.read_pieces(ReadingPlace(0, 0))] == [10, 20]
    assert reading.total_bytes == 20


def test_long_text_is_cut_at_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "PIECE_CHARS", 10)
    text = "aaaa\nbbbb\ncccc\n" + "d" * 25
    found = list(cut_document(text, "train", ReadingPlace(0, 1), 5))
    assert [piece.content for piece in found] == [
        "aaaa\nbbbb\n",
        "cccc\n",
        "d" * 10,
        "d" * 10,
        "d" * 5,
    ]
    assert [piece.ends_document for piece in found] == [False] * 4 + [True]
    assert [piece.place for piece in found] == [None] * 4 + [ReadingPlace(0, 1)]
    ids = list(cut_document(np.arange(25), "train", None, 0))
    assert [len(piece.content) for piece in ids] == [10, 10, 5]


def test_a_sample_is_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "STRETCH_CHARS", 2)
    texts = ["aabb", "c", "ddeeff", "gghh"]
    assert list(sample_texts(texts, 1.0)) == ["aa", "bb", "c", "dd", "ee", "ff", "gg", "hh"]
    assert list(sample_texts(texts, 0.5)) == ["bb", "dd", "ff", "hh"]
    assert list(sample_texts(texts, 0.25)) == ["dd", "hh"]


def piece(content: str | np.ndarray) -> Piece:
    return Piece(content, "train", True, ReadingPlace(0, 1), 0)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_order_and_ids_do_not_depend_on_threads(
    monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(encode_module, "PACKAGE_CHARS", 100)
    encoder = Encoder(TOKENIZER, dtype="uint16")
    found = list(encoder.encode_pieces(map(piece, TEXTS), num_workers))
    assert [encoded.piece.content for encoded in found] == TEXTS
    for text, encoded in zip(TEXTS, found, strict=True):
        assert encoded.ids.tolist() == TOKENIZER.encode(text).ids
        assert encoded.ids.dtype == np.dtype("<u2")
        assert encoded.num_bytes == len(text.encode())


def test_text_about_the_end_token_does_not_end_a_document() -> None:
    (found,) = Encoder(TOKENIZER, dtype="uint16").encode_package([piece(f"a{END_OF_TEXT}b")])
    assert 0 not in found.ids
    assert TOKENIZER.decode(found.ids.tolist(), skip_special_tokens=False) == f"a{END_OF_TEXT}b"


def test_settings_of_a_tokenizer_do_not_cut_or_pad() -> None:
    tokenizer = type(TOKENIZER).from_str(TOKENIZER.to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=200)
    (found,) = Encoder(tokenizer, dtype="uint32").encode_package([piece(TEXTS[4])])
    assert found.ids.tolist() == TOKENIZER.encode(TEXTS[4]).ids
    # the caller's own is as it was
    assert tokenizer.truncation is not None


def test_ids_pass_through_beside_text() -> None:
    encoder = Encoder(TOKENIZER, dtype="uint16", token_bytes=measure_tokens(TOKENIZER))
    ids = np.array(TOKENIZER.encode("number é").ids, dtype="<u4")
    first, second, third = encoder.encode_package([piece("a"), piece(ids), piece("b")])
    assert second.ids.tolist() == ids.tolist()
    assert second.ids.dtype == np.dtype("<u2")
    assert second.num_bytes == 9
    assert (first.num_bytes, third.num_bytes) == (1, 1)
    (unknown,) = Encoder(None, dtype="uint16").encode_package([piece(ids)])
    assert unknown.num_bytes is None


def test_pieces_are_packed_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "PACKAGE_CHARS", 4)
    packed = pack_pieces(map(piece, ["a", "bcd", "efghij", "k"]))
    assert [[p.content for p in package] for package in packed] == [["a", "bcd"], ["efghij"], ["k"]]


def test_an_error_while_reading_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "PACKAGE_CHARS", 1)

    def read() -> Iterator[Piece]:
        yield piece("a")
        raise ValueError("line 2 is wrong")

    with pytest.raises(ValueError, match="line 2 is wrong"):
        list(Encoder(TOKENIZER, dtype="uint16").encode_pieces(read(), 2))
