"""The stack: capacity 1 is the dense model, weights come and go, mistakes are refused."""

import copy
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from depthmix.config import ModelConfig, load_preset
from depthmix.nn import Cache, MixtureOfDepths, Transformer, attention
from depthmix.nn.attention import attend
from depthmix.nn.transformer import EMBEDDING_STD, count_positions
from variants import (
    NAMES,
    gradients_of,
    loss_of,
    make_config,
    make_model,
    make_tokens,
    pad_rows,
    routes_deterministically,
)

ROUTED = [name for name in NAMES if make_config(name).routed_layers]


def name_in_dense(name: str) -> str | None:
    """A routed model's parameter in its dense twin; None for its routers and bypasses."""
    is_routing = "decider." in name or ".bypass." in name
    return None if is_routing else name.replace(".block.", ".")


def make_twins(config: ModelConfig) -> tuple[Transformer, Transformer]:
    """A routed model and a dense one with the same weights."""
    routed, dense = make_model(config), Transformer(config.dense_twin()).double()
    weights = {name_in_dense(name): value for name, value in routed.state_dict().items()}
    # the tables of a bypass
    if dense.ngrams is None:
        weights.pop("ngrams.rows.weight", None)
    dense.load_state_dict({name: value for name, value in weights.items() if name is not None})
    return routed, dense


def check_twins(routed: Transformer, dense: Transformer, **options: Any) -> None:
    tokens = make_tokens(routed.config, 2, 12)
    found = routed(tokens, **options)
    # experts decide as they would for this selector; depth has nothing to decide
    expected = dense(tokens, **options)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-10)
    loss_of(found.logits).backward()
    loss_of(expected.logits).backward()
    truth = gradients_of(dense)
    compared = 0
    for name, grad in gradients_of(routed).items():
        other = name_in_dense(name)
        if other is None or other not in truth:
            # a bypass is computed for every token, and added to none
            assert grad is None or not grad.any(), name
        elif truth[other] is not None:
            torch.testing.assert_close(grad, truth[other], rtol=1e-9, atol=1e-9, msg=name)
            compared += 1
    assert compared > 10
    assert len(found.expert_routings) == len(expected.expert_routings)
    for ours, theirs in zip(found.expert_routings, expected.expert_routings, strict=True):
        assert torch.equal(ours.kept, theirs.kept)


FULL = {"routing.gate": "unit", "routing.capacity": 1.0}


@pytest.mark.parametrize(
    "name", [n for n in ROUTED if make_config(n).routing.strategy not in ("token_choice", "causal")]
)
def test_capacity_one_with_a_unit_gate_is_the_dense_model(name: str) -> None:
    decoupled = make_config(name).routing.kv_capacity is not None
    offered = {"routing.kv_capacity": 1.0} if decoupled else {}
    check_twins(*make_twins(make_config(name, **FULL, **offered)))


@pytest.mark.parametrize("name", ROUTED)
def test_selector_all_with_a_unit_gate_is_the_dense_model(name: str) -> None:
    config = make_config(name, **{"routing.gate": "unit"})
    check_twins(*make_twins(config), selector="all")


def test_a_zero_router_with_gate_tanh1_is_the_dense_model() -> None:
    """How a dense checkpoint is converted: scores start at 0, where the gate is 1."""
    config = make_config("mod_tanh1", **{"routing.capacity": 1.0})
    routed, dense = make_twins(config)
    for layer in routed.layers:
        if isinstance(layer, MixtureOfDepths):
            torch.nn.init.zeros_(layer.decider.router.weight)
    tokens = make_tokens(config, 2, 12)
    torch.testing.assert_close(routed(tokens).logits, dense(tokens).logits, rtol=0, atol=1e-10)


def test_the_dense_comparison_detects_a_difference() -> None:
    for change in ({"routing.capacity": 0.9}, {"routing.gate": "sigmoid"}):
        routed, dense = make_twins(make_config("mod", **{**FULL, **change}))
        tokens = make_tokens(routed.config, 2, 12)
        assert not torch.allclose(routed(tokens).logits, dense(tokens).logits, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_output_and_its_parts(name: str) -> None:
    config = make_config(name)
    model, tokens = make_model(config), make_tokens(config, 3, 12)
    torch.manual_seed(3)
    output = model(tokens)
    assert output.logits.shape == (3, 12, config.vocab_size)
    assert len(output.routings) == len(config.routed_layers)
    assert len(output.expert_routings) == len(config.expert_layers)
    for routing, capacity in zip(output.routings, config.capacities, strict=True):
        assert routing.index.shape == (3, -(-12 * capacity // 1))
        assert (routing.predictor_logits is not None) == config.routing.has_predictor
        assert (routing.target is not None) == config.routing.has_target
        assert (routing.memory is not None) == (config.routing.kv_capacity is not None)
    torch.manual_seed(3)
    hidden = model.compute_hidden(tokens).hidden
    torch.testing.assert_close(model.head(hidden), output.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_language_model_loss_reaches_all_but_predictors(name: str) -> None:
    """Every parameter gets a gradient, but for predictors and for routers behind a unit gate."""
    config = make_config(name)
    model = make_model(config)
    loss_of(model(make_tokens(config, 4, 24)).logits).backward()
    for parameter_name, grad in gradients_of(model).items():
        silent = "predictor" in parameter_name or (
            config.routing.gate == "unit" and "decider.router" in parameter_name
        )
        if silent:
            assert grad is None, parameter_name
        else:
            assert grad is not None, parameter_name
            assert grad.isfinite().all(), parameter_name
            assert grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name: str) -> None:
    config = make_config(name)
    model, other, tokens = make_model(config), make_model(config, seed=9), make_tokens(config, 2, 9)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.manual_seed(0)
    expected = model(tokens).logits
    torch.manual_seed(0)
    assert torch.equal(other(tokens).logits, expected)
    # what can be computed from the configuration is not in it
    assert "phase_table" not in model.state_dict()


@pytest.mark.parametrize("name", ["mod", "dense_mha_qk_norm_untied", "mod_kv", "mode_staged"])
def test_meta_model_can_be_initialised(name: str) -> None:
    config = make_config(name)
    with torch.device("meta"):
        model = Transformer(config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    torch.manual_seed(4)
    model.init_weights()
    torch.manual_seed(4)
    expected = Transformer(config)
    torch.manual_seed(4)
    expected.init_weights()
    assert (model.head.weight is model.embedding.weight) == config.tied_head
    assert len(list(model.parameters())) == len(list(expected.parameters()))
    assert torch.equal(model.phase_table, expected.phase_table)
    for (found_name, found), (name, truth) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert found_name == name
        assert torch.equal(found, truth), name


def test_initial_scales() -> None:
    config = load_preset(
        "tiny", width=256, **{"experts.strategy": "expert_choice", "experts.every": 2}
    )
    model = Transformer(config)

    def std(name: str) -> float:
        return model.get_parameter(name).std().item()

    # what all branches add together is as large as what they add to
    out_scale = EMBEDDING_STD * (2 * config.num_layers) ** -0.5
    assert std("embedding.weight") == pytest.approx(EMBEDDING_STD, rel=0.05)
    assert std("layers.0.attention.w_qk.weight") == pytest.approx(256**-0.5, rel=0.05)
    assert std("layers.0.attention.w_out.weight") == pytest.approx(out_scale / 16, rel=0.05)
    assert std("layers.0.mlp.w_out.weight") == pytest.approx(
        out_scale * config.shape.mlp_width**-0.5, rel=0.05
    )
    assert std("layers.1.block.mlp.w_in") == pytest.approx(256**-0.5, rel=0.05)
    assert std("layers.1.block.mlp.w_out") == pytest.approx(
        out_scale * config.shape.expert_width**-0.5, rel=0.05
    )
    assert std("layers.1.decider.router.weight") == pytest.approx(config.routing.init_std, rel=0.3)
    assert torch.equal(model.norm.weight, torch.ones(256))
    predictor_bias = model.get_parameter("layers.1.decider.predictor.w_out.bias")
    assert torch.equal(predictor_bias, torch.zeros(1))
    untied = Transformer(make_config("dense_mha_qk_norm_untied"))
    assert untied.head.weight.std().item() == pytest.approx(EMBEDDING_STD, rel=0.1)
    zero = Transformer(make_config("mod", **{"routing.init_std": 0.0}))
    assert not zero.get_parameter("layers.1.decider.router.weight").any()


@pytest.mark.parametrize("selector", [None, "topk", "router", "predictor"])
def test_early_exit_sets_nest_through_the_stack(selector: str | None) -> None:
    """Who leaves does not come back, block after block, in padded rows too."""
    model = make_model("early_exit")
    tokens, documents = pad_rows(
        [make_tokens(model.config, n, seed=n) for n in (40, 25, 33)], "left"
    )
    routings = model(tokens, selector=selector, document_ids=documents).routings
    inside = [routing.slot >= 0 for routing in routings]
    assert len(inside) == 4
    for before, after in pairwise(inside):
        assert not (after & ~before).any()
    assert 0 < inside[-1].sum() < inside[0].sum()


@pytest.mark.parametrize("selector", [None, "predictor"])
def test_tokens_that_exit_pass_no_later_block(selector: str | None) -> None:
    model = make_model(make_config("early_exit", **{"routing.first_dense": 1, "num_layers": 5}))
    after: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _m, _i, out: after.append(out[0]))
    routings = model(make_tokens(model.config, 2, 16), selector=selector).routings
    assert len(routings) == 4
    for number, routing in enumerate(routings[:-1]):
        left = routing.slot < 0
        assert 0 < left.sum() < left.numel()
        assert torch.equal(after[-1][left], after[1 + number][left])


def test_head_is_tied_or_not() -> None:
    tied, untied = make_model("mod"), make_model("mod_gelu_mqa_untied")
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


def test_positions_count_inside_documents() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2], [-1, -1, 4, 4, -1, -1], [7, 7, 7, 7, 7, 7]])
    assert count_positions(ids).tolist() == [
        [0, 1, 2, 0, 1, 0],
        [0, 1, 0, 1, 0, 1],
        [0, 1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize("name", [n for n in NAMES if routes_deterministically(n)])
def test_explicit_positions_equal_the_default_ones(name: str) -> None:
    config = make_config(name)
    model, tokens = make_model(config), make_tokens(config, 2, 12)
    expected = model(tokens).logits
    positions = torch.arange(12).expand(2, -1)
    documents = torch.full((2, 12), 3)
    for options in (
        {"positions": positions},
        {"document_ids": documents},
        {"positions": positions, "document_ids": documents},
    ):
        found = model(tokens, **options).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_only_relative_positions_matter() -> None:
    config = make_config("mod")
    model, tokens = make_model(config), make_tokens(config, 2, 12)
    expected = model(tokens).logits
    shifted = model(tokens, positions=torch.arange(20, 32).expand(2, -1)).logits
    # the table of phases is rounded to float32
    torch.testing.assert_close(shifted, expected, rtol=0, atol=1e-4)
    stretched = model(tokens, positions=torch.arange(0, 24, 2).expand(2, -1)).logits
    assert not torch.allclose(stretched, expected, atol=1e-2)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"\(batch, tokens\), not \(3,\)"),
        (torch.zeros(1, 0, dtype=torch.long), r"\(batch, tokens\), not \(1, 0\)"),
        (torch.zeros(1, 65, dtype=torch.long), "65 tokens are more than max_seq_len = 64"),
    ],
)
def test_wrong_tokens_are_refused(tokens: Tensor, message: str) -> None:
    model = make_model("mod")
    with pytest.raises(ValueError, match=message):
        model._check(tokens, None, None, None)


def test_wrong_options_are_refused() -> None:
    model, tokens = make_model("mod_aux"), make_tokens(make_config("mod_aux"), 2, 5)
    with pytest.raises(ValueError, match=r"document_ids are \(2, 4\), tokens \(2, 5\)"):
        model._check(tokens, None, torch.zeros(2, 4), None)
    with pytest.raises(ValueError, match="unknown selector 'top-k'"):
        model(tokens, selector="top-k")
    with pytest.raises(ValueError, match=r"routing\.predictor = true"):
        model(tokens, selector="predictor")
    with pytest.raises(ValueError, match="selector 'predictor', 'router' or 'all'"):
        model(tokens, cache=Cache(model.config, 2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="does not hold the future"):
        model(tokens, selector="topk", cache=Cache(model.config, 2, 8, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_bf16_model_runs(name: str) -> None:
    config = make_config(name)
    model, (tokens, documents) = (
        make_model(config, dtype=torch.bfloat16),
        pad_rows([make_tokens(config, 12), make_tokens(config, 5)], "left"),
    )
    output = model(tokens, document_ids=documents)
    assert output.logits.dtype == torch.bfloat16
    assert output.logits[documents >= 0].isfinite().all()
    for routing in output.routings:
        assert routing.logits.dtype == routing.weight.dtype == torch.float32
    for expert_routing in output.expert_routings:
        assert expert_routing.logits.dtype == torch.float32
    loss_of(output.logits).backward()
    assert all(g is None or g.isfinite().all() for g in gradients_of(model).values())


def test_capacities_can_be_set() -> None:
    model = Transformer(make_config("mod", max_seq_len=16, **{"routing.capacity": 0.25}))
    tokens = torch.randint(64, (2, 16))
    for capacities in ((1.0, 0.75), (0.5, 0.25)):
        model.set_capacities(capacities)
        kept = [routing.index.shape[1] for routing in model(tokens).routings]
        assert kept == [16 * capacity for capacity in capacities]
    with pytest.raises(ValueError, match="shorter"):
        model.set_capacities((0.5,))


def test_residual_mix_by_hand() -> None:
    """Every token's stream is mixed, also of those that a routed block does not take."""
    config = make_config("mod_mix_values", value_embedding=False)
    model, plain = make_model(config), make_model("mod")
    tokens = make_tokens(config, 2, 12)
    assert model.mix is not None
    fresh = Transformer(config).double()
    assert fresh.mix is not None
    assert torch.equal(fresh.mix, torch.tensor([[1.0, 0.0]] * 4).double())
    x0 = x = model.embedding(tokens)
    place, _ = model._place(tokens, None, None, None)
    for (a, b), layer in zip(model.mix.tolist(), model.layers, strict=True):
        x = a * x + b * x0
        x = layer(x, place)[0] if isinstance(layer, MixtureOfDepths) else x + layer(x, place).update
    torch.testing.assert_close(model(tokens).logits, model.head(model.norm(x)))
    # as it starts, it changes nothing
    plain.load_state_dict({n: v for n, v in model.state_dict().items() if n != "mix"})
    assert not torch.allclose(plain(tokens).logits, model(tokens).logits)
    torch.nn.init.zeros_(model.mix)
    model.mix.data[:, 0] = 1
    torch.testing.assert_close(plain(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("kv_capacity", [None, 0.5])
def test_value_embeddings_are_added(kv_capacity: float | None) -> None:
    """A block's values are W·x plus a scaled row of the table, whichever tokens they are of."""
    config = make_config(
        "mod_mix_values", residual_mix=False, **{"routing.kv_capacity": kv_capacity}
    )
    model, tokens = make_model(config), make_tokens(config, 2, 12)
    assert model.value_embedding is not None
    table = model.value_embedding.weight
    expected: list[Tensor] = []
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, attention.Attention):
            assert module.value_scale is not None
            module.value_scale.data.fill_(0.7)
            module.w_value.register_forward_hook(lambda _m, _i, out: expected.append(out))
    with patch.object(
        attention, "attend", lambda q, k, v, m: found.append(v) or attend(q, k, v, m)
    ):
        routings = iter(model(tokens).routings)
    for layer, plain, value in zip(model.layers, expected, found, strict=True):
        rows, gate = table[tokens], torch.ones(())
        if isinstance(layer, MixtureOfDepths):
            routing = next(routings)
            offering = routing.memory or routing
            rows = table[tokens.gather(1, offering.index)]
            gate = torch.ones(()) if routing.memory is None else offering.weight[:, :, None]
        torch.testing.assert_close(value.flatten(2), (plain + 0.7 * rows) * gate)
