"""Which type matrix products run in, for code that autocast does not reach or must not.

A tensor on the meta device has no data and no autocast.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_type(x: Tensor) -> torch.dtype:
    """The autocast type where autocast is on for `x`'s device, else the type of `x`."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def stop_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products with `x` run in its own type."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
