"""Documents → pieces to encode: which split each belongs to, and where reading can start again.

Owns the rule of the splits and the cutting of long documents. Knows nothing of tokenizers or of
files that are written.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from depthmix.data.readers import Unit, read_documents

# longer texts are cut at a line end: the tokenizer's time grows faster than its text, and one
# long document then keeps every thread busy
PIECE_CHARS = 1 << 20
# of a text, for a sample to train a tokenizer on
STRETCH_CHARS = 1 << 14


class ReadingPlace(NamedTuple):
    """Where reading goes on: the number of a unit, and of the next document in it."""

    unit: int
    document: int


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    content: str | np.ndarray
    split: str
    ends_document: bool
    place: ReadingPlace | None
    """What follows this piece; None where reading cannot start again there."""
    done_bytes: int
    """Of all units, on disk."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read, and how documents are told apart and shared out."""

    units: Sequence[Unit]
    val_units: Sequence[Unit] = ()
    """All of these are for validation, and then none of `units` is."""
    text_field: str = "text"
    end_token: int | None = None
    val_fraction: float = 0.02
    seed: int = 0

    @property
    def total_bytes(self) -> int:
        """Size on disk; 0 where nobody knows."""
        return sum(unit.num_bytes for unit in (*self.units, *self.val_units))

    def read_contents(self, units: Iterable[Unit]) -> Iterator[str | np.ndarray]:
        """The documents of some units that are not empty."""
        for unit in units:
            documents = read_documents(unit, text_field=self.text_field, end_token=self.end_token)
            yield from (document.content for document in documents if len(document.content))

    @cached_property
    def num_first(self) -> int:
        """How many documents there are, counted up to two."""
        return sum(1 for _ in islice(self.read_contents(self.units), 2))

    def read_pieces(self, start: ReadingPlace) -> Iterator[Piece]:
        """Every document from a place on, cut into pieces."""
        units = [*self.units, *self.val_units]
        before = [0, *accumulate(unit.num_bytes for unit in units)]
        # a hash may send a whole small corpus to one side; a single document is shared instead
        alone = not self.val_units and self.num_first == 1
        for number in range(start.unit, len(units)):
            num_read = start.document if number == start.unit else 0
            documents = read_documents(
                units[number],
                text_field=self.text_field,
                end_token=self.end_token,
                num_skipped=num_read,
            )
            for document in documents:
                num_read += 1
                content = document.content
                if len(content) == 0:
                    continue
                place = ReadingPlace(number, num_read)
                done_bytes = before[number] + document.offset_bytes
                if alone:
                    head, tail = self._cut_alone(content)
                    yield from cut_document(head, "train", None if len(tail) else place, done_bytes)
                    if len(tail):
                        yield from cut_document(tail, "val", place, done_bytes)
                else:
                    is_val = number >= len(self.units)
                    split = "val" if is_val else self.choose_split(content)
                    yield from cut_document(content, split, place, done_bytes)

    def choose_split(self, content: str | np.ndarray) -> str:
        """The same document always goes the same way, so a duplicate cannot be in both splits."""
        if self.val_units or not self.val_fraction:
            return "train"
        data = content.encode() if isinstance(content, str) else content.astype("<u4").tobytes()
        digest = hashlib.blake2b(data, digest_size=8, key=str(self.seed).encode()).digest()
        share = int.from_bytes(digest, "little") / 2**64
        return "val" if share < self.val_fraction else "train"

    def _cut_alone(self, content: str | np.ndarray) -> tuple[str | np.ndarray, str | np.ndarray]:
        """The one document of a corpus: its beginning for training, its end for validation."""
        if not self.val_fraction or len(content) < 2:
            return content, content[:0]
        cut = min(max(1, round(len(content) * (1 - self.val_fraction))), len(content) - 1)
        if isinstance(content, str):
            # a line end near the cut, else the cut itself
            cut = content.rfind("\n", cut - cut // 100, cut) + 1 or cut
        return content[:cut], content[cut:]


def cut_document(
    content: str | np.ndarray, split: str, place: ReadingPlace | None, done_bytes: int
) -> Iterator[Piece]:
    """The parts of a document, in order; text is cut after a line end where there is one."""
    start = 0
    while len(content) - start > PIECE_CHARS:
        stop = start + PIECE_CHARS
        if isinstance(content, str):
            stop = content.rfind("\n", start, stop) + 1 or stop
        yield Piece(content[start:stop], split, False, None, done_bytes)
        start = stop
    yield Piece(content[start:], split, True, place, done_bytes)


def sample_texts(texts: Iterable[str], fraction: float) -> Iterator[str]:
    """Stretches of texts, evenly spread, that make about `fraction` of them."""
    number = 0
    for text in texts:
        for start in range(0, len(text), STRETCH_CHARS):
            if int((number + 1) * fraction) > int(number * fraction):
                yield text[start : start + STRETCH_CHARS]
            number += 1
