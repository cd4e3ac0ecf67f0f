"""Rows of a split in a fixed random order; the batch number is the only state.

Shuffles documents and rows, and cuts the stream into rows. Does not import torch.
"""

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from depthmix.data.shards import Split

__all__ = ["Batch", "Loader", "Prefetcher", "prefetch"]

# a position refers to the same batch only if these are unchanged
KEY = ("seed", "seq_len", "batch_size", "shuffle")


class Batch(NamedTuple):
    """Rows of tokens, the next token of each, and the document of each within its row."""

    tokens: Int64[np.ndarray, "B T"]
    targets: Int64[np.ndarray, "B T"]
    documents: Int32[np.ndarray, "B T"]
    """From 0, increasing along the row. An end token belongs to the document after it: every
    document thus begins with an end token, as it does in generation."""


class Epoch(NamedTuple):
    """One epoch: the order of documents, where each begins in the stream, and the order of rows."""

    order: Int64[np.ndarray, "documents"]
    starts: Int64[np.ndarray, "documents_plus_1"]
    rows: Int64[np.ndarray, "rows"] | None


class Loader:
    """Global batch i is rows i·B to (i+1)·B of the training; a rank takes its part of them.

    An epoch concatenates all documents in a new order and cuts this stream into rows of `seq_len`
    tokens, plus one for the last target. The rows are shuffled again, because rows of one long
    document would make a correlated batch.
    """

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        """`batch_size` counts the rows of all ranks; without `shuffle`, keeps the corpus order."""
        if seq_len < 1 or batch_size < 1:
            raise ValueError("seq_len and batch_size must be at least 1")
        if batch_size % world_size:
            raise ValueError(
                f"a batch of {batch_size} rows cannot be divided among {world_size} processes: "
                f"make batch_size a multiple of {world_size}"
            )
        if split.num_tokens < seq_len + 1:
            raise ValueError(
                f"the split '{split.name}' has {split.num_tokens} tokens, fewer than one row of "
                f"{seq_len} + 1: lower train.seq_len to {max(1, split.num_tokens - 1)}, or prepare "
                f"more data"
            )
        if seed < 0:
            raise ValueError(f"seed = {seed} must not be negative")
        assert 0 <= rank < world_size
        self.split, self.seq_len, self.batch_size = split, seq_len, batch_size
        self.seed, self.rank, self.world_size, self.shuffle = seed, rank, world_size, shuffle
        self.num_rows_per_epoch = (split.num_tokens - 1) // seq_len
        self.position = 0
        """Number of global batches consumed."""
        self._epochs: dict[int, Epoch] = {}

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch begins in, from 0."""
        return self.position * self.batch_size // self.num_rows_per_epoch

    def next(self) -> Batch:
        """This rank's rows of the next global batch."""
        num_rows = self.batch_size // self.world_size
        first = self.position * self.batch_size + self.rank * num_rows
        batch = self.read_rows(first, num_rows)
        self.position += 1
        return batch

    def read_rows(self, first: int, num_rows: int) -> Batch:
        """Rows of the whole training from `first` on; they may span several epochs."""
        parts = []
        while num_rows > 0:
            epoch, row = divmod(first, self.num_rows_per_epoch)
            taken = min(num_rows, self.num_rows_per_epoch - row)
            parts.append(self._read_part(epoch, row, taken))
            first, num_rows = first + taken, num_rows - taken
        if len(parts) == 1:
            return parts[0]
        return Batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """The position and the settings that it depends on, as plain data."""
        return {"position": self.position, **{name: getattr(self, name) for name in KEY}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader with the same order stopped."""
        for name in KEY:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved position is for {name} = {state[name]}, and {name} is now "
                    f"{getattr(self, name)}: keep it as it was"
                )
        self.position = int(state["position"])

    def _read_part(self, epoch: int, row: int, num_rows: int) -> Batch:
        order, starts, rows = self._find_epoch(epoch)
        numbers = np.arange(row, row + num_rows) if rows is None else rows[row : row + num_rows]
        # the position in the stream of each of the rows' T+1 tokens
        stream = numbers[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        first = np.searchsorted(starts, stream[:, 0], side="right") - 1
        last = np.searchsorted(starts, stream[:, -1], side="right") - 1
        document = np.empty_like(stream)
        for i in range(num_rows):
            # the document number of each token in this row
            begins = starts[first[i] : last[i] + 2].clip(stream[i, 0], stream[i, -1] + 1)
            document[i] = np.repeat(np.arange(first[i], last[i] + 1), np.diff(begins))
        inside = stream - starts[document]
        ids = self.split.gather(self.split.document_starts[order[document]] + inside)
        # a token belongs to the document of the next one: an end token opens the document after it
        documents = (document[:, 1:] - document[:, 1:2]).astype(np.int32)
        tokens, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        return Batch(tokens, targets, documents)

    def _find_epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            # a batch may need the next epoch too, but never a third one
            for old in [old for old in self._epochs if old < number - 1 or old > number]:
                del self._epochs[old]
            self._epochs[number] = self._order_epoch(number)
        return self._epochs[number]

    def _order_epoch(self, number: int) -> Epoch:
        num_documents = self.split.num_documents
        if not self.shuffle:
            return Epoch(np.arange(num_documents), self.split.document_starts, None)
        order = permute(num_documents, (self.seed, number, 0))
        lengths = self.split.document_lengths[order]
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        return Epoch(order, starts, permute(self.num_rows_per_epoch, (self.seed, number, 1)))


def permute(count: int, key: tuple[int, ...]) -> Int64[np.ndarray, "count"]:
    """A permutation that depends on the key alone."""
    # raw bits and a stable sort: numpy guarantees these across versions, unlike its shuffles
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")


class Prefetcher:
    """Assembles a loader's next batches in a thread; its position is that of the last one returned.

    Close it, or use it in a `with` block.
    """

    def __init__(self, loader: Loader, depth: int = 2) -> None:
        """`depth` is how many batches may wait, besides the one being assembled."""
        assert depth > 0
        self.loader, self.depth = loader, depth
        self.position = loader.position
        self._start()

    def next(self) -> Batch:
        """The loader's next batch; its errors are raised here."""
        if self._end is None:
            found = self._ready.get()
            if isinstance(found, Batch):
                self.position += 1
                return found
            self._end = found
        raise self._end

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was returned."""
        return {**self.loader.state_dict(), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at another position."""
        self.close()
        self.loader.load_state_dict(state)
        self.position = self.loader.position
        self._start()

    def close(self) -> None:
        """Stop the thread; the loader is then at this position."""
        self._stopped = True
        # the thread may be waiting for room; it checks whether to stop before the next put
        self._discard()
        self._thread.join()
        self._discard()
        self._ready.put(RuntimeError("this prefetcher is closed"))
        self.loader.position = self.position

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        # batches in order, then the exception that ended them
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(self.depth)
        self._end: BaseException | None = None
        self._stopped = False
        # a daemon, so that a program that forgets to close it still exits
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            while not self._stopped:
                self._ready.put(self.loader.next())
        except BaseException as error:
            self._ready.put(error)

    def _discard(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()


def prefetch(loader: Loader, depth: int = 2) -> Prefetcher:
    """Assemble the loader's batches ahead, in the background."""
    return Prefetcher(loader, depth)
