"""Who learns from which loss: the predictor from its own alone, the router from both."""

import pytest
import torch
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.nn.losses import language_model_loss, routing_loss
from variants import NAMES, gradients_of, make_config, make_model, make_tokens

LEARNED = [name for name in NAMES if make_config(name).routing.has_predictor]


def compute_gradients(config: ModelConfig, with_routing_loss: bool) -> dict[str, Tensor | None]:
    model = make_model(config)
    tokens = make_tokens(config, 2, 17)
    output = model(tokens[:, :-1])
    loss = language_model_loss(output.logits, tokens[:, 1:])
    if with_routing_loss:
        loss = loss + routing_loss(config, output.routings, output.expert_routings).loss
    loss.backward()
    return gradients_of(model)


def same(first: Tensor | None, second: Tensor | None) -> bool:
    """Both absent, or equal to the bit."""
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


@pytest.mark.parametrize("name", [*LEARNED, "moe_expert_choice", "mode_integrated_expert_choice"])
def test_predictors_change_nothing_else(name: str) -> None:
    """With and without their loss, every other gradient is the same to the bit."""
    config = make_config(name, **{"experts.balance_loss_weight": 0.0})
    without, with_loss = compute_gradients(config, False), compute_gradients(config, True)
    predictors = [key for key in without if "predictor" in key]
    assert predictors
    for key, grad in without.items():
        other = with_loss[key]
        if key in predictors:
            assert grad is None, key
            assert other is not None, key
            assert other.abs().sum() > 0, key
        else:
            assert same(grad, other), key


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mod_aux", {}),
        ("causal_router", {}),
        ("token_choice", {}),
        ("moe_gelu_every_2", {}),
        ("moe_token_choice", {}),
        ("mode_integrated_token_choice", {}),
        ("mod_kv", {"routing.aux_loss_weight": 0.01, "routing.predictor": False}),
    ],
)
def test_router_losses_reach_routers_and_the_stream(
    name: str, overrides: dict[str, object]
) -> None:
    config = make_config(name, **overrides)
    without, with_loss = compute_gradients(config, False), compute_gradients(config, True)
    changed = {
        key for key, grad in without.items() if grad is not None and not same(grad, with_loss[key])
    }
    assert {key for key in without if "router" in key} <= changed
    assert "embedding.weight" in changed


@pytest.mark.parametrize("name", ["mod_unit", "token_choice"])
def test_a_weight_of_zero_leaves_the_loss_out(name: str) -> None:
    weights = {
        "routing.predictor_loss_weight": 0.0,
        "routing.aux_loss_weight": 0.0,
        "routing.balance_loss_weight": 0.0,
    }
    config = make_config(name, **weights)
    without, with_loss = compute_gradients(config, False), compute_gradients(config, True)
    for key, grad in without.items():
        assert same(grad, with_loss[key]), key
