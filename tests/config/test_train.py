"""Recipes: schedules at their ends, what is refused and how, exact round trips."""

import dataclasses
import json
import math
import tomllib
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from depthmix.config import (
    ModelConfig,
    Recipe,
    RoutingConfig,
    RunConfig,
    fields,
    load_preset,
    load_run_config,
    make_start_config,
)

SCHEDULES = ("cosine", "wsd", "constant")

shares = st.floats(0, 1)
positive = st.floats(1e-300, 1e300)
counts = st.integers(1, 2**40)


def list_rates(num_steps: int, **changes: Any) -> list[float]:
    recipe = Recipe(**changes)
    return [recipe.rate_at(step, num_steps) for step in range(num_steps)]


def test_cosine_warms_up_and_falls_to_its_end() -> None:
    rates = list_rates(100, warmup_share=0.1, final_rate_share=0.1)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[9] == 1
    # 90 steps fall: after 45 of them half of the way, after all of them the whole
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == 0.1
    assert rates[10] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 90)) / 2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_wsd_is_flat_then_linear() -> None:
    rates = list_rates(100, schedule="wsd", warmup_share=0.1, decay_share=0.2, final_rate_share=0.5)
    assert rates[9:80] == [1.0] * 71
    assert rates[80:] == pytest.approx([1 - 0.5 * (i + 1) / 20 for i in range(20)])
    assert rates[-1] == 0.5


def test_constant_stays() -> None:
    rates = list_rates(50, schedule="constant", warmup_share=0.1)
    assert rates == [0.2, 0.4, 0.6, 0.8, *[1.0] * 46]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 1 / 3, 0.7, 1.0])
@pytest.mark.parametrize("num_steps", [2, 3, 10, 1000])
def test_the_last_step_has_exactly_the_final_rate(
    schedule: str, share: float, num_steps: int
) -> None:
    assert list_rates(num_steps, schedule=schedule, final_rate_share=share)[-1] == share


@pytest.mark.parametrize(
    ("schedule", "num_steps", "rates"),
    [
        ("cosine", 1, [1.0]),
        ("cosine", 2, [1.0, 0.1]),
        ("cosine", 3, [1.0, 0.55, 0.1]),
        ("wsd", 1, [1.0]),
        ("wsd", 2, [1.0, 0.1]),
        ("wsd", 3, [1.0, 1.0, 0.1]),
        ("constant", 1, [1.0]),
        ("constant", 3, [1.0, 1.0, 1.0]),
    ],
)
def test_tiny_runs(schedule: str, num_steps: int, rates: list[float]) -> None:
    assert list_rates(num_steps, schedule=schedule) == pytest.approx(rates)


def test_warming_up_all_the_way_leaves_no_decay() -> None:
    for schedule in SCHEDULES:
        assert list_rates(4, schedule=schedule, warmup_share=1.0) == [0.25, 0.5, 0.75, 1.0]


def test_overlapping_wsd_shares_warm_up_first() -> None:
    rates = list_rates(10, schedule="wsd", warmup_share=0.6, decay_share=0.8, final_rate_share=0.0)
    assert rates[:6] == pytest.approx([(i + 1) / 6 for i in range(6)])
    assert rates[6:] == pytest.approx([0.75, 0.5, 0.25, 0])


def test_shares_ignore_rounding_errors() -> None:
    # 0.07 · 100 is a little more than 7
    assert list_rates(100, warmup_share=0.07)[6] == 1
    assert list_rates(100, schedule="wsd", warmup_share=0.0, decay_share=0.07)[92] == 1


@given(st.sampled_from(SCHEDULES), st.integers(1, 60), shares, shares, shares)
def test_rates_rise_once_and_fall_once(
    schedule: Any, num_steps: int, warmup: float, decay: float, final: float
) -> None:
    changes = {"warmup_share": warmup, "decay_share": decay, "final_rate_share": final}
    rates = list_rates(num_steps, schedule=schedule, **changes)
    assert all(min(final, 1 / num_steps) <= rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "batch_size": counts,
    "seq_len": st.none() | st.integers(1, 64),
    "seed": st.integers(0, 2**53 - 1),
    "flops_convention": st.sampled_from(["full", "executed"]),
    "optimizer": st.sampled_from(["adamw", "muon"]),
    "learning_rate": positive,
    "scale_by_width": st.booleans(),
    "router_rate_factor": positive,
    "memory_rate_factor": positive,
    "schedule": st.sampled_from(SCHEDULES),
    "warmup_share": shares,
    "decay_share": shares,
    "final_rate_share": shares,
    "weight_decay": st.floats(0, 1e300),
    "beta1": st.floats(0, 1, exclude_max=True),
    "beta2": st.floats(0, 1, exclude_max=True),
    "max_grad_norm": st.floats(0, 1e300),
    "start_capacity": st.none() | st.floats(0, 1, exclude_min=True),
    "capacity_fall_share": shares,
    "num_capacity_stages": counts,
    "trainable": st.sampled_from(["all", "routers", "lora"]),
    "lora_rank": st.integers(1, 64),
    "lora_alpha": st.none() | positive,
    "lora_blocks": st.sampled_from(["routed", "all"]),
    "teacher": st.none() | st.just("runs/teacher"),
    "distill_loss_weight": st.floats(0, 1e300),
    "hidden_loss_weight": st.floats(0, 1e300),
    "document_mask": st.booleans(),
    "precision": st.sampled_from(["auto", "float32", "bfloat16"]),
    "compile": st.none() | st.booleans(),
    "compile_blocks": st.booleans(),
    "cuda_graph": st.none() | st.booleans(),
    "checkpoint_activations": st.booleans(),
    "shard_size": st.none() | counts,
    "log_every": counts,
    "val_every": st.none() | counts,
    "val_tokens": counts,
    "checkpoint_every": st.none() | counts,
    "checkpoint_minutes": st.floats(0, 1e300),
    "num_kept_checkpoints": counts,
    "tensorboard": st.booleans(),
    "wandb": st.booleans(),
}
BUDGETS = {"steps": counts, "tokens": positive, "flops": positive}


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    values = draw(st.fixed_dictionaries(FIELDS))
    budget = draw(st.sampled_from([None, *BUDGETS]))
    if budget is not None:
        values[budget] = draw(BUDGETS[budget])
    values["num_micro_batches"] = draw(st.integers(1, 8))
    values["batch_size"] *= values["num_micro_batches"]
    assume(not (values["trainable"] == "lora" and values["optimizer"] == "muon"))
    assume(values["teacher"] is not None or not values["hidden_loss_weight"])
    return Recipe(**values)


@settings(max_examples=50)
@given(recipes())
def test_round_trips(recipe: Recipe) -> None:
    run = RunConfig(model=load_preset("tiny", **{"routing.capacity": (0.5, 0.25)}), train=recipe)
    assert RunConfig.from_toml(run.to_toml()) == run
    assert RunConfig.from_dict(run.to_dict()) == run
    # what a command line would say
    text = {f"train.{n}": str(v) for n, v in dataclasses.asdict(recipe).items() if v is not None}
    assert RunConfig.from_overrides(run.model, text) == run
    assert hash(run) == hash(RunConfig.from_toml(run.to_toml()))


def test_the_round_trip_knows_every_field() -> None:
    assert {*FIELDS, *BUDGETS, "num_micro_batches"} == set(fields.field_types(Recipe))


def test_every_field_is_explained() -> None:
    for name, text in fields.document_fields(RunConfig).items():
        assert text.endswith("."), name


# field -> value that does not fit, and what is said
WRONG: dict[str, list[tuple[Any, str]]] = {
    "steps": [(0, "must be greater than 0"), ("soon", "must be a whole number or empty")],
    "tokens": [(-1, "must be greater than 0"), (math.inf, "must be a finite number")],
    "flops": [(0, "must be greater than 0"), (math.nan, "must be a finite number")],
    "batch_size": [(0, "must be greater than 0"), (2.5, "must be a whole number")],
    "seq_len": [(0, "must be at least 1")],
    "num_micro_batches": [(0, "must be greater than 0"), (3, "must divide train.batch_size = 16")],
    "seed": [(-1, "must lie between 0 and 9007199254740991"), (2**53 + 1, "must lie between")],
    "flops_convention": [("half", "must be one of 'full', 'executed'")],
    "optimizer": [("sgd", "must be one of 'adamw', 'muon'")],
    "learning_rate": [(0, "must be greater than 0"), (math.nan, "must be a finite number")],
    "scale_by_width": [("perhaps", "must be true or false")],
    "router_rate_factor": [(0, "must be greater than 0"), (math.inf, "must be a finite number")],
    "memory_rate_factor": [(0, "must be greater than 0")],
    "schedule": [("linear", "must be one of 'cosine', 'wsd', 'constant'")],
    "warmup_share": [(-0.1, "must lie between 0 and 1"), (20, "must lie between 0 and 1")],
    "decay_share": [(1.5, "must lie between 0 and 1")],
    "final_rate_share": [(math.nan, "must lie between 0 and 1")],
    "weight_decay": [(-1, "must be 0 or more")],
    "beta1": [(1, "nothing is learned"), (-0.5, "must lie between 0 and 1")],
    "beta2": [(1, "nothing is learned"), (2, "must lie between 0 and 1")],
    "max_grad_norm": [(-1, "must be 0 or more"), (math.inf, "must be a finite number")],
    "start_capacity": [(0, r"must lie in \(0, 1\]"), (1.5, r"must lie in \(0, 1\]")],
    "capacity_fall_share": [(1.5, "must lie between 0 and 1")],
    "num_capacity_stages": [(0, "must be greater than 0"), (2.5, "must be a whole number")],
    "trainable": [("heads", "must be one of 'all', 'routers', 'lora'")],
    "lora_rank": [(0, "must be greater than 0"), (2.5, "must be a whole number")],
    "lora_alpha": [(0, "must be greater than 0"), (math.inf, "must be a finite number")],
    "lora_blocks": [("dense", "must be one of 'routed', 'all'")],
    "distill_loss_weight": [(-1, "must be 0 or more"), (math.inf, "must be a finite number")],
    "hidden_loss_weight": [(-1, "must be 0 or more"), (math.inf, "must be a finite number")],
    "document_mask": [(3, "must be true or false")],
    "precision": [("float16", "must be one of 'auto', 'float32', 'bfloat16'")],
    "compile": [("often", "must be true or false or empty")],
    "cuda_graph": [(1, "must be true or false or empty")],
    "checkpoint_activations": [("some", "must be true or false")],
    "compile_blocks": [("two", "must be true or false")],
    "shard_size": [(0, "must be at least 1")],
    "log_every": [(0, "must be greater than 0")],
    "val_every": [(0, "must be at least 1")],
    "val_tokens": [(0, "must be greater than 0")],
    "checkpoint_every": [(-5, "must be at least 1")],
    "checkpoint_minutes": [(-1, "must be 0 or more"), (math.inf, "must be a finite number")],
    "num_kept_checkpoints": [(0, "must be at least 1: without one nothing can be resumed")],
    "tensorboard": [("maybe", "must be true or false")],
    "wandb": [(2, "must be true or false")],
}


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_values_that_do_not_fit_are_refused(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as python:
        fields.build(Recipe, {name: value}, "train.")
    with pytest.raises(ValueError, match=sentence) as command:
        RunConfig.from_overrides(load_preset("tiny"), {f"train.{name}": str(value)})
    for error in (python, command):
        assert str(error.value).startswith(f"train.{name}")
        assert "\n" not in str(error.value)


def test_every_field_refuses_some_value() -> None:
    # any text may be a folder's name
    assert {*WRONG, "teacher"} == set(fields.field_types(Recipe))


def test_two_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"budget, steps, tokens or flops: leave out tokens$"):
        Recipe(steps=3, tokens=1e6)
    with pytest.raises(ValueError, match=r"leave out flops$"):
        Recipe(tokens=3.0, flops=1e6)
    with pytest.raises(ValueError, match=r"leave out tokens and flops$"):
        Recipe(steps=1, tokens=3.0, flops=1e6)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("train.learning_rat", "'train.learning_rat'. Did you mean 'train.learning_rate'"),
        ("train.batchsize", "Did you mean 'train.batch_size'"),
        # with only the prefix in common nothing is alike
        ("train.zz", "'train.zz'. The fields are: steps, tokens, flops"),
        ("train.width", "'train.width'. Did you mean 'width'"),
        ("train.routing.capacity", "Did you mean 'routing.capacity'"),
        ("batch_size", "'batch_size'. Did you mean 'train.batch_size'"),
        ("seed", "Did you mean 'train.seed'"),
        ("widht", "Did you mean 'width'"),
        ("warmup", "Did you mean 'train.warmup_share'"),
        ("train", "no configuration field 'train'"),
    ],
)
def test_unknown_fields_suggest_the_nearest(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RunConfig.from_overrides(load_preset("tiny"), {name: 1})


def test_unknown_fields_of_a_file_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'train.stepz'. Did you mean 'train.steps'"):
        RunConfig.from_toml("[train]\nstepz = 3\n")
    with pytest.raises(ValueError, match=r"'model.widht'"):
        RunConfig.from_toml("[model]\nwidht = 3\n")
    with pytest.raises(ValueError, match="train is a section of fields"):
        RunConfig.from_toml("train = 3\n")


def test_overrides_reach_model_and_recipe() -> None:
    run = RunConfig.from_overrides(
        load_preset("tiny"), {"width": "96", "train.steps": "1e3", "routing": {"every": 1}}
    )
    assert run.model == load_preset("tiny", width=96, **{"routing.every": 1})
    assert run.train == Recipe(steps=1000)


def test_overrides_change_a_run() -> None:
    run = RunConfig.from_overrides(load_preset("tiny"), {"train.steps": 10, "train.seed": 3})
    assert run.override({}) == run
    changed = run.override({"width": 96, "train.flops": "1e12", "routing.every": 1})
    assert changed.model == load_preset("tiny", width=96, **{"routing.every": 1})
    # one budget takes the place of another
    assert changed.train == Recipe(flops=1e12, seed=3)
    with pytest.raises(ValueError, match=r"'seed'. Did you mean 'train.seed'"):
        run.override({"seed": 1})
    with pytest.raises(ValueError, match=r"^train\.batch_size = 'x' does not fit"):
        run.override({"train.batch_size": "x"})
    with pytest.raises(ValueError, match="a run has one budget"):
        run.override({"train.steps": 1, "train.tokens": 5})


def test_a_new_budget_is_in_executed_flops_and_an_old_one_stays() -> None:
    new = RunConfig.from_overrides(load_preset("tiny"), {"train.flops": 1e12})
    assert new.train.flops_convention == "executed"
    assert RunConfig.from_toml(new.to_toml()) == new
    assert RunConfig.from_dict(new.to_dict()) == new
    # written before there were two
    text = new.to_toml().replace('flops_convention = "executed"\n', "")
    old = RunConfig.from_toml(text)
    assert old.train == dataclasses.replace(new.train, flops_convention="full")
    assert old.override({"train.flops": 2e12}).train.flops_convention == "full"
    assert "flops_convention" not in text
    # what has no recipe is no run of before
    assert RunConfig.from_toml("").train == Recipe()


# as a run's config.toml had them, each with a value that is not its default
OLD_FILE = """
[model]
width = 96
num_heads = 4

[train]
batch_size = 12
accumulate = 3
router_rate = 2.5
warmup = 0.25
decay = 0.125
final_rate = 0.75
clip = 0.5
capacity_from = 0.875
capacity_share = 0.375
capacity_stages = 5
distill = "runs/old"
distill_weight = 4.0
keep_checkpoints = 7
"""
NEW = Recipe(
    flops_convention="full",
    batch_size=12,
    num_micro_batches=3,
    router_rate_factor=2.5,
    warmup_share=0.25,
    decay_share=0.125,
    final_rate_share=0.75,
    max_grad_norm=0.5,
    start_capacity=0.875,
    capacity_fall_share=0.375,
    num_capacity_stages=5,
    teacher="runs/old",
    distill_loss_weight=4.0,
    num_kept_checkpoints=7,
)


def test_a_file_with_every_old_name_loads(tmp_path: Path) -> None:
    expected = RunConfig(model=ModelConfig(width=96, num_heads=4), train=NEW)
    tree = tomllib.loads(OLD_FILE)
    assert tree["train"].keys() == {"batch_size", *Recipe.OLD_NAMES}
    assert RunConfig.from_toml(OLD_FILE) == expected
    assert RunConfig.from_dict(json.loads(json.dumps(tree))) == expected
    (tmp_path / "config.toml").write_text(OLD_FILE)
    assert load_run_config(tmp_path / "config.toml") == expected
    # what is written has the names of today
    written = tomllib.loads(expected.to_toml())["train"]
    assert not written.keys() & Recipe.OLD_NAMES.keys()
    assert RunConfig.from_toml(expected.to_toml()) == expected


# what the first version wrote for `train --preset tiny`, less the fields of experts
FIRST_FILE = """
[model]
vocab_size = 256
max_seq_len = 64
num_layers = 4
width = 64
num_heads = 4
num_kv_heads = 2
mlp = "swiglu"
qk_norm = false
tied_head = true
rope_theta = 10000.0
norm_eps = 1e-06

[model.routing]
strategy = "expert_choice"
capacity = 0.125
capacity_first = 0.85
capacity_last = 0.15
every = 2
first_dense = 0
first_tokens = 0
gate = "raw"
normalize_input = false
init_std = 0.02
aux_loss_weight = 0.0
predictor = true
predictor_width = 16
predictor_loss_weight = 0.01
balance_loss_weight = 0.01

[train]
steps = 10
batch_size = 16
accumulate = 1
seed = 0
optimizer = "adamw"
learning_rate = 0.004
scale_by_width = true
schedule = "cosine"
warmup = 0.02
decay = 0.2
final_rate = 0.1
weight_decay = 0.1
beta1 = 0.9
beta2 = 0.95
clip = 1.0
document_mask = true
precision = "auto"
checkpoint_activations = false
log_every = 10
val_tokens = 131072
checkpoint_minutes = 3.0
keep_checkpoints = 2
tensorboard = true
wandb = false
"""


def test_a_run_of_the_first_version_keeps_what_it_was_trained_with() -> None:
    run = RunConfig.from_toml(FIRST_FILE)
    written = fields.flatten(fields.read_toml(FIRST_FILE))
    found = fields.flatten(run.to_dict())
    for name, value in written.items():
        assert found[fields.rename(RunConfig, name)] == value, name
    # it is not what a preset or a new run has today
    assert not run.model.qk_norm
    assert run.model.routing.gate != load_preset("tiny").routing.gate
    assert run.train.optimizer != Recipe().optimizer


def test_a_file_names_every_field_that_is_not_empty() -> None:
    """So that a default may change, and a run that was stored before keeps the old one."""
    run = RunConfig.from_overrides(load_preset("tiny"), {"train.steps": 10})
    stored = fields.flatten(fields.read_toml(run.to_toml()))
    full = fields.flatten(run.to_dict())
    assert {name for name, value in full.items() if value is not None} == stored.keys()
    # and what is empty by default stays so: a file cannot say it
    for kind in (Recipe, ModelConfig, RoutingConfig):
        for field in dataclasses.fields(kind):
            if NoneType in get_args(field.type):
                assert field.default is None, field.name


def test_overrides_by_their_old_names() -> None:
    tree = tomllib.loads(OLD_FILE)["train"]
    old = {f"train.{name}": str(value) for name, value in tree.items()}
    new = dataclasses.replace(NEW, flops_convention="executed")
    assert RunConfig().override(old).train == new
    assert fields.override(Recipe(), tree) == new
    # the last one counts, as of a name that is given twice
    twice = {"train.clip": 2.0, "train.max_grad_norm": 3.0}
    assert RunConfig().override(twice).train.max_grad_norm == 3
    assert RunConfig().override({"train.max_grad_norm": 3.0, "train.clip": 2.0}).train == Recipe(
        max_grad_norm=2.0
    )
    with pytest.raises(ValueError, match=r"train\.max_grad_norm = -1\.0 must be 0 or more"):
        RunConfig().override({"train.clip": -1})


def test_a_file_with_both_names_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^train\.clip is the former name of train\.max_grad_norm"
    ):
        RunConfig.from_toml("[train]\nclip = 1.0\nmax_grad_norm = 2.0\n")


def test_old_names_lead_to_fields() -> None:
    known = fields.field_types(Recipe).keys()
    assert set(Recipe.OLD_NAMES.values()) <= known
    assert not Recipe.OLD_NAMES.keys() & known


def test_sequences_are_the_models_unless_given() -> None:
    model = ModelConfig(max_seq_len=128)
    assert RunConfig(model=model).seq_len == 128
    run = RunConfig(model=model, train=Recipe(seq_len=32, batch_size=4))
    assert (run.seq_len, run.tokens_per_step) == (32, 128)
    with pytest.raises(ValueError, match=r"train.seq_len = 129 is more than .* max_seq_len = 128"):
        RunConfig(model=model, train=Recipe(seq_len=129))


def test_schedule_tests_cover_all_schedules() -> None:
    assert set(SCHEDULES) == set(get_args(fields.field_types(Recipe)["schedule"]))


@pytest.mark.parametrize(
    ("num_steps", "val_tokens", "expected"),
    [(20000, 131072, 1000), (100, 2048, 10), (100, 131072, 640), (100, 1, 10)],
)
def test_validation_takes_at_most_a_tenth_of_the_run(
    num_steps: int, val_tokens: int, expected: int
) -> None:
    model = ModelConfig(max_seq_len=128)
    run = RunConfig(model=model, train=Recipe(batch_size=16, val_tokens=val_tokens))
    assert run.space_validations(num_steps) == expected
    fixed = RunConfig(model=model, train=Recipe(val_every=7))
    assert fixed.space_validations(num_steps) == 7


def test_trained_weights_get_a_low_rate_by_default() -> None:
    model = load_preset("tiny")
    run = make_start_config(model, {"train.learning_rate": 1e-3})
    assert run.model == model
    assert (run.train.optimizer, run.train.scale_by_width) == ("adamw", False)
    assert (run.train.router_rate_factor, run.train.learning_rate) == (10.0, 1e-3)
