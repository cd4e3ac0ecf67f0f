from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthmix.infer.cache import LayerUse, PagedCache, PagedLayer, Span
from depthmix.infer.pages import Changes, Pages
from depthmix.nn.attention import Place
from variants import make_config

CONFIG = make_config("mod")
NUM_HEADS, KV_HEADS = CONFIG.num_heads, CONFIG.shape.num_kv_heads
WIDTH = CONFIG.shape.head_width
CPU = torch.device("cpu")


def make_cache(*, page_size: int = 4, num_rows: int = 3, num_pages: int = 400) -> PagedCache:
    sizes = (num_pages, page_size, CONFIG.num_layers, num_rows)
    pages = Pages(*sizes, longest=CONFIG.max_seq_len)
    cache = PagedCache(CONFIG, pages, device=CPU, dtype=torch.float64)
    # unwritten entries must not be read
    cache.key.fill_(torch.nan)
    cache.value.fill_(torch.nan)
    return cache


def make_place(positions: Sequence[int], documents: Sequence[int] | None) -> Place:
    phase = torch.zeros(1, len(positions), 2, WIDTH // 2)
    ids = None if documents is None else torch.tensor([documents], dtype=torch.long)
    return Place(torch.tensor([positions], dtype=torch.long), phase, ids, None)


def attend_by_hand(query_NH: Tensor, key_SGH: Tensor, value_SGH: Tensor) -> Tensor:
    """Attention of one query over all of these keys."""
    repeat = NUM_HEADS // KV_HEADS
    key_SNH, value_SNH = (t.repeat_interleave(repeat, dim=1) for t in (key_SGH, value_SGH))
    weight_NS = (torch.einsum("nh,snh->ns", query_NH, key_SNH) / WIDTH**0.5).softmax(dim=1)
    return torch.einsum("ns,snh->nh", weight_NS, value_SNH)


class Row:
    """A test's model of a row: everything it stored in one layer."""

    def __init__(self) -> None:
        self.key = torch.empty(0, KV_HEADS, WIDTH, dtype=torch.float64)
        self.value = self.key.clone()
        self.positions: list[int] = []
        self.num_tokens = 0


def run_step(
    cache: PagedCache,
    rows: list[Row],
    layer: int,
    asked: dict[int, tuple[int, list[int], list[int]]],
    *,
    own: bool,
) -> None:
    """Attend once: row -> (tokens, queries among them, keys among them); check each query."""
    spans = [Span(row, rows[row].num_tokens, count) for row, (count, _, _) in asked.items()]
    for span in spans:
        assert cache.pages.reserve(span.row, span.count)
    cache.follow(cache.pages.drain_changes())
    paged = cache.view(spans).layers[layer]
    many = len(spans) > 1
    starts = {row: rows[row].num_tokens for row in asked}

    def gather(chosen: dict[int, list[int]]) -> Place:
        pairs = [(starts[row] + t, n) for n, row in enumerate(asked, start=1) for t in chosen[row]]
        return make_place([p for p, _ in pairs], [n for _, n in pairs] if many else None)

    source = gather({row: offering for row, (_, _, offering) in asked.items()})
    asking_place = gather({row: asking for row, (_, asking, _) in asked.items()})
    place = source if own else asking_place
    query, key, value = (
        torch.randn(1, tokens.positions.shape[1], heads, WIDTH, dtype=torch.float64)
        for tokens, heads in ((place, NUM_HEADS), (source, KV_HEADS), (source, KV_HEADS))
    )
    found = paged.attend(query, key, value, place, source)
    assert found.shape == query.shape

    key_at = query_at = 0
    for number, (row, (count, asking, offering)) in enumerate(asked.items()):
        state = rows[row]
        new = slice(key_at, key_at + len(offering))
        state.key = torch.cat([state.key, key[0, new]])
        state.value = torch.cat([state.value, value[0, new]])
        state.positions += [starts[row] + t for t in offering]
        num_pairs = 0
        for token in asking:
            # keys are in order, so those at or before the query come first
            visible = sum(p <= starts[row] + token for p in state.positions)
            expected = attend_by_hand(
                query[0, query_at], state.key[:visible], state.value[:visible]
            )
            torch.testing.assert_close(found[0, query_at], expected, rtol=0, atol=1e-12)
            query_at += 1
            num_pairs += visible
        key_at = new.stop
        state.num_tokens += count
        assert paged.uses[number] == LayerUse(len(asking), len(offering), num_pairs)
        stored = [0] * CONFIG.num_layers
        stored[layer] = len(offering)
        cache.pages.settle([row], [stored])
        assert cache.pages.lengths[row, layer] == len(state.positions)


@settings(max_examples=60)
@given(st.data(), st.integers(1, 5), st.booleans())
def test_attention_over_pages_equals_one_query_at_a_time(
    data: st.DataObject, page_size: int, own: bool
) -> None:
    """Any steps of any rows, kept tokens only; also when keys come from other tokens."""
    torch.manual_seed(0)
    cache, rows = make_cache(page_size=page_size), [Row() for _ in range(3)]
    for _ in range(data.draw(st.integers(1, 5))):
        chosen = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        asked = {}
        for row in chosen:
            count = data.draw(st.integers(1, 7))
            kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
            asking = [token for token in range(count) if kept[token]]
            more = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
            offering = asking if own else [t for t in range(count) if kept[t] or more[t]]
            asked[row] = count, asking, offering
        if any(offering for _, _, offering in asked.values()):
            run_step(cache, rows, 1, asked, own=own)


def test_a_row_that_left_is_not_seen_by_its_follower() -> None:
    torch.manual_seed(0)
    cache = make_cache(page_size=2, num_rows=2, num_pages=CONFIG.num_layers * 8)
    rows = [Row(), Row()]
    for step in range(6):
        tokens = list(range(3))
        run_step(cache, rows, 2, {step % 2: (3, tokens, tokens)}, own=True)
        cache.pages.release(step % 2)
        rows[step % 2] = Row()
        # the other row takes pages in between, so that a row's pages are not in order
        run_step(cache, rows, 2, {1 - step % 2: (1, [0], [0])}, own=True)


def test_layers_do_not_share_pages() -> None:
    torch.manual_seed(0)
    cache = make_cache(page_size=3)
    rows = {layer: [Row() for _ in range(3)] for layer in (0, 3)}
    for count in (5, 1, 4):
        tokens = list(range(count))
        for layer in (0, 3):
            run_step(cache, rows[layer], layer, {1: (count, tokens, tokens)}, own=True)


def test_nobody_asks() -> None:
    """Keys are stored, and there is nothing to mix."""
    cache, rows = make_cache(), [Row() for _ in range(3)]
    run_step(cache, rows, 1, {0: (3, [], [0, 2])}, own=False)
    run_step(cache, rows, 1, {0: (2, [], [1]), 2: (4, [], [0])}, own=False)
    run_step(cache, rows, 1, {0: (2, [1], [0, 1]), 2: (1, [], [])}, own=False)


def test_a_layer_that_was_not_called_stored_nothing() -> None:
    step = make_cache().view([Span(0, 0, 3), Span(2, 5, 1)])
    assert [layer.uses for layer in step.layers] == [[LayerUse(), LayerUse()]] * CONFIG.num_layers


def test_tables_follow_the_books() -> None:
    cache = make_cache()

    def follow(entries: dict[tuple[int, int, int], int]) -> None:
        places = [np.ravel_multi_index(entry, cache.tables.shape) for entry in entries]
        cache.follow(Changes(np.array(places, dtype=np.int64), np.array(list(entries.values()))))

    follow({})
    # layer, row, index
    follow({(1, 2, 0): 7, (1, 2, 1): 5, (3, 0, 4): 9})
    assert cache.tables[1, 2, 0] == 7
    assert cache.tables[3, 0, 4] == 9
    assert cache.tables[1, 2, 1] == 5
    assert int(cache.tables.count_nonzero()) == 3
    follow({(1, 2, 0): 5, (1, 2, 1): 6})
    assert cache.tables[1, 2, :2].tolist() == [5, 6]
    for row in range(3):
        assert cache.pages.reserve(row, 13)
    cache.follow(cache.pages.drain_changes())
    told = cache.tables.clone()
    for layer in range(CONFIG.num_layers):
        for row in range(3):
            assert told[layer, row, :4].tolist() == cache.pages.list_pages(row, layer)
    # as left by a failed step
    cache.tables.fill_(0)
    cache.send_tables()
    assert torch.equal(cache.tables[:, :, :4], told[:, :, :4])


def test_lengths_follow_the_books() -> None:
    cache = make_cache()
    assert cache.pages.reserve(2, 5)
    cache.pages.settle([2], [[5, 0, 4, 1]])
    cache.send_lengths()
    assert cache.lengths.tolist() == [[0, 0, 5], [0, 0, 0], [0, 0, 4], [0, 0, 1]]


@pytest.mark.parametrize(("page_size", "num_entries"), [(4, 16), (5, 13), (100, 1)])
def test_tables_have_room_for_the_longest_sequence(page_size: int, num_entries: int) -> None:
    cache = make_cache(page_size=page_size)
    assert CONFIG.max_seq_len == 64
    assert cache.tables.shape == (CONFIG.num_layers, 3, num_entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_page(dtype: torch.dtype) -> None:
    pages = Pages(10, 4, CONFIG.num_layers, 2)
    cache = PagedCache(CONFIG, pages, device=CPU, dtype=dtype)
    assert cache.bytes_per_page * 10 == cache.key.nbytes + cache.value.nbytes
    assert cache.bytes_per_page == 2 * 4 * KV_HEADS * WIDTH * dtype.itemsize


def test_positions_and_documents_of_a_step() -> None:
    step = make_cache().view([Span(2, 5, 3), Span(0, 0, 1), Span(1, 9, 2)])
    positions = step.advance(1, 6, None)
    assert positions.tolist() == [[5, 6, 7, 0, 9, 10]]
    documents = step.document_ids()
    assert documents is not None
    assert documents.tolist() == [[0, 0, 0, 1, 2, 2]]
    assert make_cache().view([Span(2, 5, 3)]).document_ids() is None


def test_a_step_takes_the_tokens_that_it_was_made_for() -> None:
    step = make_cache().view([Span(0, 0, 3)])
    with pytest.raises(AssertionError):
        step.advance(1, 4, None)


def test_a_narrower_cache_rounds_keys_and_values_only() -> None:
    """A single token takes a shorter code path than several."""
    outcomes: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        cache = PagedCache(CONFIG, Pages(40, 4, CONFIG.num_layers, 1), device=CPU, dtype=dtype)
        for start, count in ((0, 6), (6, 1)):
            assert cache.pages.reserve(0, count)
            cache.follow(cache.pages.drain_changes())
            layer = PagedLayer(cache, 0, [Span(0, start, count)])
            place = make_place(range(start, start + count), None)
            query, key, value = (
                torch.randn(1, count, heads, WIDTH) for heads in (NUM_HEADS, KV_HEADS, KV_HEADS)
            )
            found = layer.attend(query, key, value, place, place)
            cache.pages.settle([0], [[count] * CONFIG.num_layers])
        outcomes.append(found)
    assert outcomes[1].dtype == torch.float32
    torch.testing.assert_close(outcomes[0], outcomes[1], rtol=0, atol=0.05)
    assert not torch.equal(outcomes[0], outcomes[1])
