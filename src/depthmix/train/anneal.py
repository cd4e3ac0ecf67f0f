"""The model that is told the capacities of each step. Knows nothing of why they fall."""

from typing import Any

from depthmix.budget import count_steps, list_stages
from depthmix.config import RunConfig
from depthmix.nn import MixtureOfDepths, Transformer


class Annealer:
    """Gives a model the capacities of each step."""

    def __init__(self, run: RunConfig, model: Transformer) -> None:
        self.stages = list_stages(run, count_steps(run))
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
