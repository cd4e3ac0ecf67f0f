"""The estimate of activations against what autograd really saves, on small models."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.config import RunConfig, load_preset
from depthmix.nn import Transformer
from depthmix.nn.router import Router
from depthmix.train.activations import Activations, count_activations
from depthmix.train.parallel import compile_layers
from depthmix.train.step import compute_loss

NUM_ROWS, NUM_TOKENS = 2, 128
SMALL: dict[str, Any] = {
    "num_layers": 4,
    "width": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 256,
    "max_seq_len": NUM_TOKENS,
}
EXPERTS = {"experts.strategy": "expert_choice", "experts.num_experts": 4}
DENSE = {"routing.strategy": "none"}
TWO_EACH = {"experts.strategy": "token_choice", "experts.per_token": 2, "experts.capacity": 2.0}

CASES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "gelu": {**DENSE, "mlp": "gelu"},
    "qk_norm": {**DENSE, "qk_norm": True, "num_kv_heads": None},
    "mod": {},
    "mod_half": {"routing.capacity": 0.5},
    "mod_plain": {"routing.normalize_input": False},
    "mod_kv": {"routing.kv_capacity": 0.5},
    "token_choice": {"routing.strategy": "token_choice"},
    "experts": {**DENSE, **EXPERTS},
    "experts_two_each": {**DENSE, **EXPERTS, **TWO_EACH},
    "experts_mod": {**EXPERTS, "routing.capacity": 0.5},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_run(name: str, **recipe: Any) -> RunConfig:
    fields = {f"train.{field}": value for field, value in recipe.items()}
    return RunConfig.from_overrides(load_preset("1b", **{**SMALL, **CASES[name]}), fields)


def make_sharded_like(run: RunConfig, precision: torch.dtype) -> Transformer:
    """A model with the types of a sharded one's gathered weights."""
    model = Transformer(run.model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(module, Router):
                parameter.data = parameter.data.to(precision)
    return model


def measure_layers(model: Transformer, run: RunConfig, precision: torch.dtype) -> int:
    """Bytes of what the layers save for the backward pass, each memory counted once."""
    tokens = torch.randint(run.model.vocab_size, (NUM_ROWS, NUM_TOKENS))
    documents = None
    if run.train.document_mask:
        documents = (torch.arange(NUM_TOKENS) // 50).repeat(NUM_ROWS, 1)
    parameters = [*model.parameters(), *model.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    # tensors are held: memory that were freed could come again
    saved: dict[int, Tensor] = {}
    inside = False

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if inside and place not in known:
            saved.setdefault(place, tensor)
        return tensor

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    model.layers[0].register_forward_pre_hook(enter)
    model.norm.register_forward_pre_hook(leave)
    cast = torch.autocast("cpu", torch.bfloat16)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        cast if precision == torch.bfloat16 else nullcontext(),
    ):
        compute_loss(model, tokens, tokens, documents)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_what_eager_layers_save(name: str, precision: torch.dtype) -> None:
    run = make_run(name, compile=False)
    measured = measure_layers(make_sharded_like(run, precision), run, precision)
    estimate = NUM_ROWS * sum(count_activations(run, precision.itemsize).layers)
    assert 0.97 < estimate / measured < 1.04


@pytest.mark.compile
@pytest.mark.parametrize("name", ["dense", "qk_norm", "mod", "mod_kv", "experts_mod"])
def test_what_compiled_layers_save(name: str) -> None:
    # without documents: the CPU has no attention that skips blocks, as a GPU has
    run = make_run(name, document_mask=False)
    model = make_sharded_like(run, torch.bfloat16)
    # what inductor's layers save, without its time to compile them
    compile_layers(model, "aot_eager_decomp_partition")
    measured = measure_layers(model, run, torch.bfloat16)
    estimate = NUM_ROWS * sum(count_activations(run, 2).layers)
    assert 0.97 < estimate / measured < 1.06


def test_routed_layers_save_less() -> None:
    layers = count_activations(make_run("mod")).layers
    assert layers[0] == layers[2]
    assert layers[1] == layers[3] < layers[0] / 3
    # packed documents cost a mask of all pairs, where it is not made of blocks
    for fields, size in (({"compile": False}, 2 * NUM_TOKENS**2), ({}, 0)):
        masked, plain = (make_run("dense", document_mask=d, **fields) for d in (True, False))
        difference = count_activations(masked).layers[0] - count_activations(plain).layers[0]
        assert difference == size


def test_peaks() -> None:
    activations = Activations(layers=(100, 20, 100), stream=4, ends=1)
    assert activations.saved == 221
    # all of them, and one layer's gradients
    assert activations.find_peak(recompute=False) == 221 + 100
    # what enters each layer, and one layer computed again with its gradients
    assert activations.find_peak(recompute=True) == 1 + 3 * 4 + 2 * 100
