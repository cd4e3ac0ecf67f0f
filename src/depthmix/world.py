"""The processes that train together: ranks, and collective decisions.

Sets up the process group for torchrun, and raises an error of one process on all of them. A single
process without a group is a world of its own.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class World(NamedTuple):
    """This process among all of them. Every call must be made on every process."""

    rank: int
    size: int
    device: torch.device
    group: Any = None
    """A group on the CPU, as the default group may be NCCL's. None for a single process."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes for all."""
        return self.rank == 0

    def agree(self, *wishes: bool) -> list[bool]:
        """Whether the flag is set on any process."""
        if self.size == 1:
            return list(wishes)
        votes = torch.tensor(wishes, dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
        return [bool(vote) for vote in votes.tolist()]

    def average(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all processes, on the CPU."""
        values = values.detach().to("cpu", torch.float64)
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
            values /= self.size
        return values

    def gather(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on all processes, by rank; an error on one is raised on all."""
        value, error = None, None
        try:
            value = work()
        except Exception as raised:
            error = raised
        outcomes: list[Any] = [(value, error)]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (value, _make_portable(error)), group=self.group)
        for _, raised in outcomes:
            if raised is not None:
                raise raised
        return [value for value, _ in outcomes]

    def do_first(self, work: Callable[[], T]) -> T:
        """The result of `work` on the first process, sent to all."""
        return self.gather(work if self.is_first else lambda: None)[0]  # pyrefly: ignore


def choose_device(wanted: str | None) -> str:
    """The requested device; by default, a GPU if there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is visible to torch: leave out --device cuda")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def open_world(device: str | None = None) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    kind = choose_device(device)
    place = torch.device(kind)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield World(0, 1, place)
        return
    if kind == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    # gloo beside NCCL, for tensors on the CPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        yield join_world(place)
    finally:
        dist.destroy_process_group()


def join_world(device: torch.device | None = None) -> World:
    """The processes of the default group, in a new group; by default on the CPU.

    Each thread needs its own group: two in the same group would take each other's messages.
    """
    device = device or torch.device("cpu")
    if _is_alone():
        return World(0, 1, device)
    group = dist.new_group(backend="gloo")
    return World(dist.get_rank(), dist.get_world_size(), device, group)


def average_on_device(values: torch.Tensor) -> torch.Tensor:
    """The mean over the processes of the default group, on their device; never waits for a GPU."""
    if _is_alone():
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _make_portable(error: Exception | None) -> Exception | None:
    # an exception that cannot be sent would leave the other processes waiting
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
