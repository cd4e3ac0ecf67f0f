"""The output head fused with its cross-entropy, one chunk of tokens at a time.

The logits of a batch are by far its largest tensor (tokens × vocabulary). They are never needed
all at once: a chunk's loss and gradient follow from its own logits, which are computed, used and
overwritten before the next chunk starts. Their rows are aligned to 16 bytes for any number of
classes. Callers do not see the padding: parameters and gradients keep their size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels.precision import compute_type, stop_autocast

CHUNK_TOKENS = 8192

# With 50,257 classes, one row of bf16 logits in eight is aligned to 16 bytes: the three products
# that write or read them are then so slow that a whole step takes up to twice as long on an H200.
CLASS_MULTIPLE = 64


def linear_cross_entropy(
    hidden: Float[Tensor, "R D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " R"],
    ignore: int,
    *,
    chunked: bool | None = None,
    multiple: int = CLASS_MULTIPLE,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of `hidden @ weight.T` over the targets that are not `ignore`.

    `chunked` keeps only one chunk's logits in memory, with classes padded to a `multiple`; it
    defaults to true if a GPU multiplies in bf16.
    """
    dtype = compute_type(hidden)
    if chunked is None:
        chunked = hidden.is_cuda and dtype == torch.bfloat16
    if not chunked:
        return mean_cross_entropy(F.linear(hidden, weight), targets, ignore)
    num_classes = weight.shape[0]
    hidden, weight = hidden.to(dtype), pad_classes(weight.to(dtype), multiple)
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return torch.ops.depthmix.linear_cross_entropy(
        hidden, weight, targets, num_classes, ignore, learns
    )[0]


def pad_classes(weight: Float[Tensor, "V D"], multiple: int) -> Float[Tensor, "V2 D"]:
    """Append rows of zeros up to a `multiple`; returns the weight itself if none are needed."""
    missing = -weight.shape[0] % multiple
    # when compiled, this fuses with the cast before it
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def mean_cross_entropy(
    logits: Float[Tensor, "R V"], targets: Int[Tensor, " R"], ignore: int
) -> Float[Tensor, ""]:
    """Mean over the targets that are not `ignore`, in float32; 0 if there are none."""
    total = F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction="sum")
    return total / (targets != ignore).sum().clamp(min=1)


@torch.library.custom_op("depthmix::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, num_classes: int, ignore: int, learns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and both gradients, which are empty unless `learns`.

    Rows of the weight from `num_classes` on are padding.
    """
    from depthmix.kernels.triton import cross_entropy_

    grad_hidden = torch.empty_like(hidden) if learns else hidden.new_empty(0)
    grad_weight = None if learns else hidden.new_empty(0, dtype=torch.float32)
    scale = (targets != ignore).sum().clamp(min=1).float().reciprocal()
    losses = []
    for start in range(0, hidden.shape[0], CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        logits = hidden[chunk] @ weight.T
        if num_classes < weight.shape[0]:
            # zero probability and therefore zero gradient in the products below
            logits[:, num_classes:].fill_(-torch.inf)
        losses.append(cross_entropy_(logits, targets[chunk], scale, ignore).sum())
        if learns:
            torch.mm(logits, weight, out=grad_hidden[chunk])
            grad_weight = _add_product(grad_weight, logits.T, hidden[chunk])
    assert grad_weight is not None, "there are no tokens"
    return torch.stack(losses).sum(), grad_hidden, grad_weight


def _add_product(total: Tensor | None, first: Tensor, second: Tensor) -> Tensor:
    """`total + first @ second`, in place if there is a total.

    Summed in float32: bf16 would round away the later chunks.
    """
    if first.is_cuda and first.dtype == torch.bfloat16:
        if total is None:
            return torch.mm(first, second, out_dtype=torch.float32)
        return torch.addmm(total, first, second, out_dtype=torch.float32, out=total)
    # only on a GPU can bf16 products be accumulated into float32 output
    with stop_autocast(first):
        product = first.float() @ second.float()
    return product if total is None else total.add_(product)


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, num_classes: int, ignore: int, learns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    if not learns:
        return loss, hidden.new_empty(0), hidden.new_empty(0, dtype=torch.float32)
    return loss, torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)


def _keep_gradients(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.dtype = inputs[1].dtype
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad: Tensor, *unused: Any
) -> tuple[Tensor, Tensor, None, None, None, None]:
    grad_hidden, grad_weight = ctx.saved_tensors
    return grad_hidden * grad, (grad_weight * grad).to(ctx.dtype), None, None, None, None


_linear_cross_entropy.register_autograd(_backward, setup_context=_keep_gradients)
