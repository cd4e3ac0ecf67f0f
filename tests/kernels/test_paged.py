"""The reference of paged attention against plain attention over each row's own tokens."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthmix.kernels import attend_pages

MOST = 6


class Rows:
    """Pages for some rows, with NaN in everything unwritten, and a plain copy of each row."""

    def __init__(self, num_rows: int, groups: int, page_size: int, width: int = 4) -> None:
        num_pages = num_rows * MOST
        shape = (groups, num_pages, page_size, width)
        self.keys = torch.full(shape, torch.nan, dtype=torch.float64)
        self.values = torch.full(shape, torch.nan, dtype=torch.float64)
        # pages in random order
        self.table = torch.randperm(num_pages).view(num_rows, MOST).int()
        self.lengths = torch.zeros(num_rows, dtype=torch.int32)
        self.past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_rows)]
        self.groups, self.width = groups, width

    def step(self, asking: list[int], giving: list[int], heads: int) -> tuple[Tensor, Tensor]:
        """One step with pages, and the same with plain attention."""
        query = torch.randn(len(asking), heads, self.width, dtype=torch.float64)
        key, value = torch.randn(2, len(giving), self.groups, self.width, dtype=torch.float64)
        for place, row in enumerate(giving):
            if row >= 0:
                self.past[row].append((key[place], value[place]))
        found = attend_pages(
            query,
            key,
            value,
            torch.tensor(asking),
            torch.tensor(giving),
            self.keys,
            self.values,
            self.table,
            self.lengths,
        )
        truth = torch.zeros_like(query)
        for place, row in enumerate(asking):
            if row >= 0:
                keys, values = map(torch.stack, zip(*self.past[row], strict=True))
                truth[place] = F.scaled_dot_product_attention(
                    query[place, None, :, None],
                    keys.transpose(0, 1)[None],
                    values.transpose(0, 1)[None],
                    enable_gqa=True,
                )[0, :, 0]
        return found, truth


@settings(max_examples=25)
@given(st.data(), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(1, 3))
def test_steps_equal_plain_attention(
    data: st.DataObject, heads: tuple[int, int], page_size: int
) -> None:
    """Which rows have keys and queries changes from step to step, and so do their places."""
    torch.manual_seed(0)
    num_rows = data.draw(st.integers(1, 4))
    rows = Rows(num_rows, heads[1], page_size)
    for _ in range(data.draw(st.integers(1, MOST))):
        giving = data.draw(st.permutations([*range(num_rows), -1]))
        giving = giving[: data.draw(st.integers(1, num_rows + 1))]
        givers = [row for row in giving if row >= 0]
        asking = data.draw(st.permutations([*givers, -1]))
        found, truth = rows.step(asking, giving, heads[0])
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)
        assert not found[asking.index(-1)].any()
        assert rows.lengths.tolist() == [len(past) for past in rows.past]
    # each token is in its slot exactly once, and nothing else was touched
    for row, past in enumerate(rows.past):
        for slot, both in enumerate(past):
            page = rows.table[row, slot // page_size]
            for pages, mine in zip((rows.keys, rows.values), both, strict=True):
                assert torch.equal(pages[:, page, slot % page_size], mine)
    num_stored = sum(map(len, rows.past)) * heads[1]
    for pages in (rows.keys, rows.values):
        assert int((~pages.isnan()).all(dim=3).sum()) == num_stored


def test_narrow_types_are_attended_to_in_float32() -> None:
    """Queries and keys are finite in float16, but their product is not."""
    query = torch.full((1, 1, 4), 200.0, dtype=torch.float16)
    key, value = (torch.full((1, 1, 4), v, dtype=torch.float16) for v in (200.0, 2.0))
    pages = torch.zeros(2, 1, 1, 1, 4, dtype=torch.float16)
    row, table = torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.zeros(1, dtype=torch.int32)
    out = attend_pages(query, key, value, row, row, pages[0], pages[1], table, lengths)
    assert out.dtype == torch.float16
    assert torch.equal(out, value)


def test_operator_is_well_formed() -> None:
    rows = Rows(2, 1, 2)
    rows.keys.zero_()
    rows.values.zero_()
    new = torch.randn(1, 1, 4, dtype=torch.float64)
    row = torch.tensor([1])
    checked = torch.library.opcheck(
        torch.ops.depthmix.attend_pages.default,
        (new, new, new, row, row, rows.keys, rows.values, rows.table, rows.lengths),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pages_keep_their_own_type(dtype: torch.dtype) -> None:
    new = torch.randn(1, 1, 4, dtype=dtype)
    pages = torch.zeros(2, 1, 1, 1, 4, dtype=torch.float32)
    row, table = torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32)
    lengths = torch.zeros(1, dtype=torch.int32)
    out = attend_pages(new, new, new, row, row, pages[0], pages[1], table, lengths)
    assert out.dtype == dtype
    assert torch.equal(pages[1, 0, 0, 0], new[0, 0].float())
    torch.testing.assert_close(out, new, rtol=0, atol=1e-6)
