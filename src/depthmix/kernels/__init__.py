"""Moving tokens in and out of routed blocks and experts, fast; picks the implementation.

`reference` is the truth. Knows nothing of models or configurations.
"""

from depthmix.kernels.grouped import multiply_groups
from depthmix.kernels.inverse import gather_tokens, scatter_add_tokens
from depthmix.kernels.reference import pack_tokens, select_topk

__all__ = [
    "gather_tokens",
    "multiply_groups",
    "pack_tokens",
    "scatter_add_tokens",
    "select_topk",
]
