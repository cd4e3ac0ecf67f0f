"""Under a causal selector no prefix depends on the future; under top-k it does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.nn import Output, Transformer
from variants import NAMES, causal_cases, make_config, make_model, make_tokens

LENGTH = 16


def change_after(tokens: Tensor, cut: int, vocab_size: int) -> Tensor:
    """The same tokens up to `cut`, all others different."""
    changed = tokens.clone()
    changed[:, cut:] = (changed[:, cut:] + 1) % vocab_size
    return changed


def read_prefix(output: Output, config: ModelConfig, cut: int) -> list[Tensor]:
    """Everything that was decided and computed about the first `cut` tokens."""
    read = [output.logits[:, :cut]]
    for routing in output.routings:
        read += [routing.logits[:, :cut], (routing.slot[:, :cut] >= 0).double()]
        if routing.memory is not None:
            read.append((routing.memory.slot[:, :cut] >= 0).double())
    for index, routing in zip(config.expert_layers, output.expert_routings, strict=True):
        # inside a routed block the experts' tokens are the gathered ones
        if index not in config.routed_layers:
            read.append(routing.kept[:, :cut].double())
    return read


def find_difference(model: Transformer, cut: int, selector: str | None, shorter: bool) -> float:
    """The largest difference that another future makes to a prefix."""
    config = model.config
    tokens = make_tokens(config, 2, LENGTH)
    other = tokens[:, :cut] if shorter else change_after(tokens, cut, config.vocab_size)
    first = read_prefix(model(tokens, selector=selector), config, cut)
    second = read_prefix(model(other, selector=selector), config, cut)
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "selector"), causal_cases())
def test_a_prefix_does_not_depend_on_the_future(name: str, selector: str | None) -> None:
    model = make_model(name)
    for cut, shorter in ((1, True), (7, False), (LENGTH - 1, True)):
        assert find_difference(model, cut, selector, shorter) < 1e-11


@pytest.mark.parametrize("name", ["token_choice", "token_choice_kv", "moe_token_choice_limited"])
def test_places_taken_in_order_do_not_depend_on_the_future(name: str) -> None:
    """Token choice with a capacity is causal while the length stays the same."""
    model = make_model(name)
    for cut in (1, 7, LENGTH - 1):
        assert find_difference(model, cut, None, shorter=False) < 1e-11


LOOKS_AHEAD = [
    name
    for name in NAMES
    if make_config(name).routing.strategy in ("expert_choice", "early_exit")
    or make_config(name).experts.strategy == "expert_choice"
]


@pytest.mark.parametrize("name", LOOKS_AHEAD)
def test_topk_depends_on_the_future(name: str) -> None:
    """What the tests above look for is there to be found."""
    model = make_model(name)
    assert max(find_difference(model, cut, None, False) for cut in (4, 8, 12)) > 1e-3


@pytest.mark.parametrize(
    ("name", "options"),
    [("stochastic", {"selector": "all"}), ("mod", {"selector": "predictor"})],
)
def test_a_softer_check_by_gradients(name: str, options: dict[str, Any]) -> None:
    """No logit has a gradient with respect to a later token's embedding."""
    model = make_model(name)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, out: embedded.append(out.requires_grad_()))
    output = model(make_tokens(model.config, 1, LENGTH), **options)
    for position in range(LENGTH):
        (grad,) = torch.autograd.grad(
            output.logits[0, position].sum(), embedded[0], retain_graph=True
        )
        assert torch.equal(grad[0, position + 1 :], torch.zeros_like(grad[0, position + 1 :]))
        assert grad[0, position].abs().sum() > 0
