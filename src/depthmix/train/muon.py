"""Muon for CUDA graphs, stacks and sharded matrices; updates matrices of one shape together.

Sharded matrices are exchanged so that each of n processes gets every n-th one whole, computes its
update and sends the parts back: the products are distributed, and each matrix is sent twice. The
caller chooses the parameters and their rates.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

# of each Newton-Schulz iteration, as in torch's Muon
COEFFICIENTS = (3.4445, -4.775, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7


class Muon(Optimizer):
    """torch's Muon updates, scaled to AdamW's size, in a few large products.

    torch's own class handles matrices one by one, and its rates are numbers, which a recorded step
    could not change. Here a parameter may also be a stack of matrices, such as experts' weights.
    Sharded matrices are gathered, each on one process, for the products.
    """

    def __init__(self, params: Any, *, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": 1e-3, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore
        """One step; parameters without a gradient do not change."""
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    *stacked, rows, columns = parameter.shape
                    by_shape[(*stacked, *sorted((rows, columns)))].append(parameter)
            for shape, parameters in by_shape.items():
                self._update(parameters, shape[-1], group)

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
        # 0.2 is about the RMS of an AdamW update (arXiv:2502.16982)
        size = group["lr"] * 0.2 * math.sqrt(longest)
        if _is_shared(parameters[0]):
            exchange = Exchange(parameters)
            updates = exchange.scatter(_find_updates(exchange.gather(ahead), size))
        else:
            updates = _find_updates(ahead, size)
        own = [_get_own(parameter) for parameter in parameters]
        torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(own, updates)


def _find_updates(matrices: Sequence[Tensor], size: float | Tensor) -> list[Tensor]:
    """The updates of matrices, or stacks of them, of the same shape, wide or tall."""
    if not matrices:
        return []
    wide = torch.stack([_lay_wide(matrix) for matrix in matrices])
    update = orthogonalize(wide.flatten(0, -3)).view_as(wide).to(wide.dtype) * size
    return [u.mT if _is_tall(m) else u for m, u in zip(matrices, update, strict=True)]


def orthogonalize(
    matrices: Float[Tensor, "n short long"],
) -> Float[Tensor, "n short long"]:
    """Newton-Schulz: matrices with the same singular vectors, and singular values near 1."""
    a, b, c = COEFFICIENTS
    # a CPU may lack bf16 products
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


def _is_shared(tensor: Tensor) -> bool:
    # a DTensor, whose class is slow to import
    return hasattr(tensor, "full_tensor")


def _get_own(tensor: Any) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if _is_shared(tensor) else tensor


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[-2] > matrix.shape[-1]


def _lay_wide(matrix: Tensor) -> Tensor:
    return matrix.mT if _is_tall(matrix) else matrix


Shape = tuple[int, ...]


class Exchange:
    """For DTensors that are sharded over the last dimension of one mesh, as by `shard_model`."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        mesh = tensors[0].device_mesh
        self.group = mesh.get_group(mesh.ndim - 1)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.dims = [tensor.placements[-1].dim for tensor in tensors]
        places = zip(tensors, self.dims, strict=True)
        self.parts = [cut_shape(tuple(tensor.shape), dim, self.size) for tensor, dim in places]
        """For each tensor, the shapes of its parts."""
        self.owned = [range(rank, len(tensors), self.size) for rank in range(self.size)]
        """For each process, the tensors that it gets."""
        # an empty start, as there may be nothing to send
        self.nothing = tensors[0].to_local().new_empty(0)

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From this process's part of every tensor to the whole tensors that it owns."""
        sent = [[parts[i] for i in owned] for owned in self.owned]
        mine = self.owned[self.rank]
        shapes = [[self.parts[i][sender] for i in mine] for sender in range(self.size)]
        found = zip(*self._send(sent, shapes), strict=True)
        return [torch.cat(pieces, self.dims[i]) for i, pieces in zip(mine, found, strict=True)]

    def scatter(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """From the tensors that this process owns to its part of every one; inverts `gather`."""
        mine = self.owned[self.rank]
        pieces = [
            whole.split([shape[self.dims[i]] for shape in self.parts[i]], self.dims[i])
            for i, whole in zip(mine, wholes, strict=True)
        ]
        sent = [[piece[rank] for piece in pieces] for rank in range(self.size)]
        shapes = [[self.parts[i][self.rank] for i in owned] for owned in self.owned]
        found = self._send(sent, shapes)
        every = {
            i: part
            for owned, given in zip(self.owned, found, strict=True)
            for i, part in zip(owned, given, strict=True)
        }
        return [every[i] for i in sorted(every)]

    def _send(
        self, tensors: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]]
    ) -> list[list[Tensor]]:
        """Send each process its tensors; returns those received, of these shapes."""
        rows = [[tensor.reshape(-1) for tensor in row] for row in tensors]
        sent = torch.cat([self.nothing, *(flat for row in rows for flat in row)])
        sizes = [[math.prod(shape) for shape in row] for row in shapes]
        found = sent.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            found,
            sent,
            [sum(row) for row in sizes],
            [sum(flat.numel() for flat in row) for row in rows],
            group=self.group,
        )
        given = found.split([sum(row) for row in sizes])
        return [
            [flat.view(shape) for flat, shape in zip(part.split(row), wanted, strict=True)]
            for part, row, wanted in zip(given, sizes, shapes, strict=True)
        ]


def cut_shape(shape: Shape, dim: int, num_parts: int) -> list[Shape]:
    """Shapes of the parts of a tensor that FSDP2 shards; the last ones may be empty."""
    step = math.ceil(shape[dim] / num_parts)
    edges = [min(part * step, shape[dim]) for part in range(num_parts + 1)]
    return [(*shape[:dim], end - start, *shape[dim + 1 :]) for start, end in pairwise(edges)]
