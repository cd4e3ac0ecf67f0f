"""Which row owns which page of the cache: bookkeeping only, no tensors.

A page holds `page_size` tokens of one layer of one row. A routed block stores its routed tokens
only, so the layers of a row have lengths of their own, and how long they become is known only
after a step. Before it, room for the worst case is reserved; after it, what was not needed goes
back. Steps may be under way while others are planned: their tokens are promised, and room is
counted behind them. What a step stored is noted for all its rows at once. Knows nothing of
sequences, of their order or of the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Rows = np.ndarray | Sequence[int]
# by row and layer
Stored = np.ndarray | Sequence[Sequence[int]]


class Changes(NamedTuple):
    """New entries of the tables, as they are now."""

    places: np.ndarray
    """Where each of them stands among all entries of `Pages.tables`, counted flat."""
    pages: np.ndarray


_NOTHING = np.zeros(0, dtype=np.int64)
NO_CHANGES = Changes(_NOTHING, _NOTHING)


class _Tables(NamedTuple):
    """Some tables, from an entry of each on."""

    row: np.ndarray
    layer: np.ndarray
    index: np.ndarray


class Pages:
    """The page tables of `num_rows` rows, filled from one pool of `num_pages` pages.

    `tables[layer, row]` begins with the `counts[row, layer]` pages of a layer in the order of its
    tokens, and `lengths[row, layer]` counts the tokens stored in them. Read them, but change them
    only through the methods.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_rows: int,
        ahead: int = 0,
        longest: int | None = None,
    ) -> None:
        """Rows that lack pages get room for `ahead` more tokens, as far as pages are free.

        They then need to be looked at less often. No row has more than `longest` tokens; unless
        given, as many as a layer could have if it owned every page.
        """
        for name, value in (
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("num_layers", num_layers),
            ("num_rows", num_rows),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}.")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        self.num_rows = num_rows
        self.ahead = ahead
        self.most = num_pages if longest is None else -(-longest // page_size)
        """Pages of the longest table."""
        self.num_free = num_pages
        # laid out as the device's, so that a place here is one there
        self.tables = np.zeros((num_layers, num_rows, self.most), dtype=np.int32)
        self.counts = np.zeros((num_rows, num_layers), dtype=np.int64)
        self.lengths = np.zeros((num_rows, num_layers), dtype=np.int64)
        self.promised = np.zeros(num_rows, dtype=np.int64)
        """Tokens of each row whose steps are under way."""
        self.room = np.zeros(num_rows, dtype=np.int64)
        """Tokens that fit behind those in every layer of each row without a new page."""
        # a sentinel that is never free: searches for free neighbours stop there
        self._owned = bytearray(num_pages + 1)
        self._owned[num_pages] = 1
        # the same bytes, for many pages at once
        self._marks = np.frombuffer(self._owned, dtype=np.uint8)
        # Where to look for a free page: behind the last one that was found so. Low rows are used
        # first, and their tables grow into what is free behind them, so it begins far from those.
        self._next = num_pages // 2
        # tables that grew since the last drain, and from where on
        self._touched: list[_Tables] = []

    @property
    def num_used(self) -> int:
        """Pages that some row owns."""
        return self.num_pages - self.num_free

    def count_worst(self, num_tokens: int) -> int:
        """Count the pages of a row in which every layer stores `num_tokens`."""
        return -(-num_tokens // self.page_size) * self.num_layers

    def count_owned(self, row: int) -> int:
        """Count the pages of a row."""
        return int(self.counts[row].sum())

    def count_missing(self, row: int, num_tokens: int) -> int:
        """Count the pages to get so that every layer has room for `num_tokens` more."""
        if num_tokens <= self.room[row]:
            return 0
        return int(self._count_short([row], num_tokens)[0].sum())

    def list_pages(self, row: int, layer: int) -> list[int]:
        """The pages of a layer, in the order of its tokens."""
        return self.tables[layer, row, : self.counts[row, layer]].tolist()

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` more in every layer: take all the pages, or none and False.

        Until they are promised, another reservation counts from the same place.
        """
        if num_tokens <= self.room[row] or self.reserve_all([row], num_tokens):
            return True
        missing, spares = self._count_short([row], num_tokens)
        if missing.sum() > self.num_free:
            return False
        self._extend([row], missing, spares)
        return True

    def reserve_all(self, rows: Rows, num_tokens: int) -> bool:
        """The same for several rows and what is ahead of each, at once."""
        missing, spares = self._count_short(rows, num_tokens, self.ahead)
        if missing.sum() > self.num_free:
            return False
        self._extend(rows, missing, spares)
        return True

    def promise(self, rows: Rows | int, num_tokens: Rows | int) -> None:
        """Note that a step with these reserved tokens is under way; a row comes once."""
        self.promised[rows] += num_tokens
        self.room[rows] -= num_tokens
        assert not np.count_nonzero(self.room[rows] < 0), (
            "tokens were promised without a reservation"
        )

    def settle(self, rows: Rows, stored: Stored, promised: Rows | None = None) -> None:
        """Note that layer l of rows[i] stored `stored[i][l]` more tokens; a row comes once.

        They are out of `promised[i]` tokens that were under way. Pages that neither hold tokens nor
        wait for promised ones, or for those ahead, go back; but not one that was just taken for
        those ahead, or a layer at the end of its page would take and return one all the time.
        """
        if not len(rows):
            return
        at = find_rows(rows)
        if promised is not None:
            self.promised[at] -= promised
        self.lengths[at] += stored
        spares = self.counts[at] * self.page_size
        spares -= self.lengths[at]
        spares -= self.promised[at][:, None]
        assert spares.min() >= 0, "tokens were stored without a reservation"
        many = 2 * self.ahead + self.page_size
        if spares.max() >= many:
            extra = np.where(spares >= many, spares - self.ahead, 0) // self.page_size
            spares -= extra * self.page_size
            self._cut_tables(np.asarray(rows), extra)
        self.room[at] = spares.min(axis=1)

    def withdraw(self, row: int, promised: int) -> None:
        """Note that a step that was under way stored nothing that counts."""
        self.promised[row] -= promised
        self.room[row] += promised

    def release(self, row: int) -> None:
        """Take everything back from a row: its layers are empty."""
        self._cut_tables(np.array([row]), self.counts[row][None])
        self.lengths[row] = 0
        self.promised[row] = self.room[row] = 0

    def drain_changes(self) -> Changes:
        """The new entries of the tables since the last call.

        A page that went back leaves its entry behind in the device's tables, past the length of
        its layer. An entry that is new more than once may be listed as often.
        """
        touched, self._touched = self._touched, []
        if not touched:
            return NO_CHANGES
        return self._list_entries(*map(np.concatenate, zip(*touched, strict=True)))

    def list_everything(self) -> Changes:
        """All entries of all tables, as if they were new."""
        row, layer = np.indices(self.counts.shape).reshape(2, -1)
        return self._list_entries(row, layer, np.zeros_like(row))

    def _list_entries(self, row: np.ndarray, layer: np.ndarray, index: np.ndarray) -> Changes:
        """The entries of these tables from `index` on."""
        counts = np.maximum(self.counts[row, layer] - index, 0)
        starts = (layer * self.num_rows + row) * self.most + index
        # each table counts up from its start
        places = np.repeat(starts - (counts.cumsum() - counts), counts)
        places += np.arange(len(places))
        return Changes(places, self.tables.reshape(-1)[places])

    def _count_short(
        self, rows: Rows, num_tokens: int, ahead: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """By row and layer: pages that are missing for so many tokens, and tokens that fit."""
        at = find_rows(rows)
        behind = self.lengths[at] + self.promised[at][:, None]
        spares = self.counts[at] * self.page_size - behind
        if ahead:
            # no further than tables reach
            left = self.most * self.page_size - behind.max(axis=1, keepdims=True)
            num_tokens = np.clip(left, num_tokens, num_tokens + ahead)
        missing = -((spares - num_tokens) // self.page_size)
        return np.maximum(missing, 0, out=missing), spares

    def _extend(self, rows: Rows, missing: np.ndarray, spares: np.ndarray) -> None:
        """Take pages that are free."""
        number, layer = missing.nonzero()
        row, count = np.asarray(rows)[number], missing[number, layer]
        index = self.counts[row, layer]
        end = index + count
        assert (end <= self.most).all(), "a row has more tokens than the longest one"
        self._touched.append(_Tables(row, layer, index))
        self.counts[row, layer] = end
        self.num_free -= int(count.sum())
        # where each would best go on: behind its last page, or at a place of its own
        place = row * self.num_layers + layer
        fresh = place * self.num_pages // (self.num_rows * self.num_layers)
        start = np.where(index > 0, self.tables[layer, row, index - 1] + 1, fresh)
        is_easy = (count == 1) & (index > 0) & (self._marks[start] == 0)
        # most tables lack one page, whose neighbour is free; no two have the same neighbour
        page = start[is_easy]
        self.tables[layer[is_easy], row[is_easy], index[is_easy]] = page
        self._marks[page] = 1
        if len(page) < len(row):
            rest = np.stack([row, layer, index, count, start])[:, ~is_easy]
            if not self._take_ranges(*rest):
                for table in rest.T.tolist():
                    self._take_pages(*table)
        self.room[find_rows(rows)] = (spares + missing * self.page_size).min(axis=1)

    def _take_ranges(
        self,
        row: np.ndarray,
        layer: np.ndarray,
        index: np.ndarray,
        count: np.ndarray,
        start: np.ndarray,
    ) -> bool:
        """Give each table the `count` pages from its start on, if all of those are free.

        So it is for the layers of a prompt that is new in a cache with room: all at once.
        """
        num_pages = int(count[0])
        starts = np.sort(start)
        is_apart = (count == num_pages).all() and (np.diff(starts) >= num_pages).all()
        if not is_apart or starts[-1] + num_pages > self.num_pages:
            return False
        number = np.arange(num_pages)
        pages = start[:, None] + number
        if self._marks[pages].any():
            return False
        self.tables[layer[:, None], row[:, None], index[:, None] + number] = pages
        self._marks[pages] = 1
        return True

    def _take_pages(self, row: int, layer: int, index: int, count: int, page: int) -> None:
        """Write free pages into a table, `page` and its neighbours where those are free.

        Pages that follow each other can be read as one slice. So that tables do not grow into one
        another at once, each begins at a place of its own, as far from the others as possible.
        """
        table, owned, end = self.tables[layer, row], self._owned, index + count
        while index < end:
            is_near = not owned[page]
            if not is_near:
                page = owned.find(0, self._next)
                page = owned.find(0) if page < 0 else page
            stop = owned.find(1, page, page + end - index)
            stop = page + end - index if stop < 0 else stop
            if not is_near:
                self._next = stop
            owned[page:stop] = b"\1" * (stop - page)
            table[index : index + stop - page] = np.arange(page, stop)
            index, page = index + stop - page, stop

    def _cut_tables(self, rows: np.ndarray, extra: np.ndarray) -> None:
        """Take the last `extra[i, l]` pages of layer l of rows[i] back."""
        number, layer = extra.nonzero()
        row, count = rows[number], extra[number, layer]
        kept = self.counts[row, layer] - count
        # each table gives what follows those that it keeps
        index = np.repeat(kept - (count.cumsum() - count), count)
        index += np.arange(len(index))
        pages = self.tables[np.repeat(layer, count), np.repeat(row, count), index]
        self._marks[pages] = 0
        self.num_free += len(pages)
        self.counts[row, layer] = kept


def find_rows(rows: Rows) -> slice | np.ndarray:
    """What picks these rows out of an array: where they are neighbours, without a copy."""
    first, stop = int(rows[0]), int(rows[0]) + len(rows)
    if stop == first + 1:
        return slice(first, stop)
    rows = np.asarray(rows)
    is_run = rows[-1] == stop - 1 and np.array_equal(rows, np.arange(first, stop))
    return slice(first, stop) if is_run else rows
