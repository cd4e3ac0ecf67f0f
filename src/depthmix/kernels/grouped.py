"""One matrix product per expert, over rows sorted by expert.

On CUDA in bf16 this is `torch.nn.functional.grouped_mm`; elsewhere a custom operator that loops, so
that it compiles without a graph break although group sizes are known only at run time. They cannot
be read while a CUDA graph is captured: then every expert computes all rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula


def multiply_groups(
    x: Float[Tensor, "R D"], weight: Float[Tensor, "E D F"], ends: Int[Tensor, " E"]
) -> Float[Tensor, "R F"]:
    """Rows from ends[e-1] up to ends[e] times weight[e]; the last end must be R."""
    # grouped_mm requires row strides that are multiples of 16 bytes
    aligned = x.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned:
        return F.grouped_mm(x, weight, offs=ends)
    return torch.ops.depthmix.multiply_groups(x, weight, ends)


@torch.library.custom_op("depthmix::multiply_groups", mutates_args=())
def _multiply_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return multiply_all_groups(x, weight, ends)
    out = x.new_empty(x.shape[0], weight.shape[2])
    for expert, (start, end) in enumerate(_list_bounds(ends)):
        out[start:end] = x[start:end] @ weight[expert]
    return out


@torch.library.custom_op("depthmix::multiply_groups_grad", mutates_args=())
def _multiply_groups_grad(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])
    for expert, (start, end) in enumerate(_list_bounds(ends)):
        out[expert] = x[start:end].T @ grad[start:end]
    return out


def multiply_all_groups(
    x: Float[Tensor, "R D"], weight: Float[Tensor, "E D F"], ends: Int[Tensor, " E"]
) -> Float[Tensor, "R F"]:
    """`multiply_groups` without host synchronization: E times the work, and no gradients."""
    row_R = torch.arange(x.shape[0], device=x.device)
    starts_E = F.pad(ends[:-1], (1, 0))
    own_ER1 = ((row_R >= starts_E[:, None]) & (row_R < ends[:, None]))[:, :, None]
    out_RF = x.new_zeros(x.shape[0], weight.shape[2])
    for expert, own_R1 in enumerate(own_ER1):
        # `where` instead of a sum: non-finite values stay in their own row
        out_RF = torch.where(own_R1, x @ weight[expert], out_RF)
    return out_RF


def _list_bounds(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


@_multiply_groups.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_multiply_groups_grad.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = torch.ops.depthmix.multiply_groups(grad, weight.transpose(1, 2), ends)
    return grad_x, torch.ops.depthmix.multiply_groups_grad(x, grad, ends), None


_multiply_groups.register_autograd(_backward, setup_context=_keep_inputs)


# the number of rows is static, so a grouped product counts as one product over all of them
@register_flop_formula([torch.ops.depthmix.multiply_groups])
def _count(x: Any, weight: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula([torch.ops.depthmix.multiply_groups_grad])
def _count_grad(x: Any, grad: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * x[0] * x[1] * grad[1]


# torch 2.13 counts its own grouped product as zero FLOPs
if torch.ops.aten._grouped_mm not in flop_registry:

    @register_flop_formula([torch.ops.aten._grouped_mm])
    def _count_native(
        left: Any, right: Any, *args: Any, out_shape: Any = None, **kwargs: Any
    ) -> int:
        """Rows times matrices, or, for the matrices' gradient, columns times rows."""
        return 2 * left[0] * left[1] * right[-1]
