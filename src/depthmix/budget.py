"""A run's schedule: how many steps its budget allows, their capacities, and their FLOPs.

With a falling capacity the first steps cost more than the last ones, so all three are computed
together from the configuration. A stage depends only on the step and the recipe, and both are in
every checkpoint, so a resumed run has no other state to restore. Does not import torch.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from depthmix.config import ModelConfig, RunConfig, count_share
from depthmix.flops import executed_flops, training_flops

DEFAULT_STEPS = 1000
"""Length of a run without a budget."""


class CapacityStage(NamedTuple):
    """Consecutive steps with the same capacity."""

    first: int
    """The first of these steps."""
    model: ModelConfig
    """The model with the capacities that hold in these steps."""
    flops: int
    """FLOPs of one step."""
    causal_flops: int
    """The same without the (query, key) pairs that causality excludes: the convention for device
    utilisation."""
    executed_flops: int
    """`causal_flops` and the optimiser's own matrix products."""

    def count_flops(self, convention: str) -> int:
        """FLOPs of one step, by `full` or `executed`."""
        return self.executed_flops if convention == "executed" else self.flops


class Schedule(NamedTuple):
    """Every step of a run, planned before the first one."""

    run: RunConfig
    num_steps: int
    stages: tuple[CapacityStage, ...]
    """In order; the last has the model's own capacities."""

    def find_stage(self, step: int) -> CapacityStage:
        """The stage of a step, counted from 0."""
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage.first) - 1]

    def count_flops(self, num_steps: int, convention: str | None = None) -> int:
        """FLOPs of the run's first steps, each at its own capacities.

        `convention` is `full` or `executed`; by default, that of the run's budget.
        """
        convention = convention or self.run.train.flops_convention
        ends = [*(stage.first for stage in self.stages), max(num_steps, self.stages[-1].first)]
        return sum(
            max(0, min(num_steps, end) - first) * stage.count_flops(convention)
            for (first, end), stage in zip(pairwise(ends), self.stages, strict=True)
        )

    @property
    def flops(self) -> int:
        """FLOPs of the whole run."""
        return self.count_flops(self.num_steps)


def make_schedule(run: RunConfig) -> Schedule:
    """The schedule of a run, with `DEFAULT_STEPS` if it has no budget.

    Refuses a budget of less than one step and a start capacity that does not fit.
    """
    stages = _list_stages(run)
    return _arrange(run, stages, _count_steps(run, stages))


def _count_steps(run: RunConfig, stages: Sequence[CapacityStage]) -> int:
    recipe = run.train
    if recipe.steps is not None:
        return recipe.steps
    if recipe.tokens is not None:
        return _round_down(recipe.tokens / run.tokens_per_step, "tokens", recipe.tokens)
    if recipe.flops is None:
        return DEFAULT_STEPS
    # no step is cheaper than the last ones, so this is an upper bound
    steps = recipe.flops / stages[-1].count_flops(recipe.flops_convention)
    if len(stages) == 1 or steps < 1:
        return _round_down(steps, "flops", recipe.flops)
    most = min(int(steps), sys.maxsize)
    return bisect_right(
        range(1, most + 1), recipe.flops, key=lambda count: _arrange(run, stages, count).flops
    )


def _list_stages(run: RunConfig) -> list[CapacityStage]:
    """The stages in order, before their first steps are known."""
    recipe, model = run.train, run.model
    models = []
    if recipe.start_capacity is not None:
        _check(run, recipe.start_capacity)
        count = recipe.num_capacity_stages
        for stage in range(count):
            left = 1 - stage / count
            shares = tuple(c + (recipe.start_capacity - c) * left for c in model.capacities)
            models.append(model.override({"routing.capacity": shares}))
    sizes = {"seq_len": run.seq_len, "batch_size": recipe.batch_size}
    return [
        CapacityStage(
            0,
            each,
            training_flops(each, **sizes),
            training_flops(each, **sizes, causal_half=True),
            executed_flops(each, recipe.optimizer, **sizes),
        )
        for each in (*models, model)
    ]


def _arrange(run: RunConfig, stages: Sequence[CapacityStage], num_steps: int) -> Schedule:
    """Place the stages in a run of `num_steps`."""
    recipe, num_falls = run.train, len(stages) - 1
    num_falling = min(num_steps - 1, count_share(recipe.capacity_fall_share, num_steps))
    firsts = [math.ceil(i * num_falling / num_falls) for i in range(num_falls)]
    firsts.append(num_falling if num_falls else 0)
    # if two begin at the same step, in a short run, the later one counts
    found = dict(zip(firsts, stages, strict=True))
    return Schedule(run, num_steps, tuple(s._replace(first=first) for first, s in found.items()))


def _round_down(steps: float, name: str, budget: float) -> int:
    if steps < 1:
        raise ValueError(
            f"train.{name} = {budget:g} is less than one step ({steps:.2g} of one): raise it, or "
            f"lower train.batch_size"
        )
    return int(steps)


def _check(run: RunConfig, first: float) -> None:
    shares = run.model.capacities
    if not shares:
        raise ValueError(
            "train.start_capacity needs routed blocks, and this model has none: leave it out"
        )
    if first < max(shares):
        raise ValueError(
            f"train.start_capacity = {first} is less than the model's capacity {max(shares)}: "
            f"capacities only fall, so raise it"
        )
    kv_capacity = run.model.routing.kv_capacity
    if kv_capacity is not None and first > kv_capacity:
        raise ValueError(
            f"train.start_capacity = {first} is more than routing.kv_capacity = {kv_capacity}: "
            f"lower it, as only tokens that provide keys can be updated"
        )
