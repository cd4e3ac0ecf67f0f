"""A block returns its update: the residual is not in it."""

import pytest
import torch

from depthmix.nn.attention import Memory, Place
from depthmix.nn.block import Block
from depthmix.nn.cache import Cache
from depthmix.nn.layers import MLP, make_phase_table
from variants import make_config


def make_place(length: int, head_width: int) -> Place:
    table = make_phase_table(64, head_width, 10000.0).double()
    return Place(torch.arange(length)[None], table[None, :length], None, None)


@pytest.mark.parametrize("name", ["dense", "moe_expert_choice", "moe_token_choice"])
def test_update_by_hand(name: str) -> None:
    config = make_config(name)
    block = Block(config, experts=name != "dense").double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 6, config.width, dtype=torch.float64)
    place = make_place(6, config.shape.head_width)
    found = block(x, place)
    mixed = block.attention(block.norm_attention(x), place)
    out = block.mlp(block.norm_mlp(x + mixed), *([] if name == "dense" else [None]))
    if name != "dense":
        out, routing = out
        assert found.experts is not None
        assert torch.equal(found.experts.kept, routing.kept)
    else:
        assert found.experts is None
    torch.testing.assert_close(found.update, mixed + out, rtol=0, atol=1e-13)


def test_a_block_that_computes_nothing_adds_nothing() -> None:
    config = make_config("dense")
    block = Block(config).double()
    torch.nn.init.zeros_(block.attention.w_out.weight)
    assert isinstance(block.mlp, MLP)
    torch.nn.init.zeros_(block.mlp.w_out.weight)
    x = torch.randn(2, 6, config.width, dtype=torch.float64)
    update = block(x, make_place(6, config.shape.head_width)).update
    assert torch.equal(update, torch.zeros_like(x))


def test_memory_goes_through_the_same_norm() -> None:
    """Own tokens offered as memory with weight 1 are plain attention."""
    config = make_config("dense")
    block = Block(config).double()
    block.norm_attention.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(2, 6, config.width, dtype=torch.float64)
    place = make_place(6, config.shape.head_width)
    memory = Memory(x, place, torch.ones(2, 6, dtype=torch.float64))
    found = block(x, place, memory=memory).update
    torch.testing.assert_close(found, block(x, place).update, rtol=0, atol=1e-13)


def test_block_passes_decoding_on_to_experts() -> None:
    config = make_config("moe_expert_choice")
    block = Block(config, experts=True).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 4, config.width, dtype=torch.float64)
    place = make_place(4, config.shape.head_width)
    whole = block(x, place, selector="router")
    assert whole.experts is not None
    assert whole.experts.target is not None
    cache = Cache(config, 2, 4, dtype=torch.float64)
    place = place._replace(positions=place.positions.expand(2, -1), phase=place.phase)
    cached = block(x, place, selector="router", cache=cache.layers[0])
    assert cached.experts is not None
    assert cached.experts.target is None
    torch.testing.assert_close(cached.update, whole.update, rtol=0, atol=1e-13)
