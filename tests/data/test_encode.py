"""Encoding keeps the order on any number of threads, and takes text for text."""

from collections.abc import Iterator

import numpy as np
import pytest

from depthmix.data import encode as encode_module
from depthmix.data.encode import Encoder, pack_pieces
from depthmix.data.pieces import Piece, ReadingPlace
from depthmix.data.tokenizer import END_OF_TEXT, measure_tokens, train_tokenizer

TEXTS = [f"{'é' * (i % 7)} document number {i}\n" * (1 + i % 5) for i in range(60)]
TOKENIZER = train_tokenizer(TEXTS, 300, parallel=False)


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
