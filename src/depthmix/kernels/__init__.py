"""Fast kernels, mainly for moving tokens into and out of routed blocks; picks the implementation.

`reference` defines correctness. Knows nothing of models or configurations.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from depthmix.kernels import reference
from depthmix.kernels.cross_entropy import linear_cross_entropy, mean_cross_entropy
from depthmix.kernels.grouped import multiply_groups
from depthmix.kernels.inverse import gather_tokens, scatter_add_tokens
from depthmix.kernels.linear import linear
from depthmix.kernels.paged import attend_pages
from depthmix.kernels.precision import compute_type, stop_autocast
from depthmix.kernels.reference import pack_tokens, rotate_heads

__all__ = [
    "attend_pages",
    "compute_type",
    "gather_tokens",
    "linear",
    "linear_cross_entropy",
    "mean_cross_entropy",
    "multiply_groups",
    "pack_tokens",
    "rotate_heads",
    "rotate_split",
    "scatter_add_tokens",
    "select_topk",
    "stop_autocast",
]

HAS_TRITON = find_spec("triton") is not None


def select_topk(
    scores: Tensor, num_kept: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.select_topk`."""
    if HAS_TRITON and scores.is_cuda and scores.dtype == torch.float32:
        from depthmix.kernels import triton

        if scores.shape[1] <= triton.MAX_TOKENS:
            return triton.select_topk(scores, num_kept, counts)
    return reference.select_topk(scores, num_kept, counts)


def rotate_split(x: Tensor, phase: Tensor, num_first: int) -> tuple[Tensor, Tensor]:
    """See `reference.rotate_split`."""
    if HAS_TRITON and x.is_cuda and x.dtype != torch.float64:
        from depthmix.kernels import triton

        return triton.rotate_split(x, phase, num_first)
    return reference.rotate_split(x, phase, num_first)
