"""torch's Muon for steps that are recorded, and for sharded matrices: those of a shape at once.

Knows nothing of models: which parameters are matrices, and their rates, others say.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthmix.train.exchange import Exchange


class Muon(torch.optim.Muon):
    """The same updates, with AdamW's size, from a few large products instead of many small ones.

    torch's own goes through the matrices one by one, and its rates are numbers, which a recorded
    step would keep for good. Matrices that processes share are shared out whole for the products.
    """

    def __init__(self, params: Any, *, weight_decay: float, momentum: float) -> None:
        super().__init__(
            params,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore
        """One step; parameters without a gradient stay."""
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(sorted(parameter.shape))].append(parameter)
            for shape, parameters in by_shape.items():
                self._update(parameters, max(shape), group)

    def _update(self, parameters: list[Tensor], longest: int, group: dict[str, Any]) -> None:
        gradients = [_get_own(p.grad) for p in parameters if p.grad is not None]
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(_get_own(state["momentum_buffer"]))
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
        # 0.2 is about the size of an update of AdamW's (arXiv:2502.16982)
        size = group["lr"] * 0.2 * math.sqrt(longest)
        if _is_shared(parameters[0]):
            exchange = Exchange(parameters)
            updates = exchange.scatter(_find_updates(exchange.gather(ahead), size, group))
        else:
            updates = _find_updates(ahead, size, group)
        own = [_get_own(parameter) for parameter in parameters]
        torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(own, updates)


def _find_updates(
    matrices: Sequence[Tensor], size: float | Tensor, group: dict[str, Any]
) -> list[Tensor]:
    """The updates of matrices of one shape, lying or standing; of none where there are none."""
    if not matrices:
        return []
    wide = torch.stack([_lay_wide(matrix) for matrix in matrices])
    update = orthogonalize(wide, group["ns_coefficients"], group["ns_steps"], group["eps"])
    update = update.to(wide.dtype) * size
    return [u.T if _is_tall(m) else u for m, u in zip(matrices, update, strict=True)]


def orthogonalize(
    matrices: Float[Tensor, "n short long"],
    coefficients: tuple[float, float, float],
    num_steps: int,
    eps: float,
) -> Float[Tensor, "n short long"]:
    """Matrices with the same singular vectors and singular values near 1, by Newton and Schulz."""
    a, b, c = coefficients
    # a CPU may not have products in bf16
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


def _is_shared(tensor: Tensor) -> bool:
    # a DTensor, whose class is slow to import
    return hasattr(tensor, "full_tensor")


def _get_own(tensor: Any) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if _is_shared(tensor) else tensor


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _lay_wide(matrix: Tensor) -> Tensor:
    return matrix.T if _is_tall(matrix) else matrix
