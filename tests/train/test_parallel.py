"""What one process can show of many: precision, meshes that cannot be, recomputed activations."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.config import Recipe
from depthmix.nn import Transformer
from depthmix.nn.block import Block
from depthmix.train.parallel import (
    allocate,
    checkpoint_activations,
    choose_shard_dim,
    make_mesh,
    resolve_precision,
)
from depthmix.train.step import Root, compute_loss
from variants import NAMES, gradients_of, make_config, make_model, make_tokens

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("size", "shard_size"), [(4, 3), (8, 5), (2, 4), (6, 4)], ids=lambda value: str(value)
)
def test_processes_are_shared_out_without_a_rest(size: int, shard_size: int) -> None:
    sentence = f"train.shard_size = {shard_size} must divide the {size} processes"
    with pytest.raises(ValueError, match=sentence):
        make_mesh(size, "cpu", shard_size)


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [
        ((1024, 512), 8, 0),
        # padded to 1024: a fortieth more
        ((1000, 64), 512, 0),
        # a router, and stacks of a few experts
        ((1, 256), 8, 1),
        ((8, 512, 768), 512, 1),
        ((8, 500, 1024), 512, 2),
        # nothing divides, so the first is padded
        ((3, 5), 4, 0),
        ((10,), 4, 0),
    ],
)
def test_weights_are_cut_where_little_is_padded(
    shape: tuple[int, ...], num_shards: int, dim: int
) -> None:
    assert choose_shard_dim(shape, num_shards) == dim


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        ("auto", CPU, None),
        ("auto", GPU, torch.bfloat16),
        ("float32", CPU, None),
        ("float32", GPU, None),
        ("bfloat16", CPU, torch.bfloat16),
        ("bfloat16", GPU, torch.bfloat16),
    ],
)
def test_precision_is_the_recipes_or_the_devices(
    wanted: Any, device: torch.device, expected: torch.dtype | None
) -> None:
    assert resolve_precision(Recipe(precision=wanted), device) == expected


def take_step(model: Transformer, tokens: Tensor, precision: torch.dtype | None) -> Tensor:
    torch.manual_seed(5)
    documents = (torch.arange(16) >= 6).long().expand(2, 16)
    with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
        total = compute_loss(model, tokens[:, :-1], tokens[:, 1:], documents).total
    total.backward()
    return total.detach()


@pytest.mark.parametrize(
    "precision",
    # without the checks of shapes at run time, which the other one has
    [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("name", NAMES)
def test_recomputed_activations_change_no_bit(name: str, precision: torch.dtype | None) -> None:
    plain = make_model(name, dtype=torch.float32)
    model = copy.deepcopy(plain)
    checkpoint_activations(model)
    tokens = make_tokens(model.config, 2, 17)
    # also a second step: nothing of the first may be left
    for _ in range(2):
        losses = [take_step(each, tokens, precision) for each in (plain, model)]
        assert torch.equal(*losses)
    expected = gradients_of(plain)
    for key, grad in gradients_of(model).items():
        theirs = expected[key]
        assert (grad is None) == (theirs is None), key
        if grad is not None and theirs is not None:
            assert torch.equal(grad, theirs), key
    assert any(grad is not None and grad.any() for grad in expected.values())


def test_activations_are_computed_again_only_for_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("mode_staged", dtype=torch.float32)
    calls: list[Block] = []
    forward = Block.forward

    def count(self: Block, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Block, "forward", count)
    checkpoint_activations(model)
    num_layers, tokens = model.config.num_layers, make_tokens(model.config, 2, 17)
    take_step(model, tokens, None)
    assert len(calls) == 2 * num_layers
    calls.clear()
    with torch.no_grad():
        model(tokens)
    assert len(calls) == num_layers


def test_recomputing_keeps_the_names_of_parameters() -> None:
    model = make_model("mod")
    names = list(model.state_dict())
    checkpoint_activations(model)
    assert list(model.state_dict()) == names


def test_recomputed_blocks_keep_less() -> None:
    """Bytes that the forward pass leaves for the backward pass."""
    kept = []
    for recompute in (False, True):
        model = make_model("dense", dtype=torch.float32)
        if recompute:
            checkpoint_activations(model)
        sizes: dict[int, int] = {}

        def note(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(make_tokens(model.config, 4, 64))
        kept.append(sum(sizes.values()))
    assert kept[1] < kept[0] / 3


def test_first_weights_depend_on_the_seed_alone() -> None:
    made = []
    for seed in (3, 3, 4):
        # whatever was drawn before
        torch.randn(7)
        with torch.device("meta"):
            model = Transformer(make_config("mode_staged"))
        allocate(Root(model), torch.device("cpu"), seed)
        made.append(model)
    assert made[0].head.weight is made[0].embedding.weight
    assert not any(p.is_meta for p in made[0].parameters())
    weights = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in made]
    assert weights[0].isfinite().all()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    truth = Transformer(make_config("mode_staged"))
    torch.manual_seed(3)
    truth.init_weights()
    for ours, expected in zip(made[0].parameters(), truth.parameters(), strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(made[0].phase_table, truth.phase_table)
