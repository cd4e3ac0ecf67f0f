"""Mixture-of-Depths transformers: fixed compute, and learned routing of tokens to it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthmix import flops
from depthmix.config import (
    ExpertsConfig,
    ModelConfig,
    Recipe,
    RoutingConfig,
    RunConfig,
    load_preset,
)

if TYPE_CHECKING:
    from depthmix.infer import Engine, SamplingParams
    from depthmix.nn import Cache, Output, Routing, Transformer
    from depthmix.sample import open_model
    from depthmix.train.step import TrainStep

__version__ = "0.2.0.dev0"

__all__ = [
    "Cache",
    "Engine",
    "ExpertsConfig",
    "ModelConfig",
    "Output",
    "Recipe",
    "Routing",
    "RoutingConfig",
    "RunConfig",
    "SamplingParams",
    "TrainStep",
    "Transformer",
    "flops",
    "load_preset",
    "open_model",
]

# loaded on first use: torch takes a second to import
_LAZY = {
    **dict.fromkeys(("Cache", "Output", "Routing", "Transformer"), "depthmix.nn"),
    **dict.fromkeys(("Engine", "SamplingParams"), "depthmix.infer"),
    "TrainStep": "depthmix.train.step",
    "open_model": "depthmix.sample",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'depthmix' has no attribute '{name}'")


def __dir__() -> list[str]:
    # list lazy names too, for completion in a shell
    return sorted({*globals(), *__all__})
