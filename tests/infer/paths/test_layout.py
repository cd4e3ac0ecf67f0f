"""Stacked weights share the model's memory, and the kernel they are for equals the model."""

from typing import Any

import pytest
import torch
from torch import nn

from depthmix.config import CAUSAL_SELECTORS, GATES
from depthmix.infer.cache import PagedCache
from depthmix.infer.pages import Pages
from depthmix.nn import Transformer
from variants import make_config, make_model, make_tokens

layout = pytest.importorskip("depthmix.infer.paths.layout")
decode = pytest.importorskip("depthmix.kernels.decode.step")
plan = pytest.importorskip("depthmix.kernels.decode.plan")
stages = pytest.importorskip("depthmix.kernels.decode.stages")

# the kernel needs heads of at least 16
SIZE: dict[str, Any] = {"width": 32, "num_heads": 2, "num_kv_heads": 1, "num_layers": 3}
NAMES = ["dense", "dense_gelu", "dense_mha_qk_norm_untied", "mod", "mod_gelu_mqa_untied"]


def make(name: str, **overrides: Any) -> Transformer:
    config = make_config(name, **{**SIZE, **overrides})
    return make_model(config, dtype=torch.float32).requires_grad_(False)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_does_not_notice_that_it_is_stacked(name: str) -> None:
    model = make(name)
    tokens = make_tokens(model.config, 2, 9)
    before, weights_before = model(tokens).logits, dict(model.state_dict())
    weights_before = {key: value.clone() for key, value in weights_before.items()}
    layout.stack_weights(model)
    assert torch.equal(model(tokens).logits, before)
    after = model.state_dict()
    assert after.keys() == weights_before.keys()
    for key, value in weights_before.items():
        assert torch.equal(after[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_there_once(name: str) -> None:
    """Each large parameter is a view of a stacked tensor, and together they cover all of it."""
    model = make(name)
    weights = layout.stack_weights(model)
    outside = ("embedding", "phase_table", "norm", "head")
    stacked = [t for n, t in weights._asdict().items() if t is not None and n not in outside]
    places = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in stacked}
    found = dict.fromkeys(places, 0)
    for key, parameter in model.named_parameters():
        place = parameter.untyped_storage().data_ptr()
        if place in found:
            found[place] += parameter.numel()
        else:
            assert not key.startswith("layers"), key
    assert found == places
    assert len(found) == len(stacked)
    # changing one changes the other
    before = model(make_tokens(model.config, 1, 5)).logits
    weights.w_mlp_out[-1] *= 2
    assert not torch.equal(model(make_tokens(model.config, 1, 5)).logits, before)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding(tied: bool) -> None:
    weights = layout.stack_weights(make("mod", tied_head=tied))
    assert (weights.head.data_ptr() == weights.embedding.data_ptr()) == tied
    assert torch.equal(weights.head, weights.embedding) == tied


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("dense_mha_qk_norm_untied", None),
        ("mod_plain_scores", "predictor"),
        ("mod_gelu_mqa_untied", "router"),
        ("early_exit", "predictor"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a CPU, in Triton's interpreter")
def test_the_kernel_for_one_sequence_equals_the_model(name: str, selector: str | None) -> None:
    """One row of several; the best token is the next step's input."""
    # with a tied head it would only repeat the first token
    model, num_tokens, row = make(name, tied_head=False), 4, 1
    config = model.config
    pages = Pages(40, 2, config.num_layers, 3, longest=config.max_seq_len)
    cache = PagedCache(config, pages, device=torch.device("cpu"), dtype=torch.float32, by_page=True)
    for pool in (cache.key, cache.value):
        pool.fill_(torch.nan)
    # so that the row under test does not use the first pages
    assert pages.reserve(0, 1)
    assert pages.reserve(row, num_tokens)
    cache.follow(pages.drain_changes())
    pools = (cache.key.transpose(0, 1), cache.value.transpose(0, 1))
    rules = layout.make_rules(config, selector)
    kernel = decode.DecodeStep(layout.stack_weights(model), rules, *pools)
    token, position = torch.tensor([13]), torch.tensor([0])
    tokens, logits, told = [13], [], []
    for _ in range(num_tokens):
        found = kernel(token, position, cache.tables, cache.lengths, torch.tensor([row]))
        logits.append(found.clone())
        told.append(kernel.told.tolist())
        tokens.append(told[-1][0])
    output = model(torch.tensor([tokens[:-1]]), selector=selector)
    torch.testing.assert_close(torch.stack(logits), output.logits[0], rtol=0, atol=1e-4)
    assert tokens[1:] == output.logits[0].argmax(dim=1).tolist()
    kept = [(routing.slot[0] >= 0).tolist() for routing in output.routings]
    assert len(told[0]) == 1 + len(kept)
    if kept:
        assert 0 < sum(map(sum, kept)) < num_tokens * len(kept), "some are kept, some not"
    for route, path in enumerate(kept, 1):
        assert [line[route] for line in told] == list(map(int, path))
    lengths = [num_tokens] * config.num_layers
    for layer, path in zip(config.routed_layers, kept, strict=True):
        lengths[layer] = sum(path)
    nothing = [0] * config.num_layers
    assert cache.lengths.T.tolist() == [nothing, lengths, nothing]


def test_engines_share_the_stacks_of_a_model() -> None:
    model = make("mod")
    stacks = layout.find_stacks(model)
    assert layout.find_stacks(model) is stacks
    # in place, like an optimiser
    with torch.no_grad():
        model.norm.weight.mul_(2)
        model.get_parameter("layers.0.norm_mlp.weight").mul_(3)
    assert torch.equal(stacks.weights.norm, model.norm.weight)
    norm = model.get_parameter("layers.0.norm_mlp.weight")
    assert torch.equal(stacks.weights.norm_mlp[0], norm)
    assert stacks.are_current()


@pytest.mark.parametrize("replace", [False, True])
def test_weights_that_moved_are_stacked_anew(replace: bool) -> None:
    model = make("mod")
    stacks = layout.find_stacks(model)
    if replace:
        old = model.get_parameter("layers.0.mlp.w_up.weight")
        model.get_submodule("layers.0.mlp.w_up").weight = nn.Parameter(torch.ones_like(old))
    else:
        model.to(torch.float64)
    assert not stacks.are_current()
    other = layout.find_stacks(model)
    assert other.are_current()
    assert other.weights.w_in.dtype == model.embedding.weight.dtype
    # the old tensors stay readable
    torch.testing.assert_close(
        stacks.weights.w_mlp_out.to(other.weights.w_in.dtype), other.weights.w_mlp_out
    )


def test_kernels_know_every_gate_and_every_causal_selector() -> None:
    """They cannot read configurations, so they keep their own lists."""
    assert set(stages.GATES) == set(GATES)
    assert set(plan.SELECTORS) == set(CAUSAL_SELECTORS)
