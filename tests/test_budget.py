"""A budget pays for whole steps, at the capacities that they have."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from depthmix import flops
from depthmix.budget import DEFAULT_STEPS, count_flops, count_steps, list_stages
from depthmix.config import Recipe, RunConfig, load_preset


def test_a_run_without_a_budget_has_a_length() -> None:
    assert count_steps(RunConfig()) == DEFAULT_STEPS


def test_a_budget_of_steps_is_its_steps() -> None:
    assert count_steps(RunConfig(train=Recipe(steps=7))) == 7


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


@given(st.integers(1, 10**4), st.integers(1, 64), st.floats(0.01, 0.99))
def test_flops_pay_for_whole_steps(num_steps: int, batch_size: int, more: float) -> None:
    model = load_preset("tiny")
    per_step = flops.training_flops(model, seq_len=32, batch_size=batch_size)
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
        flops.training_flops(model, batch_size=8) for model in (routed, routed.dense_twin())
    ]
    assert counts == [int(1e14 / per_step[0]), int(1e14 / per_step[1])]
    assert counts[0] > 1.5 * counts[1]


def test_micro_batches_cost_nothing() -> None:
    runs = [RunConfig(train=Recipe(flops=1e16, num_micro_batches=n)) for n in (1, 4)]
    assert count_steps(runs[0]) == count_steps(runs[1])


def test_less_than_a_step_is_refused() -> None:
    model = load_preset("tiny")
    tokens = Recipe(tokens=16 * 64 - 1.0)
    per_step = flops.training_flops(model, batch_size=16)
    for recipe in (tokens, Recipe(flops=per_step * 0.5)):
        with pytest.raises(ValueError, match=r"less than one step .*make train.batch_size smaller"):
            count_steps(RunConfig(model=model, train=recipe))
    assert count_steps(RunConfig(model=model, train=Recipe(tokens=16 * 64.0))) == 1
    assert count_steps(RunConfig(model=model, train=Recipe(flops=float(per_step)))) == 1


@settings(max_examples=40)
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
    budget = size * flops.training_flops(model, **sizes)

    def total(num_steps: int) -> int:
        """Step by step."""
        run = RunConfig(model=model, train=Recipe(steps=num_steps, **falling, **sizes))
        stages, spent = list_stages(run, num_steps), 0
        prices = {step: flops.training_flops(m, **sizes) for step, m in stages.items()}
        price = flops.training_flops(model, **sizes)
        for step in range(num_steps):
            price = prices.get(step, price)
            spent += price
        assert count_flops(run, num_steps) == spent
        return spent

    run = RunConfig(model=model, train=Recipe(flops=budget, **falling, **sizes))
    num_steps = count_steps(run)
    assert total(num_steps) == count_flops(run, num_steps) <= budget < total(num_steps + 1)


def test_a_falling_capacity_takes_steps_away() -> None:
    model = load_preset("tiny", **{"routing.capacity": 0.25})
    fields: dict[str, Any] = {"flops": 1e11, "batch_size": 2}
    still = count_steps(RunConfig(model=model, train=Recipe(**fields)))
    fields |= {"start_capacity": 1.0, "capacity_fall_share": 0.5, "num_capacity_stages": 1}
    fallen = count_steps(RunConfig(model=model, train=Recipe(**fields)))
    prices = [
        flops.training_flops(model.override({"routing.capacity": c}), batch_size=2)
        for c in (1.0, 0.25)
    ]
    assert fallen == pytest.approx(still * 2 / (1 + prices[0] / prices[1]), abs=1)
    assert fallen < 0.9 * still


def test_an_absurd_budget_is_counted_too() -> None:
    model = load_preset("tiny", **{"routing.capacity": 0.25})
    run = RunConfig(model=model, train=Recipe(flops=1e40, start_capacity=1.0))
    assert count_steps(run) > 10**18


def test_less_than_a_step_is_refused_while_the_capacity_falls() -> None:
    model = load_preset("tiny")
    recipe = Recipe(flops=10.0, start_capacity=1.0)
    with pytest.raises(ValueError, match="less than one step"):
        count_steps(RunConfig(model=model, train=recipe))
