"""Stacked weights are the model's own, and the kernel that they are for equals the model."""

from typing import Any

import pytest
import torch

from depthmix.infer.cache import PagedCache
from depthmix.infer.decode import SingleKernel, SingleStep
from depthmix.infer.pages import Pages
from depthmix.nn import Transformer
from variants import make_config, make_model, make_tokens

single = pytest.importorskip("depthmix.infer.single")

# the kernel wants heads of 16 at least
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
    single.stack_weights(model)
    assert torch.equal(model(tokens).logits, before)
    after = model.state_dict()
    assert after.keys() == weights_before.keys()
    for key, value in weights_before.items():
        assert torch.equal(after[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_there_once(name: str) -> None:
    """Each large parameter is a part of a stacked tensor, and all parts together are the whole."""
    model = make(name)
    weights = single.stack_weights(model)
    stacked = (weights.w_qkv, weights.w_attn_out, weights.w_in, weights.w_mlp_out)
    places = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in stacked}
    found = dict.fromkeys(places, 0)
    for key, parameter in model.named_parameters():
        place = parameter.untyped_storage().data_ptr()
        if place in found:
            found[place] += parameter.numel()
        else:
            assert parameter.dim() == 1 or not key.startswith("layers") or "decider" in key, key
    assert found == places
    assert len(found) == 4
    # a change of one is a change of the other
    before = model(make_tokens(model.config, 1, 5)).logits
    weights.w_mlp_out[-1] *= 2
    assert not torch.equal(model(make_tokens(model.config, 1, 5)).logits, before)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding(tied: bool) -> None:
    weights = single.stack_weights(make("mod", tied_head=tied))
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
def test_a_single_step_equals_the_model(name: str, selector: str | None) -> None:
    """One row of several; the best token is the next one's input."""
    # a tied head would only repeat the first token
    model, num_tokens, row = make(name, tied_head=False), 4, 1
    config = model.config
    pages = Pages(40, 2, config.num_layers, 3)
    cache = PagedCache(config, pages, device=torch.device("cpu"), dtype=torch.float32)
    # the kernel's layout, in which a CPU's cache is not
    shape = cache.key.transpose(0, 1).shape
    cache.key, cache.value = (torch.full(shape, torch.nan).transpose(0, 1) for _ in range(2))
    # the first row's pages are not the ones that are used
    assert pages.reserve(0, 1)
    assert pages.reserve(row, num_tokens)
    cache.follow(pages.drain_changes())
    layout = (cache.key.transpose(0, 1), cache.value.transpose(0, 1))
    kernel = single.make_single_step(config, single.stack_weights(model), selector, *layout)
    assert isinstance(kernel, SingleKernel)
    step = SingleStep(model, cache, kernel, row)
    tokens = [13]
    step.send(tokens, [0], [row])
    logits, told = [], []
    for _ in range(num_tokens):
        outputs = step.run()
        logits.append(outputs.logits[0].clone())
        told.append(outputs.told[:, 0].tolist())
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
