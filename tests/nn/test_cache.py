"""The cache: rows of their own lengths, padding never stored, positions kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthmix.nn.cache import Cache, LayerCache
from variants import make_config


@settings(max_examples=50)
@given(
    st.lists(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=2),
        min_size=1,
        max_size=4,
    )
)
def test_append_equals_python_lists(chunks: list[list[list[bool]]]) -> None:
    """Each chunk says, for two rows of three tokens, which are real."""
    layer = LayerCache(2, 12, 2, 4, torch.device("cpu"), torch.float64, compact=True)
    expected: list[list[tuple[float, int]]] = [[], []]
    for number, chunk in enumerate(chunks):
        valid = torch.tensor(chunk)
        key = torch.randn(2, 3, 2, 4, dtype=torch.float64)
        positions = torch.tensor([[10 * number, 10 * number + 1, 10 * number + 2]] * 2)
        stored = layer.append(key, -key, positions, valid)
        for row in range(2):
            for token in range(3):
                if chunk[row][token]:
                    expected[row].append((key[row, token].sum().item(), 10 * number + token))
        for row in range(2):
            length = len(expected[row])
            assert stored.valid[row].tolist() == [slot < length for slot in range(12)]
            assert stored.positions[row, :length].tolist() == [p for _, p in expected[row]]
            sums = stored.key[row, :length].sum(dim=(1, 2)).tolist()
            assert sums == pytest.approx([s for s, _ in expected[row]])
            assert torch.equal(stored.value[row, :length], -stored.key[row, :length])
    assert layer.lengths.tolist() == [len(row) for row in expected]


def test_append_without_a_mask_stores_every_token() -> None:
    layer = LayerCache(2, 4, 1, 2, torch.device("cpu"), torch.float32, compact=True)
    key = torch.randn(2, 4, 1, 2)
    # positions may be shared by all rows
    stored = layer.append(key, key, torch.arange(4)[None].expand(2, -1), None)
    assert torch.equal(stored.key, key)
    assert stored.valid.all()
    assert layer.lengths.tolist() == [4, 4]


def test_a_full_row_is_not_overwritten_by_padding() -> None:
    layer = LayerCache(1, 2, 1, 2, torch.device("cpu"), torch.float32, compact=True)
    key = torch.randn(1, 2, 1, 2)
    layer.append(key, key, torch.tensor([[0, 1]]), None)
    noise = torch.full((1, 3, 1, 2), 9.0)
    stored = layer.append(noise, noise, torch.tensor([[7, 8, 9]]), torch.zeros(1, 3).bool())
    assert torch.equal(stored.key, key)
    assert stored.positions.tolist() == [[0, 1]]


def test_unread_slots_are_finite_and_types_are_kept() -> None:
    layer = LayerCache(1, 5, 1, 2, torch.device("cpu"), torch.bfloat16, compact=True)
    key = torch.randn(1, 2, 1, 2)
    stored = layer.append(key, key, torch.tensor([[0, 1]]), None)
    assert layer.key.dtype == torch.bfloat16
    assert stored.key.dtype == torch.float32
    assert torch.equal(stored.key[:, 2:], torch.zeros(1, 3, 1, 2))
    assert torch.equal(stored.key[:, :2], key.bfloat16().float())


def test_every_layer_has_its_own_tensors() -> None:
    config = make_config("mod")
    cache = Cache(config, 3, 10, dtype=torch.float64)
    assert len(cache.layers) == config.num_layers
    assert len({layer.key.data_ptr() for layer in cache.layers}) == config.num_layers
    for layer in cache.layers:
        assert layer.key.shape == (3, 11, config.shape.num_kv_heads, config.shape.head_width)
        assert layer.key.dtype == layer.value.dtype == torch.float64


def test_positions_count_real_tokens_of_each_row() -> None:
    cache = Cache(make_config("mod"), 2, 10)
    present = torch.tensor([[False, True, True], [True, False, False]])
    first = cache.advance(2, 3, present)
    assert first[present].tolist() == [0, 1, 0]
    assert (first >= 0).all()
    assert cache.advance(2, 2, None).tolist() == [[2, 3], [1, 2]]
    assert cache.seen.tolist() == [4, 3]
    assert cache.advance(2, 1, torch.zeros(2, 1).bool()).shape == (2, 1)
    assert cache.seen.tolist() == [4, 3]


def test_refusals_say_what_to_do() -> None:
    config = make_config("mod")
    with pytest.raises(ValueError, match=r"65 tokens.*max_seq_len = 64"):
        Cache(config, 1, 65)
    cache = Cache(config, 2, 4)
    with pytest.raises(ValueError, match="made for 2 rows, the tokens have 3"):
        cache.advance(3, 1, None)
    cache.advance(2, 3, None)
    with pytest.raises(ValueError, match=r"room for 4 tokens, 3 are taken and 2 more"):
        cache.advance(2, 2, None)
    # a refusal takes no room
    assert cache.advance(2, 1, None).tolist() == [[3], [3]]
