"""A capacity that falls in stages: which step has which, and the model that is told.

A stage is a function of the step and the recipe, both of which are in every checkpoint: there is no
counter that a resumed run could lose. Knows nothing of why it falls.
"""

import math
from typing import Any

from depthmix import flops
from depthmix.config import ModelConfig
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.recipe import RunConfig


def list_stages(run: RunConfig, num_steps: int) -> dict[int, ModelConfig]:
    """First step → the model with the capacities that hold from there on, in order.

    One stage, unless `train.capacity_from` says otherwise. The last step has the model's own.
    """
    recipe, model = run.train, run.model
    if recipe.capacity_from is None:
        return {0: model}
    _check(run, recipe.capacity_from)
    # the slack keeps 0.07 · 100 from becoming 8
    num_falling = min(num_steps - 1, math.ceil(recipe.capacity_share * num_steps - 1e-9))
    stages, count = {}, recipe.capacity_stages
    for stage in range(count):
        left = 1 - stage / count
        shares = tuple(c + (recipe.capacity_from - c) * left for c in model.capacities)
        first = math.ceil(stage * num_falling / count)
        # of two that begin at once, in a short run, the later counts
        stages[first] = model.override({"routing.capacity": shares})
    return {**stages, num_falling: model}


class Annealer:
    """Gives a model the capacities of each step."""

    def __init__(self, run: RunConfig, model: Transformer) -> None:
        self.stages = list_stages(run, flops.count_steps(run))
        self.model = model
        self.config = run.model
        """The model as it is now."""

    def describe(self) -> dict[str, Any]:
        """For a line of metrics: the mean share that routed blocks keep now, where it changes."""
        shares = self.config.capacities
        return {"capacity": sum(shares) / len(shares)} if len(self.stages) > 1 else {}

    @property
    def is_final(self) -> bool:
        """Whether the capacities are the model's own."""
        return self.config is list(self.stages.values())[-1]

    def enter(self, step: int) -> bool:
        """Set the capacities of a step; whether they are others than before."""
        config = [stage for first, stage in self.stages.items() if first <= step][-1]
        changed = config.capacities != self.config.capacities
        self.config = config
        layers = (layer for layer in self.model.layers if isinstance(layer, MixtureOfDepths))
        for layer, capacity in zip(layers, config.capacities, strict=True):
            layer.decider.capacity = capacity
        return changed


def _check(run: RunConfig, first: float) -> None:
    shares = run.model.capacities
    if not shares:
        raise ValueError("train.capacity_from needs blocks that route: leave it out")
    if first < max(shares):
        raise ValueError(
            f"train.capacity_from = {first} is less than the model's capacity {max(shares)}: it is "
            f"what capacities fall from"
        )
    kv_capacity = run.model.routing.kv_capacity
    if kv_capacity is not None and first > kv_capacity:
        raise ValueError(
            f"train.capacity_from = {first} is more than routing.kv_capacity = {kv_capacity}: "
            f"nobody is updated who does not offer keys"
        )
