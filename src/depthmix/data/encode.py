"""Pieces of documents → ids, on several threads, in order.

Owns the parallel work: the tokenizer releases the interpreter's lock, so threads are enough and
start at once. Does not know where pieces come from or where ids go.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from depthmix.data.pieces import Piece
from depthmix.data.tokenizer import set_parallelism

if TYPE_CHECKING:
    import tokenizers

# what a thread takes at once
PACKAGE_CHARS = 1 << 19


class Encoded(NamedTuple):
    """A piece with its ids and its UTF-8 bytes (None: unknown)."""

    piece: Piece
    ids: np.ndarray
    num_bytes: int | None


class Encoder:
    """A tokenizer set up for preparing; without one, ids pass through."""

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
            # a copy: the caller's keeps its settings
            self.tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            # a text that speaks of <|endoftext|> must not end its document
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
        """Every piece's ids, in the pieces' order, a few packages ahead of the reader."""
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
    """Group pieces into packages of about one size."""
    package, size = [], 0
    for piece in pieces:
        package.append(piece)
        size += len(piece.content)
        if size >= PACKAGE_CHARS:
            yield package
            package, size = [], 0
    if package:
        yield package
