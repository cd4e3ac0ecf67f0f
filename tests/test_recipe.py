"""Recipes: schedules at their ends, what is refused and how, exact round trips."""

import dataclasses
import math
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from depthmix import fields
from depthmix.config import ModelConfig
from depthmix.presets import load_preset
from depthmix.recipe import Recipe, RunConfig

SCHEDULES = ("cosine", "wsd", "constant")

shares = st.floats(0, 1)
positive = st.floats(1e-300, 1e300)
counts = st.integers(1, 2**40)


def list_rates(num_steps: int, **changes: Any) -> list[float]:
    recipe = Recipe(**changes)
    return [recipe.rate_at(step, num_steps) for step in range(num_steps)]


def test_cosine_warms_up_and_falls_to_its_end() -> None:
    rates = list_rates(100, warmup=0.1, final_rate=0.1)
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[9] == 1
    # 90 steps fall: after 45 of them half of the way, after all of them the whole
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == 0.1
    assert rates[10] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 90)) / 2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_wsd_is_flat_and_then_a_line() -> None:
    rates = list_rates(100, schedule="wsd", warmup=0.1, decay=0.2, final_rate=0.5)
    assert rates[9:80] == [1.0] * 71
    assert rates[80:] == pytest.approx([1 - 0.5 * (i + 1) / 20 for i in range(20)])
    assert rates[-1] == 0.5


def test_constant_stays() -> None:
    rates = list_rates(50, schedule="constant", warmup=0.1)
    assert rates == [0.2, 0.4, 0.6, 0.8, *[1.0] * 46]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("final_rate", [0.0, 0.1, 0.3, 1 / 3, 0.7, 1.0])
@pytest.mark.parametrize("num_steps", [2, 3, 10, 1000])
def test_the_last_step_has_exactly_the_final_rate(
    schedule: str, final_rate: float, num_steps: int
) -> None:
    assert list_rates(num_steps, schedule=schedule, final_rate=final_rate)[-1] == final_rate


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
        assert list_rates(4, schedule=schedule, warmup=1.0) == [0.25, 0.5, 0.75, 1.0]


def test_wsd_whose_shares_overlap_warms_up_first() -> None:
    rates = list_rates(10, schedule="wsd", warmup=0.6, decay=0.8, final_rate=0.0)
    assert rates[:6] == pytest.approx([(i + 1) / 6 for i in range(6)])
    assert rates[6:] == pytest.approx([0.75, 0.5, 0.25, 0])


def test_shares_are_not_rounded_up_by_their_last_bit() -> None:
    # 0.07 · 100 is a little more than 7
    assert list_rates(100, warmup=0.07)[6] == 1
    assert list_rates(100, schedule="wsd", warmup=0.0, decay=0.07)[92] == 1


@given(st.sampled_from(SCHEDULES), st.integers(1, 60), shares, shares, shares)
def test_rates_rise_once_and_fall_once(
    schedule: Any, num_steps: int, warmup: float, decay: float, final_rate: float
) -> None:
    changes = {"warmup": warmup, "decay": decay, "final_rate": final_rate}
    rates = list_rates(num_steps, schedule=schedule, **changes)
    assert all(min(final_rate, 1 / num_steps) <= rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "batch_size": counts,
    "seq_len": st.none() | st.integers(1, 64),
    "seed": st.integers(0, 2**53 - 1),
    "optimizer": st.sampled_from(["adamw", "muon"]),
    "learning_rate": positive,
    "scale_by_width": st.booleans(),
    "router_rate": positive,
    "schedule": st.sampled_from(SCHEDULES),
    "warmup": shares,
    "decay": shares,
    "final_rate": shares,
    "weight_decay": st.floats(0, 1e300),
    "beta1": st.floats(0, 1, exclude_max=True),
    "beta2": st.floats(0, 1, exclude_max=True),
    "clip": st.floats(0, 1e300),
    "capacity_from": st.none() | st.floats(0, 1, exclude_min=True),
    "capacity_share": shares,
    "capacity_stages": counts,
    "trainable": st.sampled_from(["all", "routers", "lora"]),
    "lora_rank": st.integers(1, 64),
    "lora_alpha": st.none() | positive,
    "lora_blocks": st.sampled_from(["routed", "all"]),
    "distill": st.none() | st.just("runs/teacher"),
    "distill_weight": st.floats(0, 1e300),
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
    "keep_checkpoints": counts,
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
    values["accumulate"] = draw(st.integers(1, 8))
    values["batch_size"] *= values["accumulate"]
    assume(not (values["trainable"] == "lora" and values["optimizer"] == "muon"))
    return Recipe(**values)


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
    assert {*FIELDS, *BUDGETS, "accumulate"} == set(fields.field_types(Recipe))


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
    "accumulate": [(0, "must be greater than 0"), (3, "must divide train.batch_size = 16")],
    "seed": [(-1, "must lie between 0 and 9007199254740991"), (2**53 + 1, "must lie between")],
    "optimizer": [("sgd", "must be one of 'adamw', 'muon'")],
    "learning_rate": [(0, "must be greater than 0"), (math.nan, "must be a finite number")],
    "scale_by_width": [("perhaps", "must be true or false")],
    "router_rate": [(0, "must be greater than 0"), (math.inf, "must be a finite number")],
    "schedule": [("linear", "must be one of 'cosine', 'wsd', 'constant'")],
    "warmup": [(-0.1, "must lie between 0 and 1"), (20, "must lie between 0 and 1")],
    "decay": [(1.5, "must lie between 0 and 1")],
    "final_rate": [(math.nan, "must lie between 0 and 1")],
    "weight_decay": [(-1, "must be 0 or more")],
    "beta1": [(1, "would never learn"), (-0.5, "must lie between 0 and 1")],
    "beta2": [(1, "would never learn"), (2, "must lie between 0 and 1")],
    "clip": [(-1, "must be 0 or more"), (math.inf, "must be a finite number")],
    "capacity_from": [(0, r"must lie in \(0, 1\]"), (1.5, r"must lie in \(0, 1\]")],
    "capacity_share": [(1.5, "must lie between 0 and 1")],
    "capacity_stages": [(0, "must be greater than 0"), (2.5, "must be a whole number")],
    "trainable": [("heads", "must be one of 'all', 'routers', 'lora'")],
    "lora_rank": [(0, "must be greater than 0"), (2.5, "must be a whole number")],
    "lora_alpha": [(0, "must be greater than 0"), (math.inf, "must be a finite number")],
    "lora_blocks": [("dense", "must be one of 'routed', 'all'")],
    "distill_weight": [(-1, "must be 0 or more"), (math.inf, "must be a finite number")],
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
    "keep_checkpoints": [(0, "must be at least 1: without one nothing can be resumed")],
    "tensorboard": [("maybe", "must be true or false")],
    "wandb": [(2, "must be true or false")],
}


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_what_does_not_fit_is_said(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as python:
        fields.build(Recipe, {name: value}, "train.")
    with pytest.raises(ValueError, match=sentence) as command:
        RunConfig.from_overrides(load_preset("tiny"), {f"train.{name}": str(value)})
    for error in (python, command):
        assert str(error.value).startswith(f"train.{name}")
        assert "\n" not in str(error.value)


def test_every_field_can_be_wrong() -> None:
    # any text may be a folder's name
    assert {*WRONG, "distill"} == set(fields.field_types(Recipe))


def test_two_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"by one of steps, tokens and flops: take away tokens$"):
        Recipe(steps=3, tokens=1e6)
    with pytest.raises(ValueError, match=r"take away flops$"):
        Recipe(tokens=3.0, flops=1e6)
    with pytest.raises(ValueError, match=r"take away tokens and flops$"):
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
        ("train", "no configuration field 'train'"),
    ],
)
def test_unknown_fields_suggest_the_near_one(name: str, sentence: str) -> None:
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


def test_a_run_can_be_changed() -> None:
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
    with pytest.raises(ValueError, match="a run stops by one of"):
        run.override({"train.steps": 1, "train.tokens": 5})


def test_sequences_are_the_models_unless_given() -> None:
    model = ModelConfig(max_seq_len=128)
    assert RunConfig(model=model).seq_len == 128
    run = RunConfig(model=model, train=Recipe(seq_len=32, batch_size=4))
    assert (run.seq_len, run.tokens_per_step) == (32, 128)
    with pytest.raises(ValueError, match=r"train.seq_len = 129 is more than .* max_seq_len = 128"):
        RunConfig(model=model, train=Recipe(seq_len=129))


def test_schedules_of_the_tests_are_all() -> None:
    assert set(SCHEDULES) == set(get_args(fields.field_types(Recipe)["schedule"]))


@pytest.mark.parametrize(
    ("num_steps", "val_tokens", "expected"),
    [(20000, 131072, 1000), (100, 2048, 10), (100, 131072, 640), (100, 1, 10)],
)
def test_validations_read_a_tenth_at_most(num_steps: int, val_tokens: int, expected: int) -> None:
    model = ModelConfig(max_seq_len=128)
    run = RunConfig(model=model, train=Recipe(batch_size=16, val_tokens=val_tokens))
    assert run.space_validations(num_steps) == expected
    fixed = RunConfig(model=model, train=Recipe(val_every=7))
    assert fixed.space_validations(num_steps) == 7
