import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from depthmix.infer.pages import Pages


def list_tables(pages: Pages) -> list[list[list[int]]]:
    """The tables by row and layer."""
    layers = range(pages.num_layers)
    return [[pages.list_pages(row, layer) for layer in layers] for row in range(pages.num_rows)]


def follow(pages: Pages, device: np.ndarray) -> None:
    """Apply the changes to a copy of the tables, like the device's, and compare."""
    places, new = pages.drain_changes()
    device.reshape(-1)[places] = new
    for row, tables in enumerate(list_tables(pages)):
        for layer, table in enumerate(tables):
            assert table == device[layer, row, : len(table)].tolist()
    assert len(pages.drain_changes().places) == 0


class PagesMachine(RuleBasedStateMachine):
    """Random reservations, checked against a plain count of what every layer stores."""

    pages: Pages

    @initialize(
        num_pages=st.integers(1, 40),
        page_size=st.integers(1, 5),
        num_layers=st.integers(1, 3),
        num_rows=st.integers(1, 3),
    )
    def start(self, num_pages: int, page_size: int, num_layers: int, num_rows: int) -> None:
        self.pages = Pages(num_pages, page_size, num_layers, num_rows)
        self.lengths = [[0] * num_layers for _ in range(num_rows)]
        self.reserved = [0] * num_rows
        self.device = np.full_like(self.pages.tables, -1)

    @rule(data=st.data(), num_tokens=st.integers(0, 20))
    def reserve(self, data: st.DataObject, num_tokens: int) -> None:
        pages = self.pages
        row = data.draw(st.integers(0, pages.num_rows - 1))
        before, num_free = list_tables(self.pages), pages.num_free
        missing = sum(
            max(0, -(-(length + num_tokens) // pages.page_size) - len(table))
            for table, length in zip(before[row], self.lengths[row], strict=True)
        )
        assert pages.count_missing(row, num_tokens) == missing
        assert pages.reserve(row, num_tokens) == (missing <= num_free)
        if missing > num_free:
            assert list_tables(self.pages) == before
            return
        assert pages.num_free == num_free - missing
        after = list_tables(pages)[row]
        for table, length, old in zip(after, self.lengths[row], before[row], strict=True):
            assert len(table) * pages.page_size >= length + num_tokens
            assert table[: len(old)] == old
        self.reserved[row] = max(self.reserved[row], num_tokens)

    @rule(data=st.data(), seed=st.integers(0, 2**32))
    def settle(self, data: st.DataObject, seed: int) -> None:
        pages = self.pages
        rows = data.draw(st.lists(st.integers(0, pages.num_rows - 1), unique=True))
        before = list_tables(pages)
        pick, layers = random.Random(seed), range(pages.num_layers)
        stored = [[pick.randint(0, self.reserved[row]) for _ in layers] for row in rows]
        pages.settle(rows, stored)
        after = list_tables(pages)
        for row, counts in zip(rows, stored, strict=True):
            for layer, count in enumerate(counts):
                self.lengths[row][layer] += count
                num_needed = -(-self.lengths[row][layer] // pages.page_size)
                # stored tokens do not move
                assert after[row][layer] == before[row][layer][:num_needed]
                assert len(after[row][layer]) == num_needed
            self.reserved[row] = 0

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, self.pages.num_rows - 1))
        self.pages.release(row)
        self.lengths[row] = [0] * self.pages.num_layers
        self.reserved[row] = 0
        assert not any(list_tables(self.pages)[row])

    @rule()
    def drain(self) -> None:
        follow(self.pages, self.device)

    @invariant()
    @precondition(lambda self: hasattr(self, "device"))
    def books_balance(self) -> None:
        owned = [page for row in list_tables(self.pages) for table in row for page in table]
        assert len(set(owned)) == len(owned)
        assert all(0 <= page < self.pages.num_pages for page in owned)
        assert self.pages.num_used == len(owned)
        assert self.pages.num_free == self.pages.num_pages - len(owned)
        assert self.pages.lengths.tolist() == self.lengths

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        pages = self.pages
        for row in range(pages.num_rows):
            pages.release(row)
        assert pages.num_free == pages.num_pages
        # no page is lost: one row takes as many as its layers can share evenly
        most = pages.num_pages // pages.num_layers * pages.page_size
        assert pages.reserve(0, most)
        owned = {page for table in list_tables(pages)[0] for page in table}
        assert len(owned) == pages.num_pages - pages.num_pages % pages.num_layers


class PromisesMachine(RuleBasedStateMachine):
    """Steps of several rows in flight, which are settled or withdrawn later."""

    pages: Pages

    @initialize(
        num_pages=st.integers(1, 40),
        page_size=st.integers(1, 5),
        num_layers=st.integers(1, 3),
        num_rows=st.integers(1, 3),
        ahead=st.sampled_from([0, 0, 1, 6]),
    )
    def begin(
        self, num_pages: int, page_size: int, num_layers: int, num_rows: int, ahead: int
    ) -> None:
        self.pages = Pages(num_pages, page_size, num_layers, num_rows, ahead)
        self.lengths = [[0] * num_layers for _ in range(num_rows)]
        # token counts of each row's steps in flight, oldest first
        self.flights: list[list[int]] = [[] for _ in range(num_rows)]
        self.device = np.full_like(self.pages.tables, -1)

    def draw_row(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, self.pages.num_rows - 1))

    @rule(data=st.data(), num_tokens=st.integers(1, 12), starts=st.booleans())
    def start(self, data: st.DataObject, num_tokens: int, starts: bool) -> None:
        pages, row = self.pages, self.draw_row(data)
        behind = sum(self.flights[row]) + num_tokens
        missing = sum(
            max(0, -(-(length + behind) // pages.page_size) - len(table))
            for table, length in zip(list_tables(pages)[row], self.lengths[row], strict=True)
        )
        num_free = pages.num_free
        assert pages.count_missing(row, num_tokens) == missing
        assert pages.reserve(row, num_tokens) == (missing <= num_free)
        if missing > num_free:
            assert pages.num_free == num_free
            return
        # more pages are taken only if reserving ahead
        assert pages.num_free == num_free - missing or pages.ahead
        for table, length in zip(list_tables(pages)[row], self.lengths[row], strict=True):
            assert len(table) * pages.page_size >= length + behind
        if starts:
            pages.promise(row, num_tokens)
            self.flights[row].append(num_tokens)

    @rule(data=st.data(), num_tokens=st.lists(st.integers(1, 12), min_size=3, max_size=3))
    def reserve_all(self, data: st.DataObject, num_tokens: list[int]) -> None:
        """Several rows at once get what each would get alone, if there is enough for all."""
        pages = self.pages
        rows = data.draw(st.lists(st.integers(0, pages.num_rows - 1), unique=True, min_size=1))
        missing, before, num_free = 0, list_tables(pages), pages.num_free
        each = np.array(num_tokens[: len(rows)])
        for row, count in zip(rows, each.tolist(), strict=True):
            behind = sum(self.flights[row]) + count
            longest = max(self.lengths[row]) + sum(self.flights[row])
            behind += max(0, min(pages.ahead, pages.most * pages.page_size - longest - count))
            for table, length in zip(before[row], self.lengths[row], strict=True):
                missing += max(0, -(-(length + behind) // pages.page_size) - len(table))
        # one number for all rows may come as it is
        same = int(each[0]) if (each == each[0]).all() else each
        assert pages.reserve_all(rows, same) == (missing <= num_free)
        if missing > num_free:
            assert list_tables(pages) == before
            return
        assert pages.num_free == num_free - missing
        assert (pages.room[rows] >= each).all()

    @rule(data=st.data(), seed=st.integers(0, 2**32))
    def settle(self, data: st.DataObject, seed: int) -> None:
        """The oldest step of some rows finishes."""
        pages, pick = self.pages, random.Random(seed)
        drawn = data.draw(st.lists(st.integers(0, pages.num_rows - 1), unique=True))
        rows = [row for row in drawn if self.flights[row]]
        counts = [self.flights[row].pop(0) for row in rows]
        layers = range(pages.num_layers)
        stored = [[pick.randint(0, count) for _ in layers] for count in counts]
        pages.settle(rows, stored, counts)
        for row, own in zip(rows, stored, strict=True):
            left = sum(self.flights[row])
            for layer, count in enumerate(own):
                self.lengths[row][layer] += count
                # no page is kept that no step can fill, except those needed again soon
                most = self.lengths[row][layer] + left + 2 * pages.ahead
                assert pages.counts[row, layer] <= -(-most // pages.page_size)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """The newest step of a row is abandoned."""
        row = self.draw_row(data)
        if self.flights[row]:
            self.pages.withdraw(row, self.flights[row].pop())

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = self.draw_row(data)
        self.pages.release(row)
        self.lengths[row], self.flights[row] = [0] * self.pages.num_layers, []
        assert not any(list_tables(self.pages)[row])

    @rule()
    def drain(self) -> None:
        follow(self.pages, self.device)

    @invariant()
    @precondition(lambda self: hasattr(self, "device"))
    def books_balance(self) -> None:
        pages = self.pages
        owned = [page for row in list_tables(pages) for table in row for page in table]
        assert len(set(owned)) == len(owned)
        assert pages.num_free == pages.num_pages - len(owned) >= 0
        assert pages.lengths.tolist() == self.lengths
        assert pages.promised.tolist() == [sum(flights) for flights in self.flights]
        for row, lengths in enumerate(self.lengths):
            # there is room for whatever the steps in flight store
            left = [
                len(table) * pages.page_size - length - pages.promised[row]
                for table, length in zip(list_tables(pages)[row], lengths, strict=True)
            ]
            assert pages.room[row] == min(left) >= 0

    def teardown(self) -> None:
        if hasattr(self, "device"):
            for row in range(self.pages.num_rows):
                self.pages.release(row)
            assert self.pages.num_free == self.pages.num_pages
            assert not self.pages.promised.any()


TestPromisesMachine = PromisesMachine.TestCase
TestPromisesMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)

TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_layers_of_a_row_grow_apart() -> None:
    pages = Pages(num_pages=12, page_size=4, num_layers=2, num_rows=2)
    assert pages.reserve(1, 9)
    assert pages.num_used == 6
    pages.settle([1], [[9, 2]])
    assert pages.lengths.tolist() == [[0, 0], [9, 2]]
    assert pages.counts.tolist() == [[0, 0], [3, 1]]
    assert pages.num_used == 4
    # three more fit into the first layer's last page, two into the second's
    assert pages.count_missing(1, 2) == 0
    assert pages.count_missing(1, 3) == 1
    assert pages.count_missing(1, 4) == 2


def test_rows_that_decode_together_get_pages_that_follow_each_other() -> None:
    pages = Pages(num_pages=60, page_size=2, num_layers=3, num_rows=4)
    for _ in range(10):
        for row in range(4):
            assert pages.reserve(row, 1)
            pages.settle([row], [[1, 1, 1]])
    for row in list_tables(pages):
        for table in row:
            assert table == list(range(table[0], table[0] + 5))


def test_rows_that_grow_together_get_pages_that_follow_each_other() -> None:
    pages = Pages(num_pages=60, page_size=2, num_layers=3, num_rows=4)
    rows = [2, 0, 3, 1]
    for step in range(10):
        if step % 2 == 0:
            assert pages.reserve_all(rows, 1)
        pages.settle(rows, [[1, 1, 1]] * 4)
    for row in list_tables(pages):
        for table in row:
            assert table == list(range(table[0], table[0] + 5))
    assert not pages.reserve_all([1], 1)


def test_many_pages_are_neighbours_where_their_own_place_is_taken() -> None:
    """A long prompt has more pages than lie between two rows' preferred places."""
    pages = Pages(num_pages=600, page_size=1, num_layers=3, num_rows=20)
    for row in (0, 1):
        assert pages.reserve(row, 50)
        for table in list_tables(pages)[row]:
            assert table == list(range(table[0], table[0] + 50))


def test_rows_of_any_length_that_start_together_get_neighbouring_pages() -> None:
    pages = Pages(num_pages=900, page_size=2, num_layers=3, num_rows=5)
    # the last one is too long for its place
    for rows, num_tokens in (([0, 1, 2], [120, 1, 33]), ([3], [121])):
        assert pages.reserve_all(rows, np.array(num_tokens))
        for row, count in zip(rows, num_tokens, strict=True):
            for table in list_tables(pages)[row]:
                assert table == list(range(table[0], table[0] + -(-count // 2)))
    owned = [page for row in list_tables(pages) for table in row for page in table]
    assert len(set(owned)) == len(owned) == pages.num_used


def test_a_table_that_changes_twice_is_told_as_it_is_now() -> None:
    pages = Pages(num_pages=4, page_size=1, num_layers=1, num_rows=2)
    device = np.full_like(pages.tables, -1)
    assert pages.reserve(0, 2)
    assert pages.drain_changes().places.tolist() == [0, 1]
    device[0, 0, :2] = pages.list_pages(0, 0)
    assert pages.reserve(0, 3)
    pages.release(0)
    assert pages.reserve(1, 2)
    assert pages.reserve(0, 1)
    follow(pages, device)
    everything = pages.list_everything()
    assert everything.places.tolist() == [0, 4, 5]
    assert everything.pages.tolist() == pages.list_pages(0, 0) + pages.list_pages(1, 0)


def test_tables_get_nothing_ahead_beyond_the_longest_row() -> None:
    """The entry past a table's end is the next row's first."""
    pages = Pages(num_pages=40, page_size=4, num_layers=2, num_rows=2, ahead=6, longest=12)
    assert pages.tables.shape == (2, 2, 3)
    assert pages.reserve(0, 4)
    assert pages.counts[0].tolist() == [3, 3]
    pages.settle([0], [[4, 1]])
    assert pages.reserve(0, 8)
    # the second layer has room for as many tokens as may still come, and no more
    assert pages.counts[0].tolist() == [3, 3]
    assert pages.reserve(1, 12)
    assert pages.counts[1].tolist() == [3, 3]
    with pytest.raises(AssertionError, match="more tokens than the longest"):
        pages.reserve(0, 9)


def test_tokens_under_way_keep_their_pages() -> None:
    pages = Pages(num_pages=12, page_size=4, num_layers=2, num_rows=1)
    assert pages.reserve(0, 4)
    pages.promise(0, 4)
    # the next step's token is counted after those four
    assert pages.count_missing(0, 1) == 2
    assert pages.reserve(0, 1)
    pages.promise(0, 1)
    pages.settle([0], [[4, 1]], [4])
    # the first layer may store a fifth token; the second has room for it
    assert pages.counts.tolist() == [[2, 1]]
    assert pages.lengths.tolist() == [[4, 1]]
    pages.settle([0], [[0, 1]], [1])
    assert pages.counts.tolist() == [[1, 1]]
    assert pages.promised.tolist() == [0]


def test_a_step_that_came_to_nothing_is_taken_back() -> None:
    pages = Pages(num_pages=12, page_size=4, num_layers=2, num_rows=1)
    assert pages.reserve(0, 5)
    pages.promise(0, 5)
    pages.withdraw(0, 5)
    assert pages.promised.tolist() == [0]
    assert pages.count_missing(0, 5) == 0
    pages.settle([0], [[0, 0]])
    assert pages.num_used == 0


def test_more_cannot_be_promised_than_was_reserved() -> None:
    pages = Pages(num_pages=12, page_size=4, num_layers=2, num_rows=1)
    assert pages.reserve(0, 4)
    with pytest.raises(AssertionError, match="without a reservation"):
        pages.promise(0, 5)


def test_the_worst_case_counts_every_layer() -> None:
    pages = Pages(num_pages=12, page_size=4, num_layers=3, num_rows=1)
    assert [pages.count_worst(count) for count in (0, 1, 4, 5, 16)] == [0, 3, 3, 6, 12]
    assert pages.reserve(0, 16)
    assert not pages.reserve(0, 17)


def test_storing_more_than_was_reserved_is_caught() -> None:
    pages = Pages(num_pages=12, page_size=4, num_layers=2, num_rows=1)
    assert pages.reserve(0, 1)
    with pytest.raises(AssertionError, match="without a reservation"):
        pages.settle([0], [[1, 5]])


@pytest.mark.parametrize("name", ["num_pages", "page_size", "num_layers", "num_rows"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"num_pages": 4, "page_size": 2, "num_layers": 2, "num_rows": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Pages(**sizes)
