"""The dtype of matrix products, for code that autocast does not or must not reach.

A tensor on the meta device has no data and no autocast.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_type(x: Tensor) -> torch.dtype:
    """The autocast dtype if autocast is on for `x`'s device, else the dtype of `x`."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def stop_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products with `x` run in its own dtype."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
