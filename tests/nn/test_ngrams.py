"""A memory's vectors depend on the last ids of the same document, and on nothing else."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthmix.config import MemoryConfig
from depthmix.nn import Cache, MixtureOfDepths, Transformer
from depthmix.nn.cache import PastIds
from depthmix.nn.ngrams import (
    NO_TOKEN,
    Lookup,
    NgramTables,
    hash_ngrams,
    list_factors,
    list_previous,
)
from variants import make_config, make_model, make_tokens

MEMORIES = ["dense_memory", "mod_memory", "mod_lookup"]


def hash_by_hand(ids: list[int], number: int, num_rows: int) -> int:
    """The row of ids, nearest first, worked out with Python's own integers."""
    factors = list_factors(len(ids), number)
    total = sum((token + 1) * factor for token, factor in zip(ids, factors, strict=True))
    return total % (2**31 - 1) % num_rows


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9), st.integers(1, 10**6))
def test_rows_by_hand(ids: list[int], num_rows: int) -> None:
    config = MemoryConfig(ngrams=(1, 3), num_hashes=2, num_rows=num_rows)
    tokens = torch.tensor([ids])
    rows = hash_ngrams(tokens, list_previous(tokens, None, 2), config)[0].tolist()
    for place, found in enumerate(rows):
        past = [ids[place - back] if place >= back else NO_TOKEN for back in range(3)]
        expected = [hash_by_hand(past[:n], number, num_rows) for n in (1, 3) for number in (0, 1)]
        assert found == expected


def test_factors_never_change() -> None:
    """Trained tables would be worthless with others."""
    assert list_factors(2, 0) == (972606689, 234369116)
    every = [f for n in (1, 2, 3) for number in (0, 1) for f in list_factors(n, number)]
    assert len(set(every)) == len(every)
    assert all(0 < factor < 2**31 - 1 for factor in every)


def test_hashes_spread_and_differ() -> None:
    config = MemoryConfig(ngrams=(2,), num_hashes=2, num_rows=1000)
    tokens = torch.randint(50_000, (1, 4000))
    rows = hash_ngrams(tokens, list_previous(tokens, None, 1), config)[0]
    for column in rows.T:
        # about 1 - exp(-4) of the rows are hit
        assert 960 < len(column.unique()) <= 1000
    together = rows[:, 0] * 1000 + rows[:, 1]
    assert len(together.unique()) > 3980


def test_previous_ids_stay_in_their_document() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    documents = torch.tensor([[1, 1, 2, -1, 3]])
    none = NO_TOKEN
    assert list_previous(tokens, None, 2)[0].tolist() == [
        [none, none],
        [5, none],
        [6, 5],
        [7, 6],
        [8, 7],
    ]
    found = list_previous(tokens, documents, 2)[0].tolist()
    assert found == [[none, none], [5, none], [none, none], [none, none], [none, none]]
    assert list_previous(tokens, None, 0).shape == (1, 5, 0)
    assert list_previous(tokens[:, :1], None, 3)[0].tolist() == [[none] * 3]


def test_past_ids_are_remembered_by_row_and_position() -> None:
    past = PastIds(2, 6, "cpu")
    first = past.recall(torch.tensor([[3, 4], [9, 5]]), torch.tensor([[0, 1], [0, 0]]),
                        torch.tensor([[True, True], [False, True]]), 2)  # fmt: skip
    assert first[0].tolist() == [[NO_TOKEN, NO_TOKEN], [3, NO_TOKEN]]
    assert first[1, 1].tolist() == [NO_TOKEN, NO_TOKEN]
    past.grow(9)
    later = past.recall(torch.tensor([[7], [8]]), torch.tensor([[2], [1]]), None, 2)
    assert later.tolist() == [[[4, 3]], [[5, NO_TOKEN]]]
    # several sequences in one row of tokens
    mixed = past.recall(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), None, 2,
                        torch.tensor([[1, 0]]))  # fmt: skip
    assert mixed[0].tolist() == [[8, 5], [7, 4]]


def test_a_lookup_is_a_gated_projection() -> None:
    lookup = Lookup(6, 4).double()
    torch.nn.init.normal_(lookup.gate.weight)
    x, found = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 6).double()
    rms = (x.square().mean(dim=2, keepdim=True) + 1e-6).sqrt()
    factor = 1 + torch.tanh((x / rms) @ lookup.gate.weight.T)
    torch.testing.assert_close(lookup(x, found), factor * (found @ lookup.projection.weight.T))


@pytest.mark.parametrize("name", MEMORIES)
def test_new_tables_change_nothing_and_learn(name: str) -> None:
    config = make_config(name)
    model, tokens = Transformer(config).double(), make_tokens(config, 2, 12)
    assert model.ngrams is not None
    before = model(tokens).logits
    readers = [m for m in model.modules() if isinstance(m, Lookup)]
    for reader in readers:
        torch.nn.init.normal_(reader.projection.weight)
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)
    model(tokens).logits.logsumexp(2).sum().backward()
    grad = model.ngrams.rows.weight.grad
    assert grad is not None
    # the rows that were read, and no others
    rows = model.ngrams.rows.weight
    read = hash_ngrams(
        tokens, list_previous(tokens, None, config.memory.num_previous), config.memory
    )
    read = read + torch.arange(config.memory.num_tables) * config.memory.num_rows
    touched = grad.abs().sum(dim=1).nonzero().flatten()
    assert set(touched.tolist()) <= set(read.flatten().tolist())
    assert len(touched) > 0
    assert rows.shape == (
        config.memory.num_tables * config.memory.num_rows,
        config.shape.memory_width // config.memory.num_tables,
    )


def compute_by_hand(model: Transformer, tokens: Tensor) -> Tensor:
    """The model block by block, with the memory added where its configuration says."""
    config, x = model.config, model.embedding(tokens)
    assert isinstance(model.ngrams, NgramTables)
    past = list_previous(tokens, None, config.memory.num_previous)
    found = model.ngrams(tokens, past)
    place, _ = model._place(tokens, None, None, None)
    if config.memory.place == "input":
        x = x + model.lookups["input"](x, found)
    for index, layer in enumerate(model.layers):
        if isinstance(layer, MixtureOfDepths):
            bypass, layer.bypass = layer.bypass, None
            x, routing, _ = layer(x, place)
            layer.bypass = bypass
            if bypass is not None:
                # where the block changed nothing, x is what entered it
                added = bypass(x, found)
                x = torch.stack(
                    [
                        torch.stack([x[b, t] if routing.slot[b, t] >= 0 else x[b, t] + added[b, t]
                                     for t in range(x.shape[1])])
                        for b in range(x.shape[0])
                    ]
                )  # fmt: skip
        else:
            x = x + layer(x, place).update
        if (
            config.memory.place == "blocks"
            and index % config.memory.every == config.memory.every - 1
        ):
            x = x + model.lookups[str(index)](x, found)
    return model.head(model.norm(x))


@pytest.mark.parametrize("name", MEMORIES)
def test_a_memory_is_added_where_its_configuration_says(name: str) -> None:
    model = make_model(name)
    tokens = make_tokens(model.config, 2, 12)
    expected = compute_by_hand(model, tokens)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-9, atol=1e-9)
    plain = make_config(name, **{"memory.place": "none", "routing.bypass": "identity"})
    assert plain.has_memory is False
    without = Transformer(plain).double()
    without.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(without(tokens).logits, expected)


@pytest.mark.parametrize("compact", [True, False])
def test_a_bypass_is_for_skipped_tokens_only(compact: bool) -> None:
    """Whether it is computed for them alone or for all."""
    model = make_model("mod_lookup")
    tokens = make_tokens(model.config, 3, 10)
    expected = model(tokens, selector="predictor").logits
    cache = Cache(model.config, 3, 10, dtype=torch.float64, compact=compact)
    parts = [model(part, selector="predictor", cache=cache).logits for part in tokens.split(4, 1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-9)
    # with every token in every block there is nothing to pass by
    with torch.no_grad():
        assert model.ngrams is not None
        every = model(tokens, selector="all").logits
        model.ngrams.rows.weight.normal_()
        torch.testing.assert_close(model(tokens, selector="all").logits, every)
        assert not torch.allclose(model(tokens, selector="predictor").logits, expected)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"memory.ngrams": (3, 2)}, "memory.ngrams = [3, 2] must be distinct lengths"),
        ({"memory.ngrams": ()}, "memory.ngrams = [] must be distinct lengths"),
        ({"memory.width": 30}, "memory.width = 30 must be a multiple of the 4 tables"),
        ({"memory.place": "blocks", "memory.every": 9}, "leaves none of the 4 blocks"),
        (
            {"memory.place": "blocks", "routing.bypass": "lookup"},
            "give skipped tokens the same vectors twice",
        ),
        ({"routing.bypass": "lookup", "routing.strategy": "none"}, "needs routed blocks"),
        ({"memory.num_hashes": 0}, "memory.num_hashes = 0 must be at least 1"),
        ({"memory.num_rows": 2**31}, "memory.num_rows"),
    ],
)
def test_what_does_not_fit_is_said(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make_config("mod", **{"memory.place": "input", **fields})
    assert sentence in str(caught.value)
