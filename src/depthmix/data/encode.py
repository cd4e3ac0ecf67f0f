"""Documents → pieces → ids: assign documents to splits and tokenise them on several threads.

Also cuts long documents, and records places where reading can resume. The tokenizer releases the
GIL, so threads are enough.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from depthmix.data.sources import Unit, read_documents
from depthmix.data.tokenizer import set_parallelism

if TYPE_CHECKING:
    import tokenizers

# longer texts are cut at a newline: tokenising takes superlinear time, and the parts of one long
# document can use all threads
PIECE_CHARS = 1 << 20
# length of one excerpt in the sample that a tokenizer is trained on
STRETCH_CHARS = 1 << 14

# work for a thread at a time
PACKAGE_CHARS = 1 << 19


class ReadingPlace(NamedTuple):
    """A place to resume reading: the number of a unit, and of the next document in it."""

    unit: int
    document: int


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    content: str | np.ndarray
    split: str
    ends_document: bool
    place: ReadingPlace | None
    """The place after this piece; None if reading cannot resume there."""
    done_bytes: int
    """Bytes read so far, of all units, on disk."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The units to read, and how documents are separated and assigned to splits."""

    units: Sequence[Unit]
    val_units: Sequence[Unit] = ()
    """Units for validation; if there are any, none of `units` is."""
    test_units: Sequence[Unit] = ()
    """Units for testing; the same."""
    text_field: str = "text"
    end_token: int | None = None
    val_fraction: float = 0.02
    test_fraction: float = 0.0
    seed: int = 0

    @property
    def every_unit(self) -> list[Unit]:
        """In the order in which they are read."""
        return [*self.units, *self.val_units, *self.test_units]

    @property
    def shares(self) -> dict[str, float]:
        """The shares of `units` that are held out, by split."""
        return {
            "val": 0.0 if self.val_units else self.val_fraction,
            "test": 0.0 if self.test_units else self.test_fraction,
        }

    @property
    def total_bytes(self) -> int:
        """Size on disk; 0 if unknown."""
        return sum(unit.num_bytes for unit in self.every_unit)

    def read_contents(self, units: Iterable[Unit]) -> Iterator[str | np.ndarray]:
        """The documents of some units, without empty ones."""
        for unit in units:
            documents = read_documents(unit, text_field=self.text_field, end_token=self.end_token)
            yield from (document.content for document in documents if len(document.content))

    @cached_property
    def num_first(self) -> int:
        """The number of documents, counted up to two."""
        return sum(1 for _ in islice(self.read_contents(self.units), 2))

    def read_pieces(self, start: ReadingPlace) -> Iterator[Piece]:
        """Every document from a place on, cut into pieces."""
        units = self.every_unit
        before = [0, *accumulate(unit.num_bytes for unit in units)]
        # hashing would put a single document into one split; it is divided instead
        alone = self.num_first == 1
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
                if number >= len(self.units):
                    is_test = number >= len(self.units) + len(self.val_units)
                    parts = {"test" if is_test else "val": content}
                elif alone:
                    parts = self._cut_alone(content)
                else:
                    parts = {self.choose_split(content): content}
                last = list(parts)[-1]
                for split, part in parts.items():
                    # reading can go on behind the whole document only
                    end = place if split == last else None
                    yield from cut_document(part, split, end, done_bytes)

    def choose_split(self, content: str | np.ndarray) -> str:
        """Assign a document by its content, so that duplicates end up in the same split."""
        if not any(self.shares.values()):
            return "train"
        data = content.encode() if isinstance(content, str) else content.astype("<u4").tobytes()
        digest = hashlib.blake2b(data, digest_size=8, key=str(self.seed).encode()).digest()
        place, bound = int.from_bytes(digest, "little") / 2**64, 0.0
        # validation first: asking for a test split leaves it as it is
        for split, share in self.shares.items():
            bound += share
            if place < bound:
                return split
        return "train"

    def _cut_alone(self, content: str | np.ndarray) -> dict[str, str | np.ndarray]:
        """The one document of a corpus: its beginning is for training, its end is held out."""
        held: dict[str, str | np.ndarray] = {}
        left, left_share = content, 1.0
        for split, share in reversed(self.shares.items()):
            if not share or len(left) < 2:
                continue
            cut = min(max(1, round(len(left) * (1 - share / left_share))), len(left) - 1)
            left_share -= share
            if isinstance(left, str):
                # a newline near the cut, else the cut itself
                cut = left.rfind("\n", cut - cut // 100, cut) + 1 or cut
            held[split], left = left[cut:], left[:cut]
        return {"train": left, **dict(reversed(held.items()))}


def cut_document(
    content: str | np.ndarray, split: str, place: ReadingPlace | None, done_bytes: int
) -> Iterator[Piece]:
    """The parts of a document in order; text is cut after a newline if there is one."""
    start = 0
    while len(content) - start > PIECE_CHARS:
        stop = start + PIECE_CHARS
        if isinstance(content, str):
            stop = content.rfind("\n", start, stop) + 1 or stop
        yield Piece(content[start:stop], split, False, None, done_bytes)
        start = stop
    yield Piece(content[start:], split, True, place, done_bytes)


def sample_texts(texts: Iterable[str], fraction: float) -> Iterator[str]:
    """Evenly spread excerpts of texts, about `fraction` of them in total."""
    number = 0
    for text in texts:
        for start in range(0, len(text), STRETCH_CHARS):
            if int((number + 1) * fraction) > int(number * fraction):
                yield text[start : start + STRETCH_CHARS]
            number += 1


class Encoded(NamedTuple):
    """A piece with its ids and its UTF-8 bytes (None: unknown)."""

    piece: Piece
    ids: np.ndarray
    num_bytes: int | None


class Encoder:
    """A tokenizer set up for preparing; without one, ids are passed through."""

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer | None",
        *,
        dtype: str,
        token_bytes: np.ndarray | None = None,
    ) -> None:
        """`token_bytes` has the UTF-8 bytes of each id, for documents that come as ids."""
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.token_bytes = token_bytes
        self.tokenizer = None
        if tokenizer is not None:
            # a copy, so that the caller's keeps its settings
            self.tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            # a literal <|endoftext|> in a text must not end its document
            self.tokenizer.encode_special_tokens = True

    def encode_package(self, package: list[Piece]) -> list[Encoded]:
        """The ids of some pieces."""
        texts = [piece.content for piece in package if isinstance(piece.content, str)]
        results = iter(())
        if texts:
            assert self.tokenizer is not None
            results = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        encoded = []
        for piece in package:
            content = piece.content
            if isinstance(content, str):
                ids = np.array(next(results).ids, dtype=self.dtype)
                encoded.append(Encoded(piece, ids, len(content.encode())))
            else:
                table = self.token_bytes
                num_bytes = None if table is None else int(table[content].sum())
                encoded.append(Encoded(piece, content.astype(self.dtype), num_bytes))
        return encoded

    def encode_pieces(self, pieces: Iterable[Piece], num_workers: int) -> Iterator[Encoded]:
        """Every piece's ids in order, encoded a few packages ahead of the reader."""
        waiting = deque()
        pool = ThreadPoolExecutor(num_workers, thread_name_prefix="encode")
        with set_parallelism(False):
            try:
                for package in pack_pieces(pieces):
                    waiting.append(pool.submit(self.encode_package, package))
                    if len(waiting) > 2 * num_workers:
                        yield from waiting.popleft().result()
                while waiting:
                    yield from waiting.popleft().result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def pack_pieces(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into packages of about the same size."""
    package, size = [], 0
    for piece in pieces:
        package.append(piece)
        size += len(piece.content)
        if size >= PACKAGE_CHARS:
            yield package
            package, size = [], 0
    if package:
        yield package
