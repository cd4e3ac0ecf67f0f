"""A plan's file is checked, and expanded: how many runs, their names, steps, and all problems."""

import dataclasses
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthmix import flops
from depthmix.budget import make_schedule
from depthmix.sweep.plan import (
    PlannedRun,
    expand_plan,
    format_budget,
    load_plan,
    plan_names,
    read_plan,
)
from toy_sweeps import TREE


def test_dotted_fields_seeds_and_defaults(tree: dict[str, Any]) -> None:
    tree["sizes"] = [
        {"width": 32, "seeds": [0, 1, 2], "variants": ["mod"]},
        {"width": 64, "name": "wide", "routing": {"capacity": [0.5, 0.25]}, "budgets": [4e9]},
    ]
    plan = read_plan({**tree, "budgets": [1e9, 4e9], "seeds": [7]})
    assert plan.common == {"train.batch_size": 2}
    assert plan.variants["dense"] == {"routing.strategy": "none"}
    first, second = plan.sizes
    assert first == ({"width": 32}, None, ("mod",), (1e9, 4e9), (0, 1, 2))
    fields = {"width": 64, "routing.capacity": [0.5, 0.25]}
    assert second == (fields, "wide", ("dense", "mod"), (4e9,), (7,))


def test_fields_by_their_old_names(tree: dict[str, Any]) -> None:
    tree["common"] = {"train": {"batch_size": 2, "clip": 2.0}}
    tree["scale"] = {"smoke": {"common": {"train.max_grad_norm": 3.0}}}
    tree["variants"]["mod"]["train"] = {"warmup": 0.5}
    tree["sizes"] = [{"width": 32, "train": {"accumulate": 2}}]
    plan = read_plan(tree)
    # the scale's word goes before the top's, by whatever name
    assert plan.common == {"train.batch_size": 2, "train.max_grad_norm": 3.0}
    assert plan.variants["mod"]["train.warmup_share"] == 0.5
    assert plan.sizes[0].fields == {"width": 32, "train.num_micro_batches": 2}


def test_scale_overrides_top_level(tree: dict[str, Any]) -> None:
    small = {"budgets": [1e8], "common": {"train": {"seq_len": 8}}, "vocab_size": 512}
    small |= {"tflops": 1}
    tree["scale"] = {"gpu": {"seeds": [0, 1]}, "smoke": small}
    plan = read_plan(tree)
    assert (plan.scale, plan.budgets, plan.sizes[0].seeds) == ("smoke", (1e8,), (0,))
    assert plan.common == {"train.batch_size": 2, "train.seq_len": 8}
    assert (plan.vocab_size, plan.tflops) == (512, 1.0)
    other = read_plan(tree, "gpu")
    assert (other.scale, other.budgets, other.sizes[0].seeds) == ("gpu", (1e9,), (0, 1))
    assert other.common == {"train.batch_size": 2}
    assert (other.vocab_size, other.tflops) == (None, None)
    del tree["scale"]["smoke"]
    assert read_plan(tree).scale == "gpu"


def test_files_are_looked_for_beside_the_plan(tmp_path: Path) -> None:
    text = (
        'preset = "my.toml"\ndata = "corpus"\nbudgets = 1e9\n[variants.a]\n[[sizes]]\nwidth = 8\n'
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    plan = load_plan(str(path))
    assert plan.name == "mine"
    assert plan.preset == str(tmp_path / "my.toml")
    assert plan.data == str(tmp_path / "corpus")
    assert plan.variants == {"a": {}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"budget": [1e9]}, "a plan has no 'budget'. Did you mean 'budgets'?"),
        ({"scale": {"smoke": {"size": []}}}, "a scale has no 'size'. Did you mean 'sizes'?"),
        ({"scale": {"gpu": 3}}, "gpu must be a table of fields"),
        ({"variants": {}}, "a plan needs variants"),
        ({"variants": {"a/b": {}}}, "'a/b' names a folder"),
        ({"name": ".."}, "'..' names a folder"),
        ({"name": 3}, "name = 3 must be text"),
        ({"budgets": []}, "budgets must be FLOPs greater than 0"),
        ({"budgets": [0]}, "budgets must be FLOPs greater than 0"),
        ({"budgets": [float("inf")]}, "budgets must be FLOPs greater than 0"),
        ({"budgets": True}, "budgets must be FLOPs greater than 0"),
        ({"seeds": 3}, "seeds = 3 must be a list of seeds"),
        ({"seeds": [0.5]}, "must be a list of seeds, such as [0, 1, 2]"),
        ({"seeds": []}, "must be a list of seeds"),
        ({"sizes": []}, "sizes must be a list of tables"),
        ({"sizes": [3]}, "sizes must be a list of tables"),
        ({"sizes": [{"variants": ["mode"]}]}, "names the variant 'mode'. Did you mean 'mod'?"),
        ({"vocab_size": 0}, "vocab_size = 0 must be a number of ids"),
        ({"tflops": 0}, "tflops = 0 must be TFLOP/s greater than 0"),
        ({"tflops": "fast"}, "tflops = 'fast' must be TFLOP/s greater than 0"),
        ({"vocab_size": "512"}, "vocab_size = '512' must be a number of ids"),
        ({"sizes": [{"budgets": [2e9]}]}, "names the budget 2e9, which is none of 1e9"),
    ],
)
def test_mistakes(tree: dict[str, Any], change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the sentence is compared)
        read_plan({**tree, **change})
    assert sentence in str(caught.value)


def test_unknown_scales(tree: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one size only: leave out --size gpu"):
        read_plan(tree, "gpu")
    tree["scale"] = {"smoke": {}, "gpu": {}}
    with pytest.raises(ValueError, match="no --size cpu: use smoke or gpu"):
        read_plan(tree, "cpu")


def test_plans_by_name(tmp_path: Path) -> None:
    names = ["capacity-frequency", "controls", "experts", "isoflop", "knobs", "memory"]
    names += ["placement", "replication", "shapes"]
    assert plan_names() == names
    with pytest.raises(ValueError, match=r"no plan 'isoflops'\. Did you mean 'isoflop'"):
        load_plan("isoflops")
    with pytest.raises(ValueError, match=r"cannot read 'nowhere\.toml': No such file"):
        load_plan("nowhere.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ValueError, match=r"bad\.toml': this is not valid TOML"):
        load_plan(str(tmp_path / "bad.toml"))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        load_plan(str(tmp_path / "latin.toml"))


def test_budgets_are_formatted_as_folders() -> None:
    budgets = (1e15, 4e15, 1.6e16, 6, 123456789)
    assert [format_budget(b) for b in budgets] == ["1e15", "4e15", "1.6e16", "6e0", "1.23456789e8"]


def test_runs_are_named_by_budget_variant_size_and_seed(tree: dict[str, Any]) -> None:
    sizes = [{"width": 32, "num_layers": 2, "seeds": [0, 1], "variants": ["mod"]}, {"name": "own"}]
    runs = expand_plan(read_plan({**tree, "budgets": [1e9, 1.6e9], "sizes": sizes}))
    assert [run.name for run in runs] == [
        f"toy/{budget}/{rest}"
        for budget in ("1e9", "1.6e9")
        for rest in ("dense/own-s0", "mod/w32-l2-s0", "mod/w32-l2-s1", "mod/own-s0")
    ]
    assert runs[2].folder == "1e9/mod/w32-l2-s1"
    assert [run.config.train.seed for run in runs[:4]] == [0, 0, 1, 0]
    assert runs[0].config.model.routed_layers == ()
    assert runs[1].config.model.routed_layers == (1,)


@settings(max_examples=30)
@given(budget=st.floats(5e8, 1e13), width=st.sampled_from([16, 32, 64]), batch=st.integers(1, 4))
def test_steps_spend_the_budget(budget: float, width: int, batch: int) -> None:
    tree = {**TREE, "budgets": [budget], "sizes": [{"width": width, "num_layers": 2}]}
    for run in expand_plan(read_plan(tree), {"train.batch_size": batch}):
        model = run.config.model
        step = flops.executed_flops(model, "muon", seq_len=model.max_seq_len, batch_size=batch)
        assert run.num_steps == make_schedule(run.config).num_steps >= 1
        assert run.flops == run.num_steps * step <= budget < run.flops + step
        assert run.num_parameters == flops.num_parameters(model).total


def test_precedence_of_fields(tree: dict[str, Any]) -> None:
    tree |= {"common": {"width": 16, "train": {"max_grad_norm": 2.0}}, "sizes": [{"num_layers": 2}]}
    tree["variants"] = {"a": {"width": 32}}
    plan = read_plan(tree)
    (run,) = expand_plan(plan)
    assert (run.config.model.width, run.config.train.max_grad_norm) == (32, 2.0)
    assert run.config.model.vocab_size == 256
    (run,) = expand_plan(plan, {"width": "64", "train.max_grad_norm": "3"}, vocab_size=300)
    assert (run.config.model.width, run.config.train.max_grad_norm) == (64, 3.0)
    assert run.config.model.vocab_size == 300
    assert run.name.endswith("w64-l2-s0")
    (run,) = expand_plan(plan, {"vocab_size": 512}, vocab_size=300)
    assert run.config.model.vocab_size == 512


def test_all_problems_are_reported_together(tree: dict[str, Any]) -> None:
    tree["variants"]["wrong"] = {"routing": {"capacity": 2}}
    tree["sizes"] = [
        {"width": 33, "num_layers": 2},
        {"width": 32, "num_layers": 2, "seeds": [0, 1]},
    ]
    with pytest.raises(ValueError, match="this plan has") as caught:
        expand_plan(read_plan(tree))
    head, *lines = str(caught.value).splitlines()
    assert head == "this plan has 2 problems, so nothing was started:"
    # the first of a kind stands for all of it, and a run's seeds have the same problem
    assert lines[0].startswith("  toy/1e9/dense/w33-l2 and 1 more: num_heads = 4 does not divide")
    assert lines[1].startswith("  toy/1e9/wrong/w33-l2 and 1 more: routing.capacity = 2.0 must")
    assert len(lines) == 2


def test_a_plan_without_runs_is_refused(tree: dict[str, Any]) -> None:
    tree["sizes"] = [{"width": 32, "variants": []}]
    with pytest.raises(ValueError, match="the plan has no runs"):
        expand_plan(read_plan(tree))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"train.seed": 1}, "train.seed is set by the plan's seeds: leave it out"),
        ({"train.flops": 1e9}, "train.flops is set by the plan's budgets"),
        ({"train.steps": 3}, "a run has one budget, steps, tokens or flops"),
        ({"widht": 3}, "no configuration field 'widht'"),
        ({"train.batch_size": 1000}, "is less than one step"),
        # both sizes become the same
        ({"width": 32, "num_layers": 2}, "toy/1e9/dense/w32-l2-s0 and 1 more: two runs would have"),
    ],
)
def test_overrides_that_do_not_fit(
    tree: dict[str, Any], overrides: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the sentence is compared)
        expand_plan(read_plan(tree), overrides)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "num_smoke", "num_gpu"),
    [
        ("isoflop", 20, 60),
        ("shapes", 6, 48),
        ("capacity-frequency", 13, 29),
        ("controls", 9, 30),
        ("experts", 4, 45),
        ("knobs", 17, 42),
        ("memory", 11, 84),
        ("placement", 5, 7),
        ("replication", 4, 10),
    ],
)
def test_plans_of_the_package(name: str, num_smoke: int, num_gpu: int) -> None:
    for scale, count, most in (("smoke", num_smoke, 2e13), ("gpu", num_gpu, 1e18)):
        plan = load_plan(name, scale)
        runs = expand_plan(plan)
        assert plan.name == name
        assert plan.description
        assert len({run.name for run in runs}) == len(runs) == count
        assert sum(run.flops for run in runs) < most
        assert min(run.num_steps for run in runs) >= 50


def test_isoflop_sizes_stand_around_the_best() -> None:
    plan = load_plan("isoflop", "gpu")
    assert max(plan.budgets) >= 10 * min(plan.budgets)
    # with so many ids the head is a small part of each model
    cells = group_cells(expand_plan(plan, vocab_size=4096))
    assert len(cells) == 8
    for cell in cells:
        costs = [flops.flops_per_token(run.config.model) for run in cell]
        seeds = [run.config.train.seed for run in cell]
        # the largest of those with three seeds
        best = max(cost for cost, seed in zip(costs, seeds, strict=True) if seed == 2)
        # it grows with the square root of the budget, or somewhat faster
        assert best == pytest.approx(26e6 * math.sqrt(cell[0].budget / 1e16), rel=0.2)
        costs = sorted(set(costs))
        # about geometric, down and up
        assert len(costs) >= 5
        assert all(1.15 < b / a < 1.85 for a, b in pairwise(costs))
        assert costs[0] < 0.8 * best
        assert costs[-1] > 1.8 * best
        assert min(run.num_steps for run in cell) >= 400


def test_large_isoflop_plan() -> None:
    runs = expand_plan(load_plan("isoflop", "large"))
    shapes = [(run.variant, run.config.model.width, run.config.model.num_layers) for run in runs]
    assert shapes == [
        *[("dense", width, 12) for width in (384, 448, 512, 640)],
        *[("mod", *shape) for shape in ((512, 10), (512, 12), (640, 12), (768, 12))],
    ]
    runs += expand_plan(load_plan("shapes", "large"))
    recipes = {str(run.config.train) for run in runs}
    assert len(recipes) == 1
    for run in runs:
        model, recipe = run.config.model, run.config.train
        assert (model.vocab_size, recipe.batch_size, run.config.seq_len) == (16384, 32, 1024)
        step = flops.executed_flops(model, recipe.optimizer, batch_size=32)
        assert run.flops == run.num_steps * step <= 1e17 < run.flops + step
        # four epochs of 142 M tokens
        assert run.num_steps * run.config.tokens_per_step < 4 * 142e6


def test_the_replication_repeats_the_best_models_with_fresh_seeds() -> None:
    def keep_recipe(run: PlannedRun) -> dict[str, object]:
        return {**run.config.to_dict()["train"], "seed": None, "model": run.config.model}

    planned = [run for run in expand_plan(load_plan("isoflop", "gpu")) if run.budget == 1.3e15]
    best = [cell for cell in group_cells(planned) if len(cell) > 3]
    fresh = group_cells(expand_plan(load_plan("replication", "gpu")))
    for cell, other in zip(best, fresh, strict=True):
        repeated = [run for run in cell if run.config.model == other[0].config.model]
        assert len(repeated) == 3
        assert len(other) == 5
        assert all(keep_recipe(run) == keep_recipe(repeated[0]) for run in other)
        used = {run.config.train.seed for run in cell}
        assert used.isdisjoint(run.config.train.seed for run in other)


def test_experts_are_compared_at_equal_cost() -> None:
    costs: dict[str, list[float]] = {}
    # the sizes are for data with so many ids
    for run in expand_plan(load_plan("experts", "gpu"), vocab_size=4096):
        recipe = run.config.train
        assert recipe.flops_convention == "executed"
        step = flops.executed_flops(run.config.model, recipe.optimizer, batch_size=16)
        costs.setdefault(run.variant, []).append(step)
    # the first MoE is the one that the others are held against
    reference = costs.pop("moe")[0]
    for variant, steps in costs.items():
        assert min(abs(step / reference - 1) for step in steps) < 0.02, variant


def test_controls_have_the_best_dense_shape_of_the_budget() -> None:
    plan = load_plan("controls", "gpu")
    dense = [run for run in expand_plan(plan) if run.variant == "dense"]
    shapes = [(run.config.model.width, run.config.model.num_layers) for run in dense]
    assert shapes.count((160, 6)) == 3
    assert all(run.config.train.flops_convention == "executed" for run in dense)


def test_controls_differ_in_how_tokens_are_chosen_and_cost_alike() -> None:
    runs = expand_plan(load_plan("controls", "gpu"))
    models = {run.variant: run.config.model for run in runs if run.config.train.seed == 0}
    costs = {name: flops.flops_per_token(model) for name, model in models.items()}
    # all but the dense model, and but token choice with places to spare
    alike = {
        name: cost for name, cost in costs.items() if name not in ("dense", "token-choice-bias")
    }
    assert len(alike) == 7
    assert max(alike.values()) < 1.02 * min(alike.values())
    assert costs["mod"] < costs["token-choice-bias"] < 1.1 * costs["mod"]
    assert models["early-exit"].routed_layers == (6, 7, 8, 9, 10, 11)
    gates = {name: (m.routing.noise_gate, m.routing.gate) for name, m in models.items()}
    assert gates["random"] == ("gaussian", "raw")
    assert gates["random-learned"] == ("learned", "tanh1")
    assert gates["random-unit"] == ("learned", "unit")


def test_isoflop_smoke_is_small_and_brackets() -> None:
    plan = load_plan("isoflop", "smoke")
    # with more ids the head would be most of each model
    assert plan.vocab_size == 512
    runs = expand_plan(plan, vocab_size=plan.vocab_size)
    cells = group_cells(runs)
    assert len(cells) == 4
    for cell in cells:
        sizes = sorted(run.num_parameters for run in cell)
        assert len(set(sizes)) == 5
        assert sizes[-1] > 3 * sizes[0]
        assert min(run.num_steps for run in cell) >= 350
    # two cores take ten minutes for about so many steps of such models
    assert sum(run.num_steps for run in runs) < 50_000


def group_cells(runs: list[PlannedRun]) -> list[list[PlannedRun]]:
    """The runs of each budget and variant."""
    cells: dict[tuple[float, str], list[PlannedRun]] = {}
    for run in runs:
        cells.setdefault((run.budget, run.variant), []).append(run)
    return list(cells.values())


@pytest.mark.parametrize("scale", ["smoke", "gpu"])
def test_isoflop_variants_differ_in_routing_alone(scale: str) -> None:
    recipes: dict[float, set[str]] = {}
    for run in expand_plan(load_plan("isoflop", scale)):
        recipe = dataclasses.replace(run.config.train, seed=0)
        recipes.setdefault(run.budget, set()).add(str(recipe))
    assert {len(found) for found in recipes.values()} == {1}


def test_the_documented_sizes_are_those_of_the_plan() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\d.e]+) \| (dense|mod) \| (.+) \| (.+) \| (.+) \|$", text, re.MULTILINE
    )
    runs = expand_plan(load_plan("isoflop", "gpu"), vocab_size=4096)
    groups: dict[tuple[str, str], dict[str, list[PlannedRun]]] = {}
    for run in runs:
        model = run.config.model
        sizes = groups.setdefault((format_budget(run.budget), run.variant), {})
        sizes.setdefault(f"{model.width}×{model.num_layers}", []).append(run)
    assert len(rows) == len(groups) == 8
    for budget, variant, sizes, steps, tokens in rows:
        found = groups[budget, variant]
        named = (f"**{size}**" if len(seeds) > 1 else size for size, seeds in found.items())
        assert sizes == ", ".join(named)
        first, *_, last = (seeds[0] for seeds in found.values())
        assert steps == f"{first.num_steps:,} to {last.num_steps:,}"
        seen = [run.num_steps * run.config.tokens_per_step / 1e6 for run in (first, last)]
        assert tokens == "{:.0f} to {:.0f}".format(*seen)
