"""Triton kernels where `torch.compile` is slow; same names as in `reference`.

Each kernel here was benchmarked against Inductor's compilation of the reference and won
(results/kernels.md has both numbers); kernels that lost were deleted.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# a row's scores are held in registers: longer rows use the reference
MAX_TOKENS = 32768


@triton.jit
def _select_topk(
    scores,
    counts,
    index,
    slot,
    num_tokens,
    num_places,
    has_counts: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, block)
    inside = token < num_tokens
    score = tl.load(scores + row * num_tokens + token, mask=inside, other=0.0).to(tl.float32)
    # -0.0 equals 0.0, so they must tie
    score = tl.where(score == 0.0, 0.0, score)
    # map to integers in the same order: flip all bits of negatives, the sign bit of the others
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    key = tl.where(inside, key, 0)

    wanted = num_places
    if has_counts:
        wanted = tl.load(counts + row).to(tl.int32)

    # search for the wanted-th largest key, from its highest bit to its lowest
    threshold = tl.zeros((), dtype=tl.uint32)
    bit = tl.full((), 2147483648, dtype=tl.uint32)
    for _ in range(32):
        candidate = threshold | bit
        enough = tl.sum((key >= candidate).to(tl.int32)) >= wanted
        threshold = tl.where(enough, candidate, threshold)
        bit = bit >> 1

    above = (key > threshold) & inside
    equal = (key == threshold) & inside
    # ties go to the earlier tokens
    room = wanted - tl.sum(above.to(tl.int32))
    kept = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= room))
    others = inside & (kept == 0)
    place_kept = tl.cumsum(kept.to(tl.int32)) - 1
    place_other = wanted + tl.cumsum(others.to(tl.int32)) - 1
    place = tl.where(kept, place_kept, place_other)
    tl.store(
        index + row * num_places + place, token.to(tl.int64), mask=inside & (place < num_places)
    )
    tl.store(slot + row * num_tokens + token, tl.where(kept, place, -1).to(tl.int64), mask=inside)


@triton_op("depthmix::select_topk", mutates_args={})
def _select_topk_op(
    scores: Tensor, num_places: int, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, num_tokens = scores.shape
    index = torch.empty((batch, num_places), device=scores.device, dtype=torch.int64)
    slot = torch.empty((batch, num_tokens), device=scores.device, dtype=torch.int64)
    block = triton.next_power_of_2(num_tokens)
    wrap_triton(_select_topk)[(batch,)](
        scores,
        scores if counts is None else counts,
        index,
        slot,
        num_tokens,
        num_places,
        has_counts=counts is not None,
        block=block,
        num_warps=min(16, max(4, block // 256)),
    )
    return index, slot


def select_topk(
    scores: Tensor, num_kept: int, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.select_topk`."""
    return _select_topk_op(scores.contiguous(), num_kept, counts)


@triton.jit
def _rotate(
    packed,
    phase,
    first,
    second,
    first_row,
    first_token,
    first_head,
    second_row,
    second_token,
    second_head,
    num_tokens,
    phase_row,
    num_first,
    num_heads,
    half,
    join: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
):
    """Move one token's packed heads to or from two tensors, and rotate them."""
    program = tl.program_id(0).to(tl.int64)
    row, token = program // num_tokens, program % num_tokens
    lane = tl.arange(0, block_half)[None, :]
    head = tl.arange(0, block_heads)[:, None]
    in_half = lane < half
    phase += row * phase_row + token * 2 * half
    cos = tl.load(phase + lane, mask=in_half, other=0.0)
    sin = tl.load(phase + half + lane, mask=in_half, other=0.0)
    packed += (program * num_heads + head) * 2 * half + lane
    is_first = head < num_first
    place = tl.where(
        is_first,
        row * first_row + token * first_token + head * first_head,
        row * second_row + token * second_token + (head - num_first) * second_head,
    )
    to_first, to_second = is_first & in_half, (head >= num_first) & (head < num_heads) & in_half
    here = (head < num_heads) & in_half
    if join:
        low = tl.load(first + place + lane, mask=to_first, other=0.0).to(tl.float32)
        low += tl.load(second + place + lane, mask=to_second, other=0.0).to(tl.float32)
        high = tl.load(first + place + half + lane, mask=to_first, other=0.0).to(tl.float32)
        high += tl.load(second + place + half + lane, mask=to_second, other=0.0).to(tl.float32)
        # gradients rotate in the opposite direction
        tl.store(packed, low * cos + high * sin, mask=here)
        tl.store(packed + half, high * cos - low * sin, mask=here)
    else:
        low = tl.load(packed, mask=here, other=0.0).to(tl.float32)
        high = tl.load(packed + half, mask=here, other=0.0).to(tl.float32)
        new_low, new_high = low * cos - high * sin, high * cos + low * sin
        tl.store(first + place + lane, new_low, mask=to_first)
        tl.store(first + place + half + lane, new_high, mask=to_first)
        tl.store(second + place + lane, new_low, mask=to_second)
        tl.store(second + place + half + lane, new_high, mask=to_second)


def _launch_rotate(
    packed: Tensor, phase: Tensor, first: Tensor, second: Tensor, join: bool
) -> None:
    batch, num_tokens, num_heads, head_width = packed.shape
    wrap_triton(_rotate)[(batch * num_tokens,)](
        packed,
        phase,
        first,
        second,
        *first.stride()[:3],
        *second.stride()[:3],
        num_tokens,
        phase.stride(0) if phase.shape[0] > 1 else 0,
        first.shape[2],
        num_heads,
        head_width // 2,
        join=join,
        block_heads=triton.next_power_of_2(num_heads),
        block_half=triton.next_power_of_2(head_width // 2),
        num_warps=4,
    )


@triton_op("depthmix::rotate_split", mutates_args={})
def _rotate_split(x: Tensor, phase: Tensor, num_first: int) -> tuple[Tensor, Tensor]:
    batch, num_tokens, num_heads, head_width = x.shape
    first = x.new_empty(batch, num_tokens, num_first, head_width)
    second = x.new_empty(batch, num_tokens, num_heads - num_first, head_width)
    _launch_rotate(x.contiguous(), phase.contiguous(), first, second, join=False)
    return first, second


@triton_op("depthmix::rotate_join", mutates_args={})
def _rotate_join(first: Tensor, second: Tensor, phase: Tensor) -> Tensor:
    batch, num_tokens, num_first, head_width = first.shape
    packed = first.new_empty(batch, num_tokens, num_first + second.shape[2], head_width)
    first = first if first.stride(3) == 1 else first.contiguous()
    second = second if second.stride(3) == 1 else second.contiguous()
    _launch_rotate(packed, phase.contiguous(), first, second, join=True)
    return packed


class _RotateSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: Tensor, num_first: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(phase)
        return _rotate_split(x, phase, num_first)

    @staticmethod
    def backward(ctx: Any, grad_first: Tensor, grad_second: Tensor) -> tuple[Tensor, None, None]:
        return _rotate_join(grad_first, grad_second, *ctx.saved_tensors), None, None


def rotate_split(x: Tensor, phase: Tensor, num_first: int) -> tuple[Tensor, Tensor]:
    """See `reference.rotate_split`."""
    return _RotateSplit.apply(x, phase, num_first)


@triton.jit
def _cross_entropy(
    logits,
    targets,
    scale,
    losses,
    num_classes,
    ignore: tl.constexpr,
    steps: tl.constexpr,
    lanes: tl.constexpr,
):
    """A row's loss; its logits are overwritten with the gradient of the scaled loss."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_classes
    target = tl.load(targets + row)
    counted = target != ignore
    factor = tl.where(counted, tl.load(scale), 0.0)
    # each lane keeps its own running maximum and sum, rescales them once for several values, and
    # is combined with the others only at the end
    tile = tl.arange(0, steps)[:, None] * lanes + tl.arange(0, lanes)[None, :]
    top = tl.full((lanes,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((lanes,), dtype=tl.float32)
    for start in range(0, num_classes, steps * lanes):
        inside = start + tile < num_classes
        value = tl.load(logits + start + tile, mask=inside, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(value, axis=0))
        # a lane that has only seen -inf has nothing to rescale
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(value - safe[None, :]), axis=0)
        top = new_top
    peak = tl.max(top)
    log_sum = peak + tl.log(tl.sum(total * tl.exp(top - peak)))
    chosen = tl.load(logits + target, mask=counted, other=0.0).to(tl.float32)
    tl.store(losses + row, (log_sum - chosen) * factor)
    # every lane must have read the target's logit before any lane overwrites it
    tl.debug_barrier()
    for start in range(0, num_classes, steps * lanes):
        inside = start + tile < num_classes
        value = tl.load(logits + start + tile, mask=inside, other=float("-inf")).to(tl.float32)
        grad = tl.exp(value - log_sum) - tl.where(start + tile == target, 1.0, 0.0)
        tl.store(logits + start + tile, grad * factor, mask=inside)


def cross_entropy_(logits: Tensor, targets: Tensor, scale: Tensor, ignore: int) -> Tensor:
    """Scaled loss of each row; overwrites `logits` with the gradient."""
    losses = torch.empty(logits.shape[0], device=logits.device, dtype=torch.float32)
    # the fastest of 18 tile shapes on an H200: each thread holds whole columns of the tile, and so
    # few rows are in flight that the second read finds them in the L2 cache
    _cross_entropy[(logits.shape[0],)](
        logits,
        targets,
        scale,
        losses,
        logits.shape[1],
        ignore=ignore,
        steps=4,
        lanes=2048,
        num_warps=8,
    )
    return losses
