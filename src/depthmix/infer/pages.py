"""Who owns which page of the cache: the books only, no tensors.

A page holds `page_size` tokens of one layer of one row. A routed block stores its routed tokens
only, so the layers of a row have lengths of their own, and how long they become is known only
after a step. Before it, room for the worst case is reserved; after it, what was not needed goes
back. Steps may be under way while others are planned: their tokens are promised, and room is
counted behind them. Knows nothing of sequences, of their order or of the device.
"""

from collections.abc import Sequence
from operator import add
from typing import NamedTuple


class Change(NamedTuple):
    """`tables[row][layer]` has these pages from `index` on."""

    layer: int
    row: int
    index: int
    pages: list[int]


class Pages:
    """The page tables of `num_rows` rows, filled from one pool of `num_pages` pages.

    `tables[row][layer]` are the pages of a layer in the order of its tokens, and
    `lengths[row][layer]` counts the tokens stored in them. Read them, but change them only
    through the methods.
    """

    def __init__(
        self, num_pages: int, page_size: int, num_layers: int, num_rows: int, ahead: int = 0
    ) -> None:
        """Rows that lack pages get room for `ahead` more tokens, as far as pages are free.

        They then need to be looked at less often.
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
        self.num_free = num_pages
        self.tables: list[list[list[int]]] = [
            [[] for _ in range(num_layers)] for _ in range(num_rows)
        ]
        self.lengths = [[0] * num_layers for _ in range(num_rows)]
        self.promised = [0] * num_rows
        """Tokens of each row whose steps are under way."""
        # so many tokens fit behind those in every layer of the row without a new page, perhaps
        # more: most steps need to look at nothing else
        self._room = [0] * num_rows
        # layers that were given pages that they may not need: only these can have too many
        self._grown: list[list[int]] = [[] for _ in range(num_rows)]
        self._owned = bytearray(num_pages)
        # Every free page is in the stack. A page may be taken without searching it there, so some
        # of the stack is owned; a page is never in it twice.
        self._stack = list(range(num_pages))
        self._stacked = bytearray(b"\1") * num_pages
        # tables that grew since the last drain, and from where on: layer, row, index
        self._touched: list[tuple[int, int, int]] = []

    @property
    def num_used(self) -> int:
        """Pages that some row owns."""
        return self.num_pages - self.num_free

    def count_worst(self, num_tokens: int) -> int:
        """Count the pages of a row in which every layer stores `num_tokens`."""
        return -(-num_tokens // self.page_size) * self.num_layers

    def count_missing(self, row: int, num_tokens: int) -> int:
        """Count the pages to get so that every layer has room for `num_tokens` more."""
        if num_tokens <= self._room[row]:
            return 0
        return sum(missing for _, missing in self._find_short(row, num_tokens))

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` more in every layer: take all the pages, or none and False.

        Until they are promised, another reservation counts from the same place.
        """
        if num_tokens <= self._room[row]:
            return True
        short = self._find_short(row, num_tokens)
        num_missing = sum(missing for _, missing in short)
        if num_missing > self.num_free:
            return False
        if self.ahead and num_missing:
            more = self._find_short(row, num_tokens + self.ahead)
            if sum(missing for _, missing in more) <= self.num_free:
                short, num_tokens = more, num_tokens + self.ahead
        for layer, missing in short:
            self._take_pages(row, layer, missing)
            self._grown[row].append(layer)
        self._room[row] = max(self._room[row], num_tokens)
        return True

    def promise(self, row: int, num_tokens: int) -> None:
        """Note that a step with these reserved tokens is under way."""
        assert num_tokens <= self._room[row], "tokens were promised without a reservation"
        self.promised[row] += num_tokens
        self._room[row] -= num_tokens

    def settle(self, row: int, stored: Sequence[int], promised: int = 0) -> None:
        """Note that layer l stored `stored[l]` more tokens, out of `promised` that were under way.

        Pages that neither hold tokens nor wait for promised ones, or for those ahead, go back.
        """
        most = max(stored)
        assert len(stored) == self.num_layers, "a count for every layer"
        assert most <= self._room[row] + promised, "tokens were stored without a reservation"
        lengths = self.lengths[row]
        lengths[:] = map(add, lengths, stored)
        self.promised[row] -= promised
        room = self._room[row] + promised - most
        if self._grown[row]:
            size, promised, grown = self.page_size, self.promised[row], []
            for layer in self._grown[row]:
                table, length = self.tables[row][layer], lengths[layer]
                needed = -(-(length + promised + self.ahead) // size)
                if len(table) > needed:
                    self._free_pages(table[needed:])
                    del table[needed:]
                if len(table) * size - length >= size:
                    grown.append(layer)
                room = min(room, len(table) * size - length - promised)
            self._grown[row] = grown
        self._room[row] = room

    def withdraw(self, row: int, promised: int) -> None:
        """Note that a step that was under way stored nothing that counts."""
        self.promised[row] -= promised
        self._room[row] += promised

    def release(self, row: int) -> None:
        """Take everything back from a row: its layers are empty."""
        for table in self.tables[row]:
            self._free_pages(table)
            table.clear()
        self.lengths[row][:] = [0] * self.num_layers
        self.promised[row] = 0
        self._room[row] = 0
        self._grown[row].clear()

    def drain_changes(self) -> list[Change]:
        """List the new entries of the tables since the last call.

        A page that went back leaves its entry behind in the device's tables, past the length of
        its layer. A table that grew more than once may be listed as often, always as it is now.
        """
        touched, self._touched = self._touched, []
        changes = (
            Change(layer, row, index, self.tables[row][layer][index:])
            for layer, row, index in touched
        )
        return [change for change in changes if change.pages]

    def _find_short(self, row: int, num_tokens: int) -> list[tuple[int, int]]:
        """List the layers without room for `num_tokens` more, and the pages that each lacks."""
        size, ahead = self.page_size, self.promised[row]
        spares = [
            len(table) * size - length - ahead
            for table, length in zip(self.tables[row], self.lengths[row], strict=True)
        ]
        # the bound was careful, here it is exact for free
        self._room[row] = min(spares)
        return [
            (layer, -((spare - num_tokens) // size))
            for layer, spare in enumerate(spares)
            if spare < num_tokens
        ]

    def _take_pages(self, row: int, layer: int, count: int) -> None:
        """Append free pages to a table, the neighbours of its last page where those are free.

        Pages that follow each other can be read as one slice. So that tables do not grow into one
        another at once, each begins at a place of its own, as far from the others as possible.
        """
        table, owned = self.tables[row][layer], self._owned
        self._touched.append((layer, row, len(table)))
        while count > 0:
            if table:
                page = table[-1] + 1
            else:
                place = row * self.num_layers + layer
                page = place * self.num_pages // (self.num_rows * self.num_layers)
            if page == self.num_pages or owned[page]:
                page = self._stack.pop()
                self._stacked[page] = 0
                while owned[page]:
                    page = self._stack.pop()
                    self._stacked[page] = 0
            most = min(page + count, self.num_pages)
            end = owned.find(1, page, most)
            run = range(page, most if end < 0 else end)
            owned[page : run.stop] = b"\1" * len(run)
            table.extend(run)
            self.num_free -= len(run)
            count -= len(run)

    def _free_pages(self, pages: list[int]) -> None:
        """Take pages of a table back, its last first."""
        count = len(pages)
        self.num_free += count
        first = pages[0] if pages else 0
        stop = first + count
        if pages == list(range(first, stop)) and self._stacked.find(0, first, stop) < 0:
            # neighbours that were taken as such, as most are: they never left the stack
            self._owned[first:stop] = bytes(count)
            return
        for page in reversed(pages):
            self._owned[page] = 0
            if not self._stacked[page]:
                self._stacked[page] = 1
                self._stack.append(page)
