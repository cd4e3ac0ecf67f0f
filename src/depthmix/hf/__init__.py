"""depthmix models for transformers: importing this is all that its `Auto` classes need.

The only place that imports transformers, which is an extra: `pip install 'depthmix[hf]'`.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from depthmix.hf.config import DepthmixConfig
from depthmix.hf.model import DepthmixForCausalLM

__all__ = ["DepthmixConfig", "DepthmixForCausalLM"]

AutoConfig.register(DepthmixConfig.model_type, DepthmixConfig, exist_ok=True)
AutoModelForCausalLM.register(DepthmixConfig, DepthmixForCausalLM, exist_ok=True)
