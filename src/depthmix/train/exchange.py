"""Whole matrices from sharded ones: each process gets every n-th, and gives its parts back.

So products that need whole matrices are shared out like everything else, and what is sent is each
matrix twice. Knows nothing of what is done with them.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Shape = tuple[int, ...]


class Exchange:
    """For DTensors of one mesh whose last dimension shares them out, as `shard_model` does."""

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
        # begins what is sent: there may be nothing else
        self.nothing = tensors[0].to_local().new_empty(0)

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """From this process's part of every tensor, the whole of those that it owns."""
        sent = [[parts[i] for i in owned] for owned in self.owned]
        mine = self.owned[self.rank]
        shapes = [[self.parts[i][sender] for i in mine] for sender in range(self.size)]
        found = zip(*self._send(sent, shapes), strict=True)
        return [torch.cat(pieces, self.dims[i]) for i, pieces in zip(mine, found, strict=True)]

    def scatter(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """From the tensors that this process owns, its part of every one: `gather`'s inverse."""
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
        """Give each process its tensors; returns what each gave, of these shapes."""
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
    """Shapes of the parts of a tensor that is cut as FSDP2 does it: the last ones may be empty."""
    step = math.ceil(shape[dim] / num_parts)
    edges = [min(part * step, shape[dim]) for part in range(num_parts + 1)]
    return [(*shape[:dim], end - start, *shape[dim + 1 :]) for start, end in pairwise(edges)]
