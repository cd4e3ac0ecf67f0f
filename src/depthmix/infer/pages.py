"""Which row owns which page of the cache: bookkeeping only, no tensors.

A page holds `page_size` tokens of one layer of one row. A routed block stores only its routed
tokens, so each layer of a row has its own length, which is known only after a step. Before a step,
pages are reserved for the worst case; afterwards, unneeded ones are released. Steps may be in
flight while others are planned: their tokens are `promised`, and further reservations count from
there. Knows nothing of sequences, their order or the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Rows = np.ndarray | Sequence[int]
# by row and layer
Stored = np.ndarray | Sequence[Sequence[int]]


class Changes(NamedTuple):
    """Table entries that have changed, with their current values."""

    places: np.ndarray
    """Their flat indices in `Pages.tables`."""
    pages: np.ndarray


_NOTHING = np.zeros(0, dtype=np.int64)
NO_CHANGES = Changes(_NOTHING, _NOTHING)


class _Tables(NamedTuple):
    """Some tables, each from its own entry on."""

    row: np.ndarray
    layer: np.ndarray
    index: np.ndarray


class Pages:
    """The page tables of `num_rows` rows, filled from one pool of `num_pages` pages.

    `tables[layer, row]` starts with the layer's `counts[row, layer]` pages in token order, and
    `lengths[row, layer]` is the number of tokens stored in them. Read these arrays, but change
    them only through the methods.
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
        """When a row needs pages, reserve `ahead` more tokens as far as pages are free.

        Rows then need new pages less often. `longest` is the maximum length of a row; by default
        it is the number of tokens that all pages could hold in one layer.
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
        # the same layout as on the device, so that flat indices agree
        self.tables = np.zeros((num_layers, num_rows, self.most), dtype=np.int32)
        self.counts = np.zeros((num_rows, num_layers), dtype=np.int64)
        self.lengths = np.zeros((num_rows, num_layers), dtype=np.int64)
        self.promised = np.zeros(num_rows, dtype=np.int64)
        """Tokens of each row that steps in flight may store."""
        self.room = np.zeros(num_rows, dtype=np.int64)
        """Tokens by which every layer of a row can grow without a new page."""
        # the last entry is a sentinel that is never free: searches for free neighbours stop there
        self._owned = bytearray(num_pages + 1)
        self._owned[num_pages] = 1
        # a view of the same bytes, for operations on many pages at once
        self._marks = np.frombuffer(self._owned, dtype=np.uint8)
        # Where the search for a free page begins: after the last one found. Low rows come first and
        # their tables grow into the free pages after them, so the search starts far away.
        self._next = num_pages // 2
        # tables that grew since the last drain, and their first new entries
        self._touched: list[_Tables] = []

    @property
    def num_used(self) -> int:
        """Number of pages owned by rows."""
        return self.num_pages - self.num_free

    def count_worst(self, num_tokens: int) -> int:
        """Count the pages of a row whose layers all store `num_tokens`."""
        return -(-num_tokens // self.page_size) * self.num_layers

    def count_owned(self, row: int) -> int:
        """Count the pages of a row."""
        return int(self.counts[row].sum())

    def count_missing(self, row: int, num_tokens: int) -> int:
        """Count the pages needed for every layer to store `num_tokens` more."""
        if num_tokens <= self.room[row]:
            return 0
        return int(self._count_short([row], num_tokens)[0].sum())

    def list_pages(self, row: int, layer: int) -> list[int]:
        """The pages of a layer, in token order."""
        return self.tables[layer, row, : self.counts[row, layer]].tolist()

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Reserve room for `num_tokens` more in every layer; if pages are short, take none: False.

        Until the tokens are promised, another reservation starts from the same place.
        """
        if num_tokens <= self.room[row] or self.reserve_all([row], num_tokens):
            return True
        missing, spares = self._count_short([row], num_tokens)
        if missing.sum() > self.num_free:
            return False
        self._extend([row], missing, spares)
        return True

    def reserve_all(self, rows: Rows, num_tokens: int | np.ndarray) -> bool:
        """`reserve` for several rows at once, including pages ahead.

        `num_tokens` is one number for all rows, or one for each.
        """
        missing, spares = self._count_short(rows, num_tokens, self.ahead)
        if missing.sum() > self.num_free:
            return False
        self._extend(rows, missing, spares)
        return True

    def promise(self, rows: Rows | int, num_tokens: Rows | int) -> None:
        """Record that a step in flight may store these reserved tokens; rows must be distinct."""
        self.promised[rows] += num_tokens
        self.room[rows] -= num_tokens
        assert not np.count_nonzero(self.room[rows] < 0), (
            "tokens were promised without a reservation"
        )

    def settle(self, rows: Rows, stored: Stored, promised: Rows | None = None) -> None:
        """Record that layer l of rows[i] stored `stored[i][l]` more tokens; rows must be distinct.

        `promised[i]` tokens of the row are no longer in flight. Pages needed neither for stored nor
        for promised tokens, nor for those ahead, are released. An exception are pages just taken
        ahead: otherwise a layer at a page boundary would take and release one all the time.
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
        """Record that a step in flight stored nothing."""
        self.promised[row] -= promised
        self.room[row] += promised

    def release(self, row: int) -> None:
        """Release all pages of a row: its layers are then empty."""
        self._free(self._list_places(row, np.arange(self.num_layers), 0, self.counts[row]))
        self.counts[row] = self.lengths[row] = 0
        self.promised[row] = self.room[row] = 0

    def drain_changes(self) -> Changes:
        """Return the changed table entries since the last call.

        A released page leaves its entry in the device's tables, past its layer's length. An entry
        that changed several times may be listed more than once.
        """
        touched, self._touched = self._touched, []
        if not touched:
            return NO_CHANGES
        return self._list_entries(*map(np.concatenate, zip(*touched, strict=True)))

    def list_everything(self) -> Changes:
        """All table entries, as if they had changed."""
        row, layer = np.indices(self.counts.shape).reshape(2, -1)
        return self._list_entries(row, layer, np.zeros_like(row))

    def _list_entries(self, row: np.ndarray, layer: np.ndarray, index: np.ndarray) -> Changes:
        """The entries of these tables from `index` on."""
        counts = np.maximum(self.counts[row, layer] - index, 0)
        places = self._list_places(row, layer, index, counts)
        return Changes(places, self.tables.reshape(-1)[places])

    def _count_short(
        self, rows: Rows, num_tokens: int | np.ndarray, ahead: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return, by row and layer, the pages missing for so many tokens, and the free slots."""
        at = find_rows(rows)
        behind = self.lengths[at] + self.promised[at][:, None]
        spares = self.counts[at] * self.page_size - behind
        wanted = np.asarray(num_tokens).reshape(-1, 1)
        if ahead:
            # no further than the tables' size
            left = self.most * self.page_size - behind.max(axis=1, keepdims=True)
            wanted = np.maximum(np.minimum(left, wanted + ahead), wanted)
        missing = -((spares - wanted) // self.page_size)
        return np.maximum(missing, 0, out=missing), spares

    def _extend(self, rows: Rows, missing: np.ndarray, spares: np.ndarray) -> None:
        """Take free pages."""
        number, layer = missing.nonzero()
        row, count = np.asarray(rows)[number], missing[number, layer]
        index = self.counts[row, layer]
        end = index + count
        assert (end <= self.most).all(), "a row has more tokens than the longest one"
        self._touched.append(_Tables(row, layer, index))
        self.counts[row, layer] = end
        self.num_free -= int(count.sum())
        # preferred place: after the table's last page, or evenly spaced if it is empty
        place = row * self.num_layers + layer
        fresh = place * self.num_pages // (self.num_rows * self.num_layers)
        start = np.where(index > 0, self.tables[layer, row, index - 1] + 1, fresh)
        is_easy = (count == 1) & (index > 0) & (self._marks[start] == 0)
        # most tables lack one page and the next one is free; no two tables share that page
        page = start[is_easy]
        self.tables[layer[is_easy], row[is_easy], index[is_easy]] = page
        self._marks[page] = 1
        if len(page) < len(row):
            rest = np.array([row, layer, index, count, start])[:, ~is_easy]
            if not (self._take_ranges(*rest) or self._take_ranges(*self._move_away(*rest))):
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
        """Give each table `count` consecutive pages from its start on, if they are all free.

        This serves all layers of new prompts in one operation, if the cache has room.
        """
        order = start.argsort()
        stops = (start + count)[order]
        if stops[-1] > self.num_pages or (stops[:-1] > start[order][1:]).any():
            return False
        pages = _list_ranges(start, count)
        if self._marks[pages].any():
            return False
        self.tables.reshape(-1)[self._list_places(row, layer, index, count)] = pages
        self._marks[pages] = 1
        return True

    def _move_away(
        self,
        row: np.ndarray,
        layer: np.ndarray,
        index: np.ndarray,
        count: np.ndarray,
        start: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Move the starts to where the search for free pages is, with room to grow in between."""
        widths = count + self.num_pages // (self.num_rows * self.num_layers)
        stops = widths.cumsum()
        first = self._next if self._next + stops[-1] <= self.num_pages else 0
        self._next = min(first + int(stops[-1]), self.num_pages)
        return row, layer, index, count, first + stops - widths

    def _take_pages(self, row: int, layer: int, index: int, count: int, page: int) -> None:
        """Write free pages into a table: `page` and those after it if they are free.

        Consecutive pages can be read as one slice. Each table has its own preferred place, as far
        from the others as possible, so that tables do not soon grow into each other.
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
        """Release the last `extra[i, l]` pages of layer l of rows[i]."""
        number, layer = extra.nonzero()
        row, count = rows[number], extra[number, layer]
        kept = self.counts[row, layer] - count
        # the pages after those that each table keeps
        self._free(self._list_places(row, layer, kept, count))
        self.counts[row, layer] = kept

    def _free(self, places: np.ndarray) -> None:
        """Release the pages in these entries."""
        self._marks[self.tables.reshape(-1)[places]] = 0
        self.num_free += len(places)

    def _list_places(
        self,
        row: np.ndarray | int,
        layer: np.ndarray,
        index: np.ndarray | int,
        count: np.ndarray,
    ) -> np.ndarray:
        """List the flat indices of `count` entries of each table from `index` on."""
        return _list_ranges((layer * self.num_rows + row) * self.most + index, count)


def _list_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """List `counts[i]` consecutive numbers from each `starts[i]` on, one range after another."""
    # each range counts from its own start
    numbers = (starts - (counts.cumsum() - counts)).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers


def find_rows(rows: Rows) -> slice | np.ndarray:
    """Return an index that selects these rows: a slice, and so no copy, if they are adjacent."""
    first, stop = int(rows[0]), int(rows[0]) + len(rows)
    if stop == first + 1:
        return slice(first, stop)
    rows = np.asarray(rows)
    is_run = rows[-1] == stop - 1 and np.array_equal(rows, np.arange(first, stop))
    return slice(first, stop) if is_run else rows
