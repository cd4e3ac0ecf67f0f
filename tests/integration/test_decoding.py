"""Cached decoding equals the full forward pass: any chunking, ragged rows, padding on any side."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthmix.nn import Cache, Transformer
from depthmix.nn.block import Block
from depthmix.nn.router import Predictor
from variants import causal_cases, make_config, make_model, make_tokens, pad_rows

CASES = causal_cases()
ROOM = 48
# each case once with the checks of shapes at run time, and once without
SIDES = ["left", pytest.param("right", marks=pytest.mark.slow)]


def decode(
    model: Transformer, rows: list[Tensor], chunks: list[list[int]], side: str, selector: str | None
) -> tuple[list[Tensor], Cache]:
    """Each row's logits, from calls in which row b gives chunks[call][b] tokens, padded."""
    cache = Cache(model.config, len(rows), ROOM, dtype=torch.float64)
    done, pieces = [0] * len(rows), [[] for _ in rows]
    for counts in chunks:
        parts = [row[d : d + n] for row, d, n in zip(rows, done, counts, strict=True)]
        tokens, documents = pad_rows(parts, side)
        even = len(set(counts)) == 1
        logits = model(
            tokens, selector=selector, document_ids=None if even else documents, cache=cache
        ).logits
        for b, n in enumerate(counts):
            pieces[b].append(logits[b, documents[b] >= 0])
            done[b] += n
    assert done == [len(row) for row in rows]
    return [torch.cat(parts) for parts in pieces], cache


def compute_alone(model: Transformer, rows: list[Tensor], selector: str | None) -> list[Tensor]:
    """Each row's logits from one pass over it and nothing else."""
    return [model(row[None], selector=selector).logits[0] for row in rows]


def check(
    model: Transformer, lengths: list[int], chunks: list[list[int]], side: str, selector: str | None
) -> Cache:
    rows = [make_tokens(model.config, n, seed=b) for b, n in enumerate(lengths)]
    expected = compute_alone(model, rows, selector)
    found, cache = decode(model, rows, chunks, side, selector)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    return cache


def split_evenly(lengths: list[int], size: int) -> list[list[int]]:
    """Prompts as they come, the longest in chunks of `size`; then nothing more to say."""
    calls = -(-max(lengths) // size)
    return [[max(0, min(size, n - call * size)) for n in lengths] for call in range(calls)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "selector"), CASES)
def test_token_by_token(name: str, selector: str | None) -> None:
    model = make_model(name)
    check(model, [7, 7], [[1, 1]] * 7, "right", selector)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "selector"), CASES)
def test_ragged_prompts_then_tokens(name: str, selector: str | None, side: str) -> None:
    """Prompts of lengths 6, 1, 9 in one padded call, then two tokens each, one at a time."""
    model = make_model(name)
    prompts = [6, 1, 9]
    cache = check(model, [n + 2 for n in prompts], [prompts, [1, 1, 1], [1, 1, 1]], side, selector)
    assert cache.seen.tolist() == [8, 3, 11]


@pytest.mark.parametrize(("name", "selector"), CASES)
def test_chunked_prefill_with_finished_rows(name: str, selector: str | None) -> None:
    """A row that has nothing more to say is all padding in the later calls."""
    model = make_model(name)
    lengths = [11, 4, 1]
    check(model, lengths, split_evenly(lengths, 4), "left", selector)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[int]]:
    """Per call, the number of tokens of each row; some rows may pause, no call is empty."""
    batch = draw(st.integers(1, 3))
    call = st.lists(st.integers(0, 4), min_size=batch, max_size=batch).filter(any)
    chunks = draw(st.lists(call, min_size=1, max_size=6))
    chunks[0] = [max(1, n) for n in chunks[0]]
    return chunks


@settings(max_examples=15)
@given(schedules(), st.sampled_from(["left", "right"]), st.data())
def test_any_chunking(chunks: list[list[int]], side: str, data: st.DataObject) -> None:
    name, selector = data.draw(st.sampled_from(CASES))
    lengths = [sum(column) for column in zip(*chunks, strict=True)]
    check(make_model(name), lengths, chunks, side, selector)


@settings(max_examples=25)
@given(schedules(), st.sampled_from(["left", "right"]), st.sampled_from(["predictor", "router"]))
def test_any_chunking_of_a_routed_model(chunks: list[list[int]], side: str, selector: str) -> None:
    lengths = [sum(column) for column in zip(*chunks, strict=True)]
    check(make_model("mod_kv_first_tokens"), lengths, chunks, side, selector)


@pytest.mark.parametrize("name", ["mod", "mod_kv", "early_exit", "mode_staged"])
def test_a_routed_layer_stores_its_routed_tokens_only(name: str) -> None:
    config = make_config(name)
    model = make_model(config)
    rows = [make_tokens(config, n, seed=n) for n in (12, 5)]
    _, cache = decode(model, rows, [[7, 2], [5, 3]], "left", "predictor")
    for b, row in enumerate(rows):
        output = model(row[None], selector="predictor")
        routings = dict(zip(config.routed_layers, output.routings, strict=True))
        for index, layer in enumerate(cache.layers):
            if index not in routings:
                assert layer.lengths[b] == len(row)
                continue
            stored = routings[index].memory or routings[index]
            count = int((stored.slot >= 0).sum())
            assert layer.lengths[b] == count
            positions = stored.index[0][stored.valid[0]].tolist()
            assert layer.positions[b, :count].tolist() == positions
    routed = [cache.layers[i].lengths.tolist() for i in config.routed_layers]
    assert len({tuple(lengths) for lengths in routed}) > 1, "lengths are each layer's own"


def test_explicit_positions_are_used_with_a_cache() -> None:
    model = make_model("mod")
    tokens, positions = make_tokens(model.config, 2, 6), torch.tensor([[0, 2, 4, 6, 8, 10]] * 2)
    expected = model(tokens, selector="all", positions=positions).logits
    cache = Cache(model.config, 2, 6, dtype=torch.float64)
    pieces = [
        model(tokens[:, s], selector="all", positions=positions[:, s], cache=cache).logits
        for s in (slice(0, 4), slice(4, 6))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-10)


def test_bf16_cache_is_close() -> None:
    """A narrower cache rounds keys and values and nothing else."""
    model = make_model("dense", dtype=torch.float32)
    tokens = make_tokens(model.config, 2, 8)
    cache = Cache(model.config, 2, 8, dtype=torch.bfloat16)
    found = model(tokens, cache=cache).logits
    expected = model(tokens).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize(("name", "selector"), CASES)
def test_static_shapes_give_the_same(name: str, selector: str | None) -> None:
    """What a GPU replays: every token has a place in every block, whoever is kept."""
    model = make_model(name)
    rows = [make_tokens(model.config, n, seed=b) for b, n in enumerate((6, 6))]
    found = []
    for compact in (True, False):
        cache = Cache(model.config, 2, 8, dtype=torch.float64, compact=compact)
        tokens = torch.stack(rows)
        parts = [model(tokens[:, s], selector=selector, cache=cache) for s in (slice(0, 5), [5])]
        found.append(torch.cat([part.logits for part in parts], dim=1))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["mod", "mod_kv", "early_exit", "mode_staged"])
def test_a_block_that_nobody_enters_does_not_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(name)
    for module in model.modules():
        if isinstance(module, Predictor) and module.w_out.weight.shape[0] == 1:
            torch.nn.init.constant_(module.w_out.bias, -1e9)
    ran = []
    plain = Block.forward

    def watch(block: Block, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        ran.append(x.shape[1])
        return plain(block, x, *args, **kwargs)

    monkeypatch.setattr(Block, "forward", watch)
    cache = Cache(model.config, 2, 8, dtype=torch.float64)
    model(make_tokens(model.config, 2, 5), selector="predictor", cache=cache)
    num_dense = model.config.num_layers - len(model.config.routed_layers)
    assert ran == [5] * num_dense
