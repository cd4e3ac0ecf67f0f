"""Mixture-of-Depths transformers: which tokens get the compute is learned, how much is fixed."""

from typing import TYPE_CHECKING, Any

from depthmix import flops
from depthmix.config import ExpertsConfig, ModelConfig, RoutingConfig
from depthmix.presets import load_preset

if TYPE_CHECKING:
    from depthmix.nn import Cache, Output, Routing, Transformer

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "ExpertsConfig",
    "ModelConfig",
    "Output",
    "Routing",
    "RoutingConfig",
    "Transformer",
    "flops",
    "load_preset",
]


def __getattr__(name: str) -> Any:
    # torch takes a second to import: only what needs it loads it
    if name in ("Cache", "Output", "Routing", "Transformer"):
        from depthmix import nn

        return getattr(nn, name)
    raise AttributeError(f"module 'depthmix' has no attribute '{name}'")
