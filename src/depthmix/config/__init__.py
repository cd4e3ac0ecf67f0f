"""What a model is and how it is trained, as data: fields, their bounds, presets by name.

Frozen dataclasses that are read from TOML, JSON and a command line. Knows nothing of torch, so that
planning, counting and `--help` stay instant.
"""

from depthmix.config.choices import CAUSAL_SELECTORS, GATES, SELECTORS, STRATEGIES
from depthmix.config.model import (
    ExpertsConfig,
    ModelConfig,
    RoutingConfig,
    count_share,
    num_kept,
)
from depthmix.config.presets import (
    list_recipe,
    load_config,
    load_preset,
    load_run_config,
    make_run_config,
    preset_names,
    preset_sizes,
)
from depthmix.config.train import BASE_WIDTH, START_RATES, Recipe, RunConfig

__all__ = [
    "BASE_WIDTH",
    "CAUSAL_SELECTORS",
    "GATES",
    "SELECTORS",
    "START_RATES",
    "STRATEGIES",
    "ExpertsConfig",
    "ModelConfig",
    "Recipe",
    "RoutingConfig",
    "RunConfig",
    "count_share",
    "list_recipe",
    "load_config",
    "load_preset",
    "load_run_config",
    "make_run_config",
    "num_kept",
    "preset_names",
    "preset_sizes",
]
