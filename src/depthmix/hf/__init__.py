"""depthmix models for transformers: import this, and its `Auto` classes know them.

The only place that imports transformers, which is an extra: `pip install 'depthmix[hf]'`. Without
it, Hugging Face folders can still be read (`depthmix.models`).
"""

from importlib.util import find_spec
from typing import Any

__all__ = ["DepthmixConfig", "DepthmixForCausalLM"]

MISSING = "transformers is not installed: pip install 'depthmix[hf]'"

if find_spec("transformers") is not None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from depthmix.hf.config import DepthmixConfig
    from depthmix.hf.model import DepthmixForCausalLM

    AutoConfig.register(DepthmixConfig.model_type, DepthmixConfig, exist_ok=True)
    AutoModelForCausalLM.register(DepthmixConfig, DepthmixForCausalLM, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name in __all__:
        raise ImportError(MISSING)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
