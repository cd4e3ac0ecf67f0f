"""Which split a document is in, long documents in pieces, and places to start again."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix.data import pieces as pieces_module
from depthmix.data.pieces import Piece, Reading, ReadingPlace, cut_document, sample_texts
from depthmix.data.readers import Unit
from depthmix.data.sources import list_source


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


TEXTS = [f"document {i}" for i in range(400)]


def test_about_the_asked_share_is_for_validation() -> None:
    reading = Reading(units=[made(*TEXTS)], val_fraction=0.25)
    documents = gather(list(reading.read_pieces(ReadingPlace(0, 0))))
    assert [text for _, text in documents] == TEXTS
    assert 70 < sum(split == "val" for split, _ in documents) < 130


def test_the_content_and_the_seed_decide() -> None:
    first = {t: Reading(units=[made(*TEXTS)], val_fraction=0.5).choose_split(t) for t in TEXTS}
    turned = Reading(units=[made(*reversed(TEXTS))], val_fraction=0.5)
    assert {
        text: split for split, text in gather(list(turned.read_pieces(ReadingPlace(0, 0))))
    } == first
    other = Reading(units=[made()], val_fraction=0.5, seed=1)
    assert {text: other.choose_split(text) for text in TEXTS} != first


def test_ids_of_either_size_go_the_same_way() -> None:
    reading = Reading(units=[], val_fraction=0.5)
    for i in range(20):
        ids = [i, i + 1]
        assert reading.choose_split(np.array(ids, "<u2")) == reading.choose_split(
            np.array(ids, "<u4")
        )


def test_validation_sources_take_all_of_it() -> None:
    reading = Reading(units=[made(*TEXTS[:50])], val_units=[made("a", "b")], val_fraction=0.5)
    documents = gather(list(reading.read_pieces(ReadingPlace(0, 0))))
    assert documents == [("train", text) for text in TEXTS[:50]] + [("val", "a"), ("val", "b")]


def test_no_validation() -> None:
    reading = Reading(units=[made(*TEXTS)], val_fraction=0.0)
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
    monkeypatch.setattr(pieces_module, "PIECE_CHARS", 10)
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
    monkeypatch.setattr(pieces_module, "STRETCH_CHARS", 2)
    texts = ["aabb", "c", "ddeeff", "gghh"]
    assert list(sample_texts(texts, 1.0)) == ["aa", "bb", "c", "dd", "ee", "ff", "gg", "hh"]
    assert list(sample_texts(texts, 0.5)) == ["bb", "dd", "ff", "hh"]
    assert list(sample_texts(texts, 0.25)) == ["dd", "hh"]
