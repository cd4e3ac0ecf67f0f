"""Configurations of models and training: fields, their bounds, and presets.

Frozen dataclasses, read from TOML, JSON or the command line. Does not import torch, so that
planning, counting and `--help` stay fast.
"""

from depthmix.config.choices import CAUSAL_SELECTORS, GATES, SELECTORS, STRATEGIES
from depthmix.config.model import (
    ExpertsConfig,
    MemoryConfig,
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
from depthmix.config.train import BASE_WIDTH, START_RATES, Recipe, RunConfig, make_start_config

__all__ = [
    "BASE_WIDTH",
    "CAUSAL_SELECTORS",
    "GATES",
    "SELECTORS",
    "START_RATES",
    "STRATEGIES",
    "ExpertsConfig",
    "MemoryConfig",
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
    "make_start_config",
    "num_kept",
    "preset_names",
    "preset_sizes",
]
