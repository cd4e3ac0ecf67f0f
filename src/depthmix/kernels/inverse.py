"""Gather and scatter-add without full-size buffers, for `torch.compile` to fuse.

Autograd's backward pass of a gather is a scatter-add into zeros: a full-size buffer, atomic
additions, no fusion. A routing knows its own inverse, `slot_BT`, so the scatter can *read* each
token's update, and inductor fuses those reads with the norms and sums around them. The gather also
returns the stream, so that its gradient changes only where tokens were taken: no index appears
twice, and inductor then writes the K rows in place.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def take_rows(x: Float[Tensor, "B T D"], index: Int[Tensor, "B K"]) -> Float[Tensor, "B K D"]:
    """Rows of `x` at `index`; each index selects a whole row of D."""
    row_B1 = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row_B1, index]


def take_placed(x: Float[Tensor, "B K D"], slot: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """Each token's row of `x`; zero for tokens without a place."""
    return torch.where(slot[:, :, None] >= 0, take_rows(x, slot.clamp(min=0)), 0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, index_BK: Tensor, slot_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index_BK, slot_BT)
        return take_rows(x_BTD, index_BK), x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, grad_BKD: Tensor, grad_BTD: Tensor) -> tuple[Tensor, None, None]:
        index_BK, slot_BT = ctx.saved_tensors
        placed_BK1 = (slot_BT.gather(1, index_BK) >= 0)[:, :, None]
        row_B1 = torch.arange(index_BK.shape[0], device=index_BK.device)[:, None]
        total_BKD = take_rows(grad_BTD, index_BK) + torch.where(placed_BK1, grad_BKD, 0)
        return grad_BTD.index_put((row_B1, index_BK), total_BKD), None, None


class _ScatterAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, update_BKD: Tensor, weight_BK: Tensor, index: Tensor, slot: Tensor
    ) -> Tensor:
        ctx.save_for_backward(update_BKD, weight_BK, index, slot)
        return x_BTD + take_placed(weight_BK[:, :, None] * update_BKD, slot).to(x_BTD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        update_BKD, weight_BK, index_BK, slot_BT = ctx.saved_tensors
        placed_BK1 = (slot_BT.gather(1, index_BK) >= 0)[:, :, None]
        grad_BKD = take_rows(grad_BTD, index_BK).to(weight_BK.dtype)
        grad_update_BKD = torch.where(placed_BK1, weight_BK[:, :, None] * grad_BKD, 0)
        product_BKD = torch.where(placed_BK1, grad_BKD * update_BKD, 0)
        return grad_BTD, grad_update_BKD.to(update_BKD.dtype), product_BKD.sum(2), None, None


def gather_tokens(
    x: Float[Tensor, "B T D"], index: Int[Tensor, "B K"], slot: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B K D"], Float[Tensor, "B T D"]]:
    """See `reference.gather_tokens`; gradients of empty places are dropped."""
    return _Gather.apply(x, index, slot)


def scatter_add_tokens(
    x: Float[Tensor, "B T D"],
    update: Float[Tensor, "B K D"],
    weight: Float[Tensor, "B K"],
    index: Int[Tensor, "B K"],
    slot: Int[Tensor, "B T"],
) -> Float[Tensor, "B T D"]:
    """See `reference.scatter_add_tokens`."""
    return _ScatterAdd.apply(x, update, weight, index, slot)
