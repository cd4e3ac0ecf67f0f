"""A matrix product with float32 weights: multiplied in bf16, with an unrounded weight gradient.

Autocast computes the weight's gradient in bf16 and casts it back: a rounding, and an extra kernel
per matrix of the model. The product can write float32 directly.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from depthmix.kernels.precision import compute_type


def linear(x: Float[Tensor, "*B D"], weight: Float[Tensor, "F D"]) -> Float[Tensor, "*B F"]:
    """`x @ weight.T`, in the autocast dtype if autocast is on."""
    dtype = compute_type(x)
    if x.is_cuda and dtype == torch.bfloat16 and weight.dtype == torch.float32:
        return _Linear.apply(x.to(dtype), weight)
    return F.linear(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_weight = None
        # otherwise a frozen weight would cost as much as a trained one
        if ctx.needs_input_grad[1]:
            rows = grad.flatten(0, -2)
            grad_weight = torch.mm(rows.T, x.flatten(0, -2), out_dtype=torch.float32)
        return grad @ weight, grad_weight
