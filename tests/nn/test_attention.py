"""Attention against a softmax over Python loops: order, documents, empty places, memory."""

import math

import pytest
import torch
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.nn.attention import Attention, Memory, Place, attend, make_mask
from depthmix.nn.cache import Cache
from depthmix.nn.layers import make_phase_table
from variants import make_config, rotate_by_hand

LENGTH = 7


def make_attention(**overrides: object) -> tuple[Attention, ModelConfig]:
    config = make_config("dense", **{"width": 16, **overrides})
    attention = Attention(config).double()
    for norm in (attention.norm_query, attention.norm_key):
        if norm is not None:
            norm.weight.data.uniform_(0.5, 1.5)
    for bias in (attention.w_qk.bias, attention.w_value.bias):
        if bias is not None:
            bias.data.uniform_(-1, 1)
    return attention, config


def make_place(
    positions: Tensor, documents: Tensor | None = None, valid: Tensor | None = None
) -> Place:
    table = make_phase_table(64, 4, 10000.0).double()
    return Place(positions, table[positions], documents, valid)


def attend_by_loops(
    attention: Attention,
    x: Tensor,
    place: Place,
    visible: list[list[list[int]]],
    source: tuple[Tensor, Place, Tensor] | None = None,
) -> Tensor:
    """The layer, one query and one head at a time; visible[b][t] lists the keys that t sees."""
    keys_x, keys_place, value_weight = source or (x, place, torch.ones(x.shape[:2]).to(x))
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_width
    widths = [heads * width, kv_heads * width]
    w_query, w_key = attention.w_qk.weight.split(widths)
    w_value = attention.w_value.weight
    b_query, b_key, b_value = (x.new_zeros(n) for n in (*widths, kv_heads * width))
    if attention.w_qk.bias is not None:
        (b_query, b_key), b_value = attention.w_qk.bias.split(widths), attention.w_value.bias
    query = (x @ w_query.T + b_query).unflatten(-1, (heads, width))
    key = (keys_x @ w_key.T + b_key).unflatten(-1, (kv_heads, width))
    value = (keys_x @ w_value.T + b_value) * value_weight[..., None]
    value = value.unflatten(-1, (kv_heads, width))
    if attention.norm_query is not None and attention.norm_key is not None:
        query, key = attention.norm_query(query), attention.norm_key(key)
    query, key = rotate_by_hand(query, place.phase), rotate_by_hand(key, keys_place.phase)
    mixed = torch.zeros_like(query)
    for b, rows in enumerate(visible):
        for t, seen in enumerate(rows):
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = [query[b, t, head] @ key[b, s, group] / math.sqrt(width) for s in seen]
                shares = torch.stack(scores).softmax(0)
                mixed[b, t, head] = shares @ value[b, seen, group]
    return mixed.flatten(-2) @ attention.w_out.weight.T


@pytest.mark.parametrize(
    "overrides", [{}, {"qk_norm": True}, {"num_kv_heads": 4}, {"qkv_bias": True}], ids=str
)
def test_causal_attention_equals_loops(overrides: dict[str, object]) -> None:
    attention, _ = make_attention(**overrides)
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    place = make_place(torch.arange(LENGTH)[None])
    visible = [[list(range(t + 1)) for t in range(LENGTH)]] * 2
    expected = attend_by_loops(attention, x, place, visible)
    torch.testing.assert_close(attention(x, place), expected, rtol=0, atol=1e-13)


def test_attention_stays_inside_documents() -> None:
    attention, _ = make_attention()
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    documents = torch.tensor([[-1, 0, 0, 0, 1, 1, 1], [5, 5, 2, 2, 2, -1, -1]])
    positions = torch.tensor([[0, 0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 0, 1]])
    place = make_place(positions, documents, documents >= 0)
    visible = [
        [[s for s in range(t + 1) if documents[b, s] == documents[b, t]] for t in range(LENGTH)]
        for b in range(2)
    ]
    expected = attend_by_loops(attention, x, place, visible)
    found = attention(x, place)
    assert found.isfinite().all()
    real = documents >= 0
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-13)


@pytest.mark.parametrize("with_documents", [False, True])
def test_gathered_tokens_keep_their_positions(with_documents: bool) -> None:
    """Attention over a subset equals attention over all, with the other keys hidden."""
    attention, _ = make_attention()
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1]] * 2) if with_documents else None
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]] * 2) if with_documents else None
    whole = make_place(torch.arange(LENGTH)[None] if positions is None else positions, documents)
    index = torch.tensor([[1, 3, 5, 6], [0, 4, 2, 5]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    place = whole.take(index, valid)
    found = attention(x.gather(1, index[:, :, None].expand(-1, -1, 16)), place)
    kept = [[1, 3, 5, 6], [0, 4]]
    visible = [
        [
            [
                s
                for s in kept[b]
                if s <= t and (documents is None or documents[b, s] == documents[b, t])
            ]
            or [t]
            for t in range(LENGTH)
        ]
        for b in range(2)
    ]
    expected = attend_by_loops(attention, x, whole, visible)
    for b, tokens in enumerate(kept):
        torch.testing.assert_close(found[b, : len(tokens)], expected[b, tokens], rtol=0, atol=1e-13)
    assert found.isfinite().all()


def test_take_gathers_places() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [3, 3, 3, -1]])
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    place = make_place(positions, documents, documents >= 0)
    index = torch.tensor([[1, 2], [2, 0]])
    taken = place.take(index, torch.tensor([[True, True], [True, False]]))
    assert taken.positions.tolist() == [[1, 0], [2, 0]]
    assert taken.documents is not None
    assert taken.documents.tolist() == [[0, 1], [3, -1]]
    assert torch.equal(taken.phase[1, 0], place.phase[1, 2])
    # shared positions are given to every row
    shared = make_place(torch.arange(4)[None]).take(index, None)
    assert shared.positions.tolist() == index.tolist()
    assert torch.equal(shared.phase[1, 0], place.phase[1, 2])
    assert shared.documents is None
    assert shared.valid is None


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_memory_offers_keys_and_weighted_values(qkv_bias: bool) -> None:
    attention, _ = make_attention(qk_norm=True, qkv_bias=qkv_bias)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    place = make_place(torch.tensor([[1, 4, 6], [2, 3, 5]]))
    offered = torch.randn(2, 4, 16, dtype=torch.float64)
    offered_valid = torch.tensor([[True] * 4, [True, True, True, False]])
    offered_place = make_place(torch.tensor([[0, 1, 4, 6], [0, 2, 3, 4]]), valid=offered_valid)
    weight = torch.randn(2, 4, dtype=torch.float64)
    found = attention(x, place, memory=Memory(offered, offered_place, weight))
    visible = [[[0, 1], [0, 1, 2], [0, 1, 2, 3]], [[0, 1], [0, 1, 2], [0, 1, 2]]]
    expected = attend_by_loops(attention, x, place, visible, (offered, offered_place, weight))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_cached_attention_equals_attention_over_all() -> None:
    attention, config = make_attention()
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    expected = attention(x, make_place(torch.arange(LENGTH)[None]))
    layer = Cache(config, 2, 8, dtype=torch.float64).layers[0]
    pieces = []
    for start, end in ((0, 1), (1, 4), (4, 7)):
        place = make_place(torch.arange(start, end).expand(2, -1))
        pieces.append(attention(x[:, start:end], place, cache=layer))
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-13)
    assert layer.lengths.tolist() == [LENGTH, LENGTH]


def test_mask_rules() -> None:
    query = make_place(
        torch.tensor([[0, 2, 3]]), torch.tensor([[0, 1, -1]]), torch.tensor([[True, True, False]])
    )
    mask = make_mask(
        query,
        positions=torch.tensor([[0, 1, 2, 3, 0]]),
        documents=torch.tensor([[0, 1, 1, 1, 1]]),
        valid=torch.tensor([[True, True, True, True, False]]),
    )
    assert mask[0].tolist() == [
        [True, False, False, False, False],
        [False, True, True, False, False],
        # what an empty place sees is never used, but it must see something
        [True, True, True, True, True],
    ]


def test_attend_shares_key_heads_among_query_heads() -> None:
    query = torch.randn(1, 3, 4, 2, dtype=torch.float64)
    key, value = torch.randn(2, 1, 3, 2, 2, dtype=torch.float64)
    mixed = attend(query, key, value, None)
    for head in range(4):
        group = slice(head // 2, head // 2 + 1)
        alone = attend(query[:, :, head : head + 1], key[:, :, group], value[:, :, group], None)
        torch.testing.assert_close(mixed[:, :, head : head + 1], alone, rtol=0, atol=1e-14)
    everything = attend(query, key, value, torch.ones(1, 3, 3, dtype=torch.bool))
    torch.testing.assert_close(everything[:, -1], mixed[:, -1], rtol=0, atol=1e-14)
    assert not torch.allclose(everything[:, 0], mixed[:, 0])
