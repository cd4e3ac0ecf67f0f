"""Which parameter is trained how: groups, rates by width, and the rate of a step."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from depthmix.config import Recipe
from depthmix.nn import Transformer
from depthmix.nn.experts import Experts
from depthmix.nn.router import Predictor, Router
from depthmix.train.muon import Muon
from depthmix.train.optim import group_parameters, make_optimizers, set_rates
from depthmix.train.step import TrainStep
from variants import NAMES, make_config, make_tokens


def make_small(name: str = "mod", **overrides: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(make_config(name, **overrides))


def name_groups(model: Transformer) -> dict[str, str]:
    """Every parameter's name → its group."""
    found = {id(p): group for group, params in group_parameters(model).items() for p in params}
    return {name: found[id(p)] for name, p in model.named_parameters()}


def list_groups(optimizers: list[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def find_group(optimizers: list[Optimizer], parameter: Tensor) -> dict[str, Any]:
    """The one group that a parameter is in."""
    groups = list_groups(optimizers)
    (group,) = [g for g in groups if any(p is parameter for p in g["params"])]
    return group


def step_once(model: Transformer, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """A step from gradients of all sizes; every parameter as it was before."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    return before


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_one_group(name: str) -> None:
    model = make_small(name)
    grouped = [id(p) for params in group_parameters(model).values() for p in params]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    for optimizer in ("adamw", "muon"):
        groups = list_groups(make_optimizers(model, Recipe(optimizer=optimizer)))
        trained = [id(p) for group in groups for p in group["params"]]
        assert sorted(trained) == sorted(grouped)
        assert all(group["params"] for group in groups)


@pytest.mark.parametrize("name", NAMES)
def test_groups_have_the_parameters_that_they_name(name: str) -> None:
    """The truth by module: who owns a parameter says how it is trained."""
    model = make_small(name)
    expected = {}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{own}".removeprefix(".")
            if any(isinstance(model.get_submodule(p), Router | Predictor) for p in parents(path)):
                expected[full] = "deciders" if parameter.ndim == 2 else "thresholds"
            elif path == "ngrams.rows":
                expected[full] = "tables"
            elif path == "head" and not model.config.tied_head:
                expected[full] = "heads"
            elif isinstance(module, nn.Linear | Experts) and path != "head" and own != "bias":
                expected[full] = "matrices"
            elif path != "head":
                expected[full] = "others"
    assert name_groups(model) == expected


def parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def test_a_tied_head_is_the_embedding_and_counts_once() -> None:
    model = make_small("mod")
    assert model.head.weight is model.embedding.weight
    assert name_groups(model)["embedding.weight"] == "others"
    assert "head.weight" not in name_groups(model)
    assert sum(p is model.head.weight for p in group_parameters(model)["others"]) == 1


def test_stacks_of_experts_are_matrices() -> None:
    model = make_small("mode_staged")
    stacks = [p for p in group_parameters(model)["matrices"] if p.ndim == 3]
    assert len(stacks) == 2 * len(model.config.expert_layers)


def test_tables_have_their_own_rate_and_no_decay() -> None:
    model = make_small("mod_memory")
    assert model.ngrams is not None
    recipe = Recipe(learning_rate=1e-3, warmup_share=0.0, schedule="constant")
    recipe = replace(recipe, memory_rate_factor=7.0, weight_decay=0.3)
    optimizers = make_optimizers(model, recipe)
    set_rates(optimizers, recipe, 5, 10)
    group = find_group(optimizers, model.ngrams.rows.weight)
    assert group["lr"] == pytest.approx(7e-3)
    assert group["weight_decay"] == 0
    assert find_group(optimizers, model.embedding.weight)["lr"] == 1e-3


def test_routers_may_learn_faster() -> None:
    model = make_small("mod")
    rates = {}
    for factor in (1.0, 10.0):
        recipe = Recipe(
            learning_rate=1e-3, warmup_share=0.0, schedule="constant", router_rate_factor=factor
        )
        optimizers = make_optimizers(model, recipe)
        set_rates(optimizers, recipe, 5, 10)
        rates[factor] = {
            name: find_group(optimizers, p)["lr"] for name, p in model.named_parameters()
        }
    for name, rate in rates[1.0].items():
        decides = ".router." in name or ".predictor." in name
        assert rates[10.0][name] == pytest.approx(10 * rate if decides else rate), name
    bias = next(name for name in rates[1.0] if name.endswith("predictor.w_out.bias"))
    # a threshold is not summed over the width
    assert rates[1.0][bias] == 1e-3


@pytest.mark.parametrize("width", [32, 256, 1024])
def test_rates_fall_with_the_width(width: int) -> None:
    model = make_small("dense_mha_qk_norm_untied", width=width, num_layers=1)
    fields: Any = {"warmup_share": 0.0, "schedule": "constant", "optimizer": "adamw"}
    recipe = Recipe(learning_rate=1e-3, **fields)
    optimizers = make_optimizers(model, recipe)
    assert set_rates(optimizers, recipe, 5, 10) == 1e-3
    for name in ("layers.0.mlp.w_out.weight", "head.weight"):
        group = find_group(optimizers, model.get_parameter(name))
        assert group["lr"] == pytest.approx(1e-3 * 32 / width)
    for name in ("embedding.weight", "norm.weight", "layers.0.norm_mlp.weight"):
        assert find_group(optimizers, model.get_parameter(name))["lr"] == 1e-3


def test_routers_follow_the_width_and_do_not_decay() -> None:
    model = make_small("mod", width=64)
    optimizers = make_optimizers(model, Recipe(optimizer="adamw", weight_decay=0.3))
    expected = {
        "layers.1.decider.router.weight": (0.5, 0.0),
        "layers.1.decider.predictor.w_in.weight": (0.5, 0.0),
        "layers.1.decider.predictor.w_out.weight": (0.5, 0.0),
        "layers.1.decider.predictor.w_out.bias": (1.0, 0.0),
        "layers.1.block.attention.w_out.weight": (0.5, 0.3),
        "embedding.weight": (1.0, 0.0),
    }
    for name, settings in expected.items():
        group = find_group(optimizers, model.get_parameter(name))
        assert (group["scale"], group["weight_decay"]) == settings, name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_width_can_be_left_out_of_it(optimizer: Any) -> None:
    optimizers = make_optimizers(make_small(), Recipe(scale_by_width=False, optimizer=optimizer))
    assert {group["scale"] for group in list_groups(optimizers)} == {1.0}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_set_rates_follows_the_schedule(optimizer: Any) -> None:
    recipe = Recipe(optimizer=optimizer, learning_rate=0.01, warmup_share=0.5, final_rate_share=0.2)
    optimizers = make_optimizers(make_small(), recipe)
    for step in range(10):
        rate = set_rates(optimizers, recipe, step, 10)
        assert rate == 0.01 * recipe.rate_at(step, 10)
        for group in list_groups(optimizers):
            assert group["lr"] == pytest.approx(rate * group["scale"])
    assert rate == 0.01 * 0.2


def test_a_step_is_adamw_written_out() -> None:
    model = make_small("mod", width=64).double()
    fields: Any = {"warmup_share": 0.0, "schedule": "constant", "optimizer": "adamw"}
    recipe = Recipe(learning_rate=0.01, weight_decay=0.5, **fields)
    optimizers = make_optimizers(model, recipe)
    groups = name_groups(model)
    set_rates(optimizers, recipe, 0, 10)
    before = step_once(model, optimizers)
    for name, parameter in model.named_parameters():
        grad, group = parameter.grad, groups[name]
        assert grad is not None
        rate = 0.01 * (1 if group in ("others", "thresholds") else 32 / 64)
        kept = 1 - rate * (0.5 if group == "matrices" else 0)
        # the first step's two means are the gradient and its square
        expected = before[name] * kept - rate * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_both_memories_are_the_recipes() -> None:
    (adamw,) = make_optimizers(make_small(), Recipe(optimizer="adamw", beta1=0.8, beta2=0.6))
    assert all(group["betas"] == (0.8, 0.6) for group in adamw.param_groups)


@pytest.mark.parametrize("name", ["dense", "mod", "mode_staged", "moe_gelu_every_2"])
def test_muon_takes_the_blocks_matrices(name: str) -> None:
    model = make_small(name)
    muon, adamw = make_optimizers(model, Recipe(optimizer="muon", weight_decay=0.3))
    assert isinstance(muon, Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    expected = group_parameters(model)["matrices"]
    assert any(p.ndim == 3 for p in expected) == bool(model.config.expert_layers)
    (group,) = muon.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in expected]
    assert (group["weight_decay"], group["scale"]) == (0.3, math.sqrt(8))


def test_muons_update_is_orthogonal_and_of_adamws_size() -> None:
    model = make_small("dense", width=64)
    recipe = Recipe(optimizer="muon", learning_rate=0.01, weight_decay=0.0, scale_by_width=False)
    optimizers = make_optimizers(model, recipe)
    set_rates(optimizers, recipe, 0, 10)
    before = step_once(model, optimizers)
    name = "layers.0.attention.w_out.weight"
    weight = model.get_parameter(name)
    update = (before[name] - weight.detach()) / 0.01
    # its singular values are about one before it is brought to the root mean square 0.2
    spread = torch.linalg.svdvals(update / (0.2 * math.sqrt(max(weight.shape))))
    assert spread.min() > 0.2
    assert spread.max() < 1.5
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_capturable_rates_are_tensors_that_stay() -> None:
    recipe = Recipe(learning_rate=0.01)
    optimizers = make_optimizers(make_small(), recipe, capturable=True)
    rates = [group["lr"] for group in list_groups(optimizers)]
    assert all(isinstance(rate, Tensor) for rate in rates)
    assert len({id(rate) for rate in rates}) == len(rates)
    for step in (0, 7):
        unscaled = set_rates(optimizers, recipe, step, 10)
        assert isinstance(unscaled, float)
        for group, rate in zip(list_groups(optimizers), rates, strict=True):
            # a recorded step reads this memory
            assert group["lr"] is rate
            assert rate.item() == pytest.approx(unscaled * group["scale"])


def test_rates_that_are_not_captured_are_numbers() -> None:
    optimizers = make_optimizers(make_small(), Recipe())
    set_rates(optimizers, Recipe(), 3, 10)
    assert all(isinstance(group["lr"], float) for group in list_groups(optimizers))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(optimizer: Any) -> None:
    model = make_small("mode_staged")
    recipe = Recipe(optimizer=optimizer, learning_rate=2e-3)
    optimizers = make_optimizers(model, recipe)
    step, tokens = TrainStep(model, optimizers), make_tokens(model.config, 4, 17)
    losses = []
    for number in range(12):
        set_rates(optimizers, recipe, number, 12)
        losses.append(step(tokens[:, :-1], tokens[:, 1:]).language_model.item())
    assert losses[-1] < losses[0] - 0.4


def test_saved_state_is_restored_into_new_optimisers() -> None:
    model = make_small()
    twin = copy.deepcopy(model)
    recipe = Recipe(optimizer="muon")
    optimizers, others = make_optimizers(model, recipe), make_optimizers(twin, recipe)
    set_rates(optimizers, recipe, 0, 10)
    step_once(model, optimizers)
    twin.load_state_dict(model.state_dict())
    for old, new in zip(optimizers, others, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    for ours, theirs in ((model, optimizers), (twin, others)):
        torch.manual_seed(1)
        set_rates(theirs, recipe, 1, 10)
        step_once(ours, theirs)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
