"""The small parts of a block: RMSNorm, rotary positions, the MLP.

Knows nothing of attention, routing or depth.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthmix.kernels import linear

# positions whose phases are computed at a time
PHASE_CHUNK = 2**16


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or in its own type where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def can_use_whole_norms() -> bool:
    """Whether a norm is faster as one operation than as six.

    It is where operations are launched one by one. Inductor fuses the six with their neighbours,
    and in bf16 they keep less for the backward pass than the one does.
    """
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled()


def normalize_rms(x: Float[Tensor, "... D"], eps: float) -> Float[Tensor, "... D"]:
    """Divide by the root mean square over the last dimension, in float32 or wider."""
    if can_use_whole_norms():
        return F.rms_norm(at_least_float32(x), x.shape[-1:], eps=eps)
    return at_least_float32(x) * invert_rms(x, eps)


def invert_rms(x: Float[Tensor, "... D"], eps: float) -> Float[Tensor, "... 1"]:
    """One over the root mean square over the last dimension, in float32 or wider."""
    return torch.rsqrt(at_least_float32(x).square().mean(dim=-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale; the mean square is taken in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        if x.dtype == self.weight.dtype and can_use_whole_norms():
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps).to(x.dtype)
        return (normalize_rms(x, self.eps) * self.weight).to(x.dtype)


def make_phase_table(
    num_positions: int, head_width: int, theta: float, factors: Sequence[float] | None = None
) -> Tensor:
    """Cosines and sines of every position's angles: (num_positions, 2, H/2), float32.

    `factors` as in `ModelConfig.rope_factors`: a model that was trained for `length` positions is
    stretched to `factor` times as many. By Llama 3's rule, frequencies that turn less
    than `low` times in that length are stretched in full, those that turn more than `high` times
    not at all, and those in between in part.
    """
    # computed in float64: at position 100,000 a float32 angle is off by 0.004
    exponent_h = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    frequency_h = theta**-exponent_h
    if factors is not None:
        factor, *rule = factors
        kept_h = torch.zeros_like(frequency_h)
        if rule:
            low, high, length = rule
            turns_h = length * frequency_h / (2 * math.pi)
            kept_h = ((turns_h - low) / (high - low)).clamp(0, 1)
        frequency_h = frequency_h * (kept_h + (1 - kept_h) / factor)
    # in float32 also where a library has set another default type
    table = torch.empty(num_positions, 2, len(frequency_h), dtype=torch.float32)
    # in pieces: in float64 and all at once it would take six times the memory of the table
    for start in range(0, num_positions, PHASE_CHUNK):
        stop = min(num_positions, start + PHASE_CHUNK)
        angle_Th = torch.arange(start, stop, dtype=torch.float64)[:, None] * frequency_h
        table[start:stop, 0], table[start:stop, 1] = angle_Th.cos(), angle_Th.sin()
    return table


class Linear(nn.Linear):
    """A matrix, without bias unless asked; its gradient keeps the weight's own precision."""

    def __init__(self, width_in: int, width_out: int, *, bias: bool = False) -> None:
        super().__init__(width_in, width_out, bias=bias)

    def forward(self, input: Float[Tensor, "*B D"]) -> Float[Tensor, "*B F"]:
        return add_bias(linear(input, self.weight), self.bias)


def add_bias(x: Float[Tensor, "*B F"], bias: Float[Tensor, " F"] | None) -> Float[Tensor, "*B F"]:
    """`x + bias` in the type of x, where there is one."""
    return x if bias is None else x + bias.to(x.dtype)


class MLP(nn.Module):
    """SwiGLU or GELU feed-forward layer."""

    def __init__(self, width: int, hidden: int, kind: str) -> None:
        super().__init__()
        # two matrices and not one: the gradient of a split is a concatenation, which costs more
        # than the larger product saves
        self.w_gate = Linear(width, hidden) if kind == "swiglu" else None
        self.w_up = Linear(width, hidden)
        self.w_out = Linear(hidden, width)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        if self.w_gate is None:
            return self.w_out(F.gelu(self.w_up(x)))
        return self.w_out(F.silu(self.w_gate(x)) * self.w_up(x))


def input_width(hidden: int, kind: str) -> int:
    """Columns of an expert's first matrix, which holds SwiGLU's two side by side."""
    return 2 * hidden if kind == "swiglu" else hidden


def activate(x: Float[Tensor, "*B F_in"], kind: str) -> Float[Tensor, "*B F"]:
    """The non-linearity between an expert's two matrices."""
    if kind == "gelu":
        return F.gelu(x)
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def look_up_phases(
    table: Float[Tensor, "P 2 half"], positions: Int[Tensor, "B T"]
) -> Float[Tensor, "B T 2 half"]:
    """Each token's rows of the phase table."""
    return table[positions]
