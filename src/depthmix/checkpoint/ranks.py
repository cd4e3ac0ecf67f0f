"""What several ranks must agree on: gathered values, and an error of one raised on all.

Knows nothing of checkpoints. One process without a process group is one rank.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The ranks of the default process group, with a group of their own on the CPU.

    Of their own, because a background thread must not share a group with the training; on the
    CPU, because the default one may be NCCL's. Making it is a collective call.
    """

    def __init__(self) -> None:
        self.rank, self.count = 0, 1
        self.group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
            self.group = dist.new_group(backend="gloo")

    def gather(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, by rank. What it raises on one, every rank raises."""
        value, error = None, None
        try:
            value = work()
        except Exception as raised:
            error = raised
        outcomes: list[Any] = [(value, error)]
        if self.group is not None:
            outcomes = [None] * self.count
            dist.all_gather_object(outcomes, (value, _make_portable(error)), group=self.group)
        for _, raised in outcomes:
            if raised is not None:
                raise raised
        return [value for value, _ in outcomes]

    def do_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, told to all."""
        return self.gather(work if self.rank == 0 else lambda: None)[0]  # pyrefly: ignore


def _make_portable(error: Exception | None) -> Exception | None:
    # one that cannot be sent would leave the other ranks waiting
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
