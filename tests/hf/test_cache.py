"""Caches that hold routed tokens: what is remembered is what the model has seen, row by row."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import Cache

from depthmix.hf import DepthmixForCausalLM
from depthmix.hf.cache import DynamicPastLayer
from hf_models import make_hf_model, pad_left
from variants import NAMES, make_tokens

NAMES_HERE = ("mod", "mod_kv", "early_exit")
MODELS = {name: make_hf_model(name) for name in NAMES_HERE}


def make_cache(model: DepthmixForCausalLM, kind: str) -> Any:
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=24)


@torch.no_grad()
def feed(
    model: DepthmixForCausalLM, cache: Cache, ids: Tensor, mask: Tensor, sizes: list[int]
) -> Tensor:
    """Logits of all tokens, computed chunk by chunk."""
    logits, start = [], 0
    for size in sizes:
        end = start + size
        out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        logits.append(out.logits)
        start = end
        assert int(cache.get_seq_length()) == end
    assert start == ids.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_chunks_and_steps_equal_one_pass(name: str, kind: str) -> None:
    model = make_hf_model(name)
    rows = [make_tokens(model.model.config, n, seed=n) for n in (13, 9, 4)]
    ids, mask = pad_left(rows)
    whole = model(ids, attention_mask=mask).logits
    pieces = feed(model, make_cache(model, kind), ids, mask, [5, 1, 4, 1, 1, 1])
    torch.testing.assert_close(pieces[mask.bool()], whole[mask.bool()], rtol=0, atol=1e-10)
    for number, row in enumerate(rows):
        # padding is neither seen nor routed
        alone = model(row[None]).logits[0]
        torch.testing.assert_close(pieces[number, -len(row) :], alone, rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_routed_block_stores_its_routed_tokens_only() -> None:
    model = MODELS["mod"]
    rows = [make_tokens(model.model.config, n, seed=n) for n in (20, 11)]
    ids, mask = pad_left(rows)
    cache = make_cache(model, "dynamic")
    feed(model, cache, ids, mask, [12, *[1] * 8])
    kept = [
        [
            int((routing.slot >= 0).sum())
            for routing in model.model(row[None], selector="predictor")[1]
        ]
        for row in rows
    ]
    assert any(0 < count < 20 for counts in kept for count in counts)
    routed = model.model.config.routed_layers
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, DynamicPastLayer)
        counts = [20, 11] if index not in routed else [row[routed.index(index)] for row in kept]
        assert layer.get_seq_length() == 20
        assert (0 if layer.store is None else layer.num_stored) == max(counts)
        if layer.store is not None:
            assert layer.store.lengths.tolist() == counts
            assert layer.keys is not None
            assert layer.keys.shape[-2] == max(counts)


@torch.no_grad()
def test_tokens_are_counted_also_where_nobody_is_routed() -> None:
    model = make_hf_model("mod_first_tokens")
    for layer in model.model.layers:
        if hasattr(layer, "decider"):
            layer.decider.predictor.w_out.bias.fill_(-100)
    cache = make_cache(model, "dynamic")
    ids = make_tokens(model.model.config, 2, 9)
    whole = model(ids).logits
    pieces = feed(model, cache, ids, torch.ones_like(ids), [2, 3, 1, 3])
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-10)
    assert [layer.num_stored for layer in cache.layers] == [9, 2] * (len(cache.layers) // 2)
    assert {cache.get_seq_length(index) for index in range(len(cache.layers))} == {9}


OPS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 4)),
    st.tuples(st.just("crop"), st.integers(0, 5)),
    st.tuples(st.just("keep"), st.integers(0, 12)),
    st.tuples(st.just("reorder"), st.integers(0, 99)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.integers(0, 99)),
    st.tuples(st.just("reset"), st.none()),
)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES_HERE),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ops=st.lists(OPS, min_size=1, max_size=6),
)
@torch.no_grad()
def test_whatever_is_done_to_a_cache_the_next_token_follows_from_what_is_left(
    name: str, lengths: list[int], ops: list[tuple[str, Any]]
) -> None:
    model, random = MODELS[name], torch.Generator().manual_seed(0)
    cache = make_cache(model, "dynamic")
    rows = [make_tokens(model.model.config, n, seed=n) for n in lengths]
    ids, mask = pad_left(rows)
    model(ids, attention_mask=mask, past_key_values=cache)
    for what, number in ops:
        match what:
            case "feed":
                new = torch.randint(64, (len(ids), number), generator=random)
                # a row may also wait
                here = torch.randint(2, new.shape, generator=random).cumsum(dim=1).clamp(max=1)
                ids, mask = torch.cat([ids, new], dim=1), torch.cat([mask, here], dim=1)
                model(new, attention_mask=mask, past_key_values=cache)
            case "crop":
                # a 0-dimensional tensor, as assisted decoding gives
                cache.crop(-torch.tensor(number))
                end = max(0, ids.shape[1] - number)
                ids, mask = ids[:, :end], mask[:, :end]
            case "keep" if number:
                for layer in cache.layers:
                    layer.crop(number)
                ids, mask = ids[:, :number], mask[:, :number]
            case "reorder":
                index = torch.randint(len(ids), (len(ids),), generator=random)
                cache.reorder_cache(index)
                ids, mask = ids[index], mask[index]
            case "repeat" if len(ids) < 4:
                cache.batch_repeat_interleave(number)
                ids, mask = (t.repeat_interleave(number, dim=0) for t in (ids, mask))
            case "select":
                index = torch.tensor([number % len(ids)])
                cache.batch_select_indices(index)
                ids, mask = ids[index], mask[index]
            case "reset":
                cache.reset()
                ids, mask = ids[:, :0], mask[:, :0]
        assert cache.get_seq_length() == ids.shape[1]
    new = torch.randint(64, (len(ids), 2), generator=random)
    mask = torch.cat([mask, torch.ones_like(new)], dim=1)
    found = model(new, attention_mask=mask, past_key_values=cache).logits
    for number, (past, here) in enumerate(zip(ids, mask, strict=True)):
        row = torch.cat([past[here[:-2].bool()], new[number]])
        alone = model(row[None]).logits[0, -2:]
        torch.testing.assert_close(found[number], alone, rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_static_cache_is_reordered_and_reset_in_its_own_memory() -> None:
    model = MODELS["mod"]
    cache = make_cache(model, "static")
    ids = make_tokens(model.model.config, 3, 10)
    ones = torch.ones_like(ids)
    model(ids[:, :8], past_key_values=cache)
    layer: Any = cache.layers[1]
    places = [t.data_ptr() for t in (layer.store.key, layer.store.lengths, layer.counts)]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    found = model(ids[:, 8:], past_key_values=cache).logits
    swapped = torch.cat([ids[[2, 0, 0], :8], ids[:, 8:]], dim=1)
    torch.testing.assert_close(found, model(swapped).logits[:, 8:], rtol=0, atol=1e-10)
    cache.reset()
    again = feed(model, cache, ids, ones, [9, 1])
    torch.testing.assert_close(again, model(ids).logits, rtol=0, atol=1e-10)
    assert [t.data_ptr() for t in (layer.store.key, layer.store.lengths, layer.counts)] == places


@torch.no_grad()
def test_a_cache_without_a_configuration_is_filled() -> None:
    model = MODELS["mod"]
    ids = make_tokens(model.model.config, 1, 6)
    found = feed(model, DynamicCache(), ids, torch.ones_like(ids), [4, 2])
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-10)


@torch.no_grad()
def test_refuses_what_does_not_fit() -> None:
    model = MODELS["mod"]
    ids = make_tokens(model.model.config, 2, 6)
    llama = LlamaConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        model(ids, past_key_values=DynamicCache(config=llama))
    cache = make_cache(model, "dynamic")
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="holds 2 rows, the tokens have 1"):
        model(ids[:1], past_key_values=cache)
    long = make_tokens(model.model.config, 2, 59)
    with pytest.raises(ValueError, match="65 tokens are more than max_position_embeddings = 64"):
        model(long, past_key_values=cache)
    with pytest.raises(ValueError, match="99 tokens are more"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=99))
