"""The heads that score tokens: the router, and the predictor for causal routing."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from depthmix.kernels import stop_autocast
from depthmix.nn.layers import (
    Linear,
    at_least_float32,
    can_use_whole_norms,
    invert_rms,
    normalize_rms,
)

EPS = 1e-6


class Router(nn.Module):
    """r = w·x for each token, in float32, regardless of the type of the rest of the model."""

    def __init__(
        self, width: int, num_scores: int = 1, *, normalize: bool = False, init_std: float = 0.02
    ) -> None:
        super().__init__()
        self.normalize, self.init_std = normalize, init_std
        self.weight = nn.Parameter(torch.empty(num_scores, width))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T scores"]:
        # bf16 scores tie and flip: 8 bits of mantissa cannot order 2,048 tokens
        x_BTD = normalize_rms(x, EPS) if self.normalize else at_least_float32(x)
        weight = at_least_float32(self.weight)
        if weight.shape[0] == 1 and torch.compiler.is_compiling():
            # as a product and a sum, inductor reads x once, in its own type, beside other uses of
            # it; as a matrix product it writes a float32 copy of x first
            return (x_BTD * weight[0]).sum(dim=-1, keepdim=True)
        with stop_autocast(x):
            return F.linear(x_BTD, weight)


class Predictor(nn.Module):
    """A small MLP that predicts top-k membership from a single token.

    Its input is detached, so that training it does not change the model.
    """

    def __init__(self, width: int, hidden: int, num_scores: int = 1) -> None:
        super().__init__()
        self.w_in = Linear(width, hidden)
        self.w_out = nn.Linear(hidden, num_scores)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T scores"]:
        x = x.detach()
        if can_use_whole_norms():
            hidden = F.gelu(self.w_in(normalize_rms(x, EPS).to(x.dtype)))
        else:
            # (W·x) / rms(x) is W·(x / rms(x)) without a normalised copy of x
            hidden = F.gelu(self.w_in(x) * invert_rms(x, EPS))
        if self.w_out.weight.shape[0] == 1 and torch.compiler.is_compiling():
            # see Router.forward
            return (hidden * self.w_out.weight[0]).sum(dim=-1, keepdim=True) + self.w_out.bias
        scores = at_least_float32(self.w_out(hidden.to(x.dtype)))
        # torch's product with a bias is a view, which cannot be sharded safely; see Decider.forward
        return scores.clone() if torch.is_grad_enabled() else scores
