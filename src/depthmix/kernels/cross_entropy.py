"""The output head and its cross-entropy together, a chunk of tokens at a time.

The logits of a batch are its largest tensor by far (tokens × vocabulary). Nothing needs them all at
once: a chunk's loss and its gradient are known as soon as its logits are, so they are made, used
and overwritten while the next chunk waits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels.precision import compute_type

CHUNK_TOKENS = 8192


def linear_cross_entropy(
    hidden: Float[Tensor, "R D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " R"],
    ignore: int,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of `hidden @ weight.T` over the targets that are not `ignore`."""
    dtype = compute_type(hidden)
    if hidden.is_cuda and dtype == torch.bfloat16:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        return torch.ops.depthmix.linear_cross_entropy(hidden, weight, targets, ignore)[0]
    return mean_cross_entropy(F.linear(hidden, weight), targets, ignore)


def mean_cross_entropy(
    logits: Float[Tensor, "R V"], targets: Int[Tensor, " R"], ignore: int
) -> Float[Tensor, ""]:
    """Mean over the targets that are not `ignore`, in float32; 0 where there is none."""
    total = F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction="sum")
    return total / (targets != ignore).sum().clamp(min=1)


@torch.library.custom_op("depthmix::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int
) -> tuple[Tensor, Tensor, Tensor]:
    from depthmix.kernels.triton import cross_entropy_

    grad_hidden = torch.empty_like(hidden)
    grad_weight = None
    scale = (targets != ignore).sum().clamp(min=1).float().reciprocal()
    losses = []
    for start in range(0, hidden.shape[0], CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        logits = hidden[chunk] @ weight.T
        losses.append(cross_entropy_(logits, targets[chunk], scale, ignore).sum())
        torch.mm(logits, weight, out=grad_hidden[chunk])
        # summed in float32: bf16 would round away the later chunks
        if grad_weight is None:
            grad_weight = torch.mm(logits.T, hidden[chunk], out_dtype=torch.float32)
        else:
            torch.addmm(
                grad_weight, logits.T, hidden[chunk], out_dtype=torch.float32, out=grad_weight
            )
    assert grad_weight is not None, "there are no tokens"
    return torch.stack(losses).sum(), grad_hidden, grad_weight


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)


def _keep_gradients(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor, Tensor, None, None]:
    grad_hidden, grad_weight = ctx.saved_tensors
    return grad_hidden * grad, (grad_weight * grad).to(torch.bfloat16), None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_keep_gradients)
