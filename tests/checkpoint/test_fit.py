"""Weights move between configurations that route elsewhere, and nothing else may differ."""

from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.checkpoint.fit import fit_weights
from depthmix.checkpoint.weights import build_model
from depthmix.config import ModelConfig
from depthmix.nn import Transformer
from variants import make_config


def make_weights(config: ModelConfig) -> dict[str, Tensor]:
    weights = dict(Transformer(config).state_dict())
    if config.tied_head:
        del weights["head.weight"]
    return weights


def test_the_same_configuration_keeps_every_tensor() -> None:
    config = make_config("mod_kv")
    weights = make_weights(config)
    fitted = fit_weights(config, weights, "here")
    assert fitted.weights.keys() == weights.keys()
    assert all(fitted.weights[name] is weights[name] for name in weights)
    assert fitted.new == fitted.left == ()


@pytest.mark.parametrize("tied", [True, False])
def test_dense_to_routed_and_back(tied: bool) -> None:
    dense = make_config("dense", tied_head=tied)
    routed = make_config("mod", tied_head=tied)
    weights = make_weights(dense)
    there = fit_weights(routed, weights, "here")
    assert there.new
    assert all(".decider." in name for name in there.new)
    back = fit_weights(dense, there.weights, "there")
    assert set(back.left) == set(there.new)
    assert back.weights.keys() == weights.keys()
    assert all(back.weights[name] is weights[name] for name in weights)


def test_other_blocks_may_route() -> None:
    config = make_config("mod")
    other = make_config("mod", **{"routing.every": 1})
    weights = make_weights(config)
    fitted = fit_weights(other, weights, "here")
    # routers that were there stay, others begin
    assert (
        fitted.weights["layers.1.decider.router.weight"]
        is weights["layers.1.decider.router.weight"]
    )
    assert {name.split(".")[1] for name in fitted.new} == {"0", "2"}
    assert fitted.weights["layers.0.block.mlp.w_up.weight"] is weights["layers.0.mlp.w_up.weight"]


def test_new_predictors_keep_every_token_and_the_model_is_the_dense_one() -> None:
    dense = make_config("dense")
    changes: dict[str, Any] = {"routing.gate": "tanh1", "routing.init_std": 0.0}
    routed = make_config("mod", **changes)
    weights = make_weights(dense)
    fitted = fit_weights(routed, weights, "here").weights
    tokens = torch.randint(64, (2, 16))
    wanted = build_model(dense, weights, "here")(tokens).logits
    found = build_model(routed, fitted, "here")
    torch.testing.assert_close(found(tokens, selector="predictor").logits, wanted)
    assert not torch.allclose(found(tokens).logits, wanted)


def test_new_routers_are_drawn_by_the_seed() -> None:
    dense, routed = make_config("dense"), make_config("mod")
    name = "layers.1.decider.router.weight"
    drawn = [fit_weights(routed, make_weights(dense), "", seed).weights[name] for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert 0 < drawn[0].std() < 0.1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 64, "mlp_width": 64}, "only fields of routing may be changed"),
        ({"num_layers": 2}, "here has 'layers.2"),
        ({"num_layers": 6}, "here has no 'layers.4"),
        ({"mlp": "gelu"}, "here has 'layers.0.mlp.w_gate.weight'"),
        ({"qk_norm": True}, "here has no 'layers.0.attention.norm_query.weight'"),
    ],
    ids=str,
)
def test_another_model_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    weights = make_weights(make_config("dense", num_layers=4))
    with pytest.raises(ValueError, match=told):
        fit_weights(make_config("mod", **{"num_layers": 4, **changes}), weights, "here")


def test_heads_are_tied_only_where_they_are_the_same() -> None:
    tied, untied = make_config("dense"), make_config("dense", tied_head=False)
    weights = make_weights(tied)
    both = fit_weights(untied, weights, "here").weights
    assert torch.equal(both["head.weight"], both["embedding.weight"])
    assert "head.weight" not in fit_weights(tied, both, "here").weights
    both["head.weight"] = both["head.weight"] + 1
    with pytest.raises(ValueError, match="a head of its own"):
        fit_weights(tied, both, "here")
