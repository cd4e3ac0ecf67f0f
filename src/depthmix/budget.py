"""What a run's budget pays for: its steps, and the capacities that they have.

A capacity that falls makes a run's first steps dearer than its last ones, so the two are counted
together. A stage is a function of the step and the recipe, both of which are in every checkpoint:
there is no counter that a resumed run could lose. Knows nothing of torch.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from depthmix.config import ModelConfig, RunConfig
from depthmix.flops import training_flops

DEFAULT_STEPS = 1000
"""Length of a run that names no budget."""


def count_steps(run: RunConfig) -> int:
    """Optimisation steps that a run's budget pays for; `DEFAULT_STEPS` where it has none."""
    recipe = run.train
    if recipe.steps is not None:
        return recipe.steps
    if recipe.tokens is not None:
        return _round_down(recipe.tokens / run.tokens_per_step)
    if recipe.flops is None:
        return DEFAULT_STEPS
    steps = recipe.flops / _price(run, run.model)
    if recipe.start_capacity is None or steps < 1:
        return _round_down(steps)
    # no step is cheaper than the last ones, so these are the most that there can be
    most, prices = min(int(steps), sys.maxsize), _list_prices(run)
    return bisect_right(
        range(1, most + 1), recipe.flops, key=lambda count: _add_up(run, count, prices)
    )


def count_flops(run: RunConfig, num_steps: int) -> int:
    """FLOPs of a run of so many steps, each at the capacities that it has."""
    return _add_up(run, num_steps, _list_prices(run))


def list_stages(run: RunConfig, num_steps: int) -> dict[int, ModelConfig]:
    """First step → the model with the capacities that hold from there on, in order.

    One stage, unless `train.start_capacity` says otherwise. The last step has the model's own.
    """
    # of two that begin at once, in a short run, the later counts
    return dict(zip(_list_firsts(run, num_steps), _list_models(run), strict=True))


def _list_models(run: RunConfig) -> list[ModelConfig]:
    """The stages in order, however long they are."""
    recipe, model = run.train, run.model
    if recipe.start_capacity is None:
        return [model]
    _check(run, recipe.start_capacity)
    stages, count = [], recipe.num_capacity_stages
    for stage in range(count):
        left = 1 - stage / count
        shares = tuple(c + (recipe.start_capacity - c) * left for c in model.capacities)
        stages.append(model.override({"routing.capacity": shares}))
    return [*stages, model]


def _list_firsts(run: RunConfig, num_steps: int) -> list[int]:
    """The first step of each stage."""
    recipe = run.train
    if recipe.start_capacity is None:
        return [0]
    # the slack keeps 0.07 · 100 from becoming 8
    num_falling = min(num_steps - 1, math.ceil(recipe.capacity_fall_share * num_steps - 1e-9))
    count = recipe.num_capacity_stages
    return [math.ceil(stage * num_falling / count) for stage in range(count)] + [num_falling]


def _add_up(run: RunConfig, num_steps: int, prices: Sequence[int]) -> int:
    steps = pairwise([*_list_firsts(run, num_steps), num_steps])
    return sum((end - first) * price for (first, end), price in zip(steps, prices, strict=True))


def _list_prices(run: RunConfig) -> list[int]:
    """FLOPs of a step in each stage."""
    return [_price(run, model) for model in _list_models(run)]


def _price(run: RunConfig, model: ModelConfig) -> int:
    return training_flops(model, seq_len=run.seq_len, batch_size=run.train.batch_size)


def _round_down(steps: float) -> int:
    if steps < 1:
        raise ValueError(
            f"this budget is less than one step ({steps:.2g} of one): raise it, or make "
            f"train.batch_size smaller"
        )
    return int(steps)


def _check(run: RunConfig, first: float) -> None:
    shares = run.model.capacities
    if not shares:
        raise ValueError("train.start_capacity needs blocks that route: leave it out")
    if first < max(shares):
        raise ValueError(
            f"train.start_capacity = {first} is less than the model's capacity {max(shares)}: it "
            f"is what capacities fall from"
        )
    kv_capacity = run.model.routing.kv_capacity
    if kv_capacity is not None and first > kv_capacity:
        raise ValueError(
            f"train.start_capacity = {first} is more than routing.kv_capacity = {kv_capacity}: "
            f"nobody is updated who does not offer keys"
        )
