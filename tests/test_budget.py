"""A budget pays for whole steps, at the capacities that they have; those fall by stages."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from depthmix import flops
from depthmix.budget import DEFAULT_STEPS, make_schedule
from depthmix.config import Recipe, RunConfig, load_preset


def count_steps(run: RunConfig) -> int:
    return make_schedule(run).num_steps


def test_a_run_without_a_budget_has_a_length() -> None:
    assert count_steps(RunConfig()) == DEFAULT_STEPS


def test_a_budget_of_steps_is_its_steps() -> None:
    assert count_steps(RunConfig(train=Recipe(steps=7))) == 7


@settings(max_examples=40)
@given(st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 64), st.data())
def test_tokens_pay_for_whole_steps(
    num_steps: int, batch_size: int, seq_len: int, data: st.DataObject
) -> None:
    per_step = batch_size * seq_len
    more = data.draw(st.integers(0, per_step - 1))
    recipe = Recipe(
        tokens=float(num_steps * per_step + more), batch_size=batch_size, seq_len=seq_len
    )
    assert count_steps(RunConfig(model=load_preset("tiny"), train=recipe)) == num_steps


@settings(max_examples=40)
@given(st.integers(1, 10**4), st.integers(1, 64), st.floats(0.01, 0.99))
def test_flops_pay_for_whole_steps(num_steps: int, batch_size: int, more: float) -> None:
    model = load_preset("tiny")
    per_step = flops.executed_flops(model, "muon", seq_len=32, batch_size=batch_size)
    for steps in (num_steps, num_steps + more):
        recipe = Recipe(flops=float(steps * per_step), batch_size=batch_size, seq_len=32)
        assert count_steps(RunConfig(model=model, train=recipe)) == num_steps


def test_equal_compute_is_more_steps_for_a_routed_model() -> None:
    routed = load_preset("demo")
    counts = [
        count_steps(RunConfig(model=model, train=Recipe(flops=1e14, batch_size=8)))
        for model in (routed, routed.dense_twin())
    ]
    per_step = [
        flops.executed_flops(model, "muon", batch_size=8) for model in (routed, routed.dense_twin())
    ]
    assert counts == [int(1e14 / per_step[0]), int(1e14 / per_step[1])]
    assert counts[0] > 1.5 * counts[1]


def test_micro_batches_cost_nothing() -> None:
    runs = [RunConfig(train=Recipe(flops=1e16, num_micro_batches=n)) for n in (1, 4)]
    assert count_steps(runs[0]) == count_steps(runs[1])


def test_less_than_a_step_is_refused() -> None:
    model = load_preset("tiny")
    tokens = Recipe(tokens=16 * 64 - 1.0)
    per_step = flops.executed_flops(model, "muon", batch_size=16)
    for recipe in (tokens, Recipe(flops=per_step * 0.5)):
        with pytest.raises(ValueError, match=r"less than one step .*lower train.batch_size"):
            count_steps(RunConfig(model=model, train=recipe))
    assert count_steps(RunConfig(model=model, train=Recipe(tokens=16 * 64.0))) == 1
    assert count_steps(RunConfig(model=model, train=Recipe(flops=float(per_step)))) == 1


@settings(max_examples=25)
@given(st.floats(1, 500), st.floats(0, 1), st.integers(1, 9), st.floats(0.25, 1), st.integers(1, 4))
@example(5000.0, 0.7, 9, 1.0, 3)
def test_flops_are_kept_while_the_capacity_falls(
    size: float, share: float, num_stages: int, first: float, batch_size: int
) -> None:
    model = load_preset("tiny", **{"routing.capacity": 0.25})
    falling = {
        "start_capacity": first,
        "capacity_fall_share": share,
        "num_capacity_stages": num_stages,
    }
    sizes = {"batch_size": batch_size, "seq_len": 32}
    budget = size * flops.executed_flops(model, "muon", **sizes)

    def total(num_steps: int) -> int:
        """Step by step."""
        run = RunConfig(model=model, train=Recipe(steps=num_steps, **falling, **sizes))
        schedule, spent = make_schedule(run), 0
        prices = {s.first: flops.executed_flops(s.model, "muon", **sizes) for s in schedule.stages}
        price = flops.executed_flops(model, "muon", **sizes)
        for step in range(num_steps):
            price = prices.get(step, price)
            spent += price
            assert schedule.count_flops(step + 1) == spent
        assert schedule.flops == spent
        return spent

    run = RunConfig(model=model, train=Recipe(flops=budget, **falling, **sizes))
    schedule = make_schedule(run)
    num_steps = schedule.num_steps
    assert total(num_steps) == schedule.flops <= budget < total(num_steps + 1)


def test_a_falling_capacity_takes_steps_away() -> None:
    model = load_preset("tiny", **{"routing.capacity": 0.25})
    fields: dict[str, Any] = {"flops": 1e11, "batch_size": 2}
    still = count_steps(RunConfig(model=model, train=Recipe(**fields)))
    fields |= {"start_capacity": 1.0, "capacity_fall_share": 0.5, "num_capacity_stages": 1}
    fallen = count_steps(RunConfig(model=model, train=Recipe(**fields)))
    prices = [
        flops.executed_flops(model.override({"routing.capacity": c}), "muon", batch_size=2)
        for c in (1.0, 0.25)
    ]
    assert fallen == pytest.approx(still * 2 / (1 + prices[0] / prices[1]), abs=1)
    assert fallen < 0.95 * still


def test_an_absurd_budget_is_counted_too() -> None:
    model = load_preset("tiny", **{"routing.capacity": 0.25})
    run = RunConfig(model=model, train=Recipe(flops=1e40, start_capacity=1.0))
    assert count_steps(run) > 10**18


def test_less_than_a_step_is_refused_while_the_capacity_falls() -> None:
    model = load_preset("tiny")
    recipe = Recipe(flops=10.0, start_capacity=1.0)
    with pytest.raises(ValueError, match="less than one step"):
        count_steps(RunConfig(model=model, train=recipe))


def make_falling(num_steps: int, **changes: Any) -> RunConfig:
    """A run of `tiny` whose capacity falls, unless `changes` say otherwise."""
    fixed = {"train.steps": num_steps, "train.batch_size": 4, "train.seq_len": 16}
    fixed |= {"num_layers": 2, "routing.capacity": 0.25, "train.start_capacity": 1.0}
    fixed |= {"train.capacity_fall_share": 0.6, "train.num_capacity_stages": 3}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return RunConfig.from_overrides(load_preset("tiny"), {**fixed, **changes})


def list_capacities(run: RunConfig) -> dict[int, tuple[float, ...]]:
    return {stage.first: stage.model.capacities for stage in make_schedule(run).stages}


def test_stages_by_hand() -> None:
    assert list_capacities(make_falling(10)) == {0: (1.0,), 2: (0.75,), 4: (0.5,), 6: (0.25,)}
    run = make_falling(10, num_layers=4, routing__capacity=(0.5, 0.25), train__capacity_stages=2)
    assert list_capacities(run) == {0: (1.0, 1.0), 3: (0.75, 0.625), 6: (0.5, 0.25)}
    # in a short run, stages fall together, and the last step still has the model's own
    assert list_capacities(make_falling(2)) == {0: (1.0,), 1: (0.25,)}
    assert list_capacities(make_falling(1)) == {0: (0.25,)}
    run = make_falling(10, train__capacity_from=None)
    (stage,) = make_schedule(run).stages
    assert (stage.first, stage.model) == (0, run.model)


@settings(max_examples=40)
@given(
    st.integers(1, 200), st.floats(0, 1), st.integers(1, 12), st.floats(0.3, 1), st.integers(1, 3)
)
def test_stages_fall_from_the_first_to_the_models_own(
    num_steps: int, share: float, count: int, first: float, every: int
) -> None:
    changes = {"train__capacity_share": share, "train__capacity_stages": count}
    changes |= {"routing__every": 1, "num_layers": every}
    run = make_falling(num_steps, train__capacity_from=first, **changes)
    schedule = make_schedule(run)
    starts = [stage.first for stage in schedule.stages]
    shares = [stage.model.capacities for stage in schedule.stages]
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    assert starts[-1] <= max(0, num_steps - 1)
    assert schedule.stages[-1].model is run.model
    assert shares == sorted(shares, reverse=True)
    assert max(shares[0]) <= first
    for step in range(num_steps):
        last = [stage for stage in schedule.stages if stage.first <= step][-1]
        assert schedule.find_stage(step) is last


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"routing.strategy": "none"}, "needs routed blocks"),
        ({"train.start_capacity": 0.1}, "is less than the model's capacity 0.25"),
        ({"routing.kv_capacity": 0.5}, r"is more than routing.kv_capacity = 0.5"),
    ],
    ids=str,
)
def test_a_capacity_that_cannot_fall_is_refused(changes: dict[str, Any], told: str) -> None:
    run = make_falling(10, **changes)
    with pytest.raises(ValueError, match=told):
        make_schedule(run)


def test_recipes_that_cannot_fall_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train.start_capacity = 1.5 must lie in"):
        make_falling(10, train__capacity_from=1.5)
    with pytest.raises(ValueError, match=r"train.num_capacity_stages = 0 must be greater than 0"):
        make_falling(10, train__capacity_stages=0)


def test_compute_is_counted_at_the_capacity_that_each_step_has() -> None:
    run = make_falling(10, train__flops_convention="full")
    sizes = {"seq_len": run.seq_len, "batch_size": run.train.batch_size}
    models = [run.model.override({"routing.capacity": c}) for c in (1.0, 0.75, 0.5, 0.25)]
    each = [flops.training_flops(model, **sizes) for model in models]
    schedule = make_schedule(run)
    assert schedule.count_flops(0) == 0
    assert schedule.count_flops(3) == 2 * each[0] + each[1]
    assert schedule.count_flops(10) == schedule.flops == 2 * sum(each[:3]) + 4 * each[3]
    # models are compared by every (query, key) pair, a device by those that causality allows
    for stage, model in zip(schedule.stages, models, strict=True):
        assert stage.causal_flops == flops.training_flops(model, **sizes, causal_half=True)
        assert stage.causal_flops < stage.flops
        optimizer = flops.optimizer_flops(model, run.train.optimizer)
        assert stage.executed_flops == stage.causal_flops + optimizer
    still = make_schedule(run.override({"train.start_capacity": None}))
    assert still.flops == 10 * each[3]
    # a run that went on for longer than it is planned now
    assert still.count_flops(12) == 12 * each[3]


def test_a_budget_in_executed_flops_pays_for_other_steps() -> None:
    run = make_falling(10)
    budget = make_schedule(run).count_flops(10, "executed")
    changes = {"train.steps": None, "train.flops": float(budget)}
    executed = run.override(changes)
    assert make_schedule(executed).num_steps == 10
    assert make_schedule(executed).flops == budget
    full = run.override({**changes, "train.flops_convention": "full"})
    assert make_schedule(full).num_steps != 10
