"""Work on a GPU as a graph: recorded once, replayed without asking the host.

Knows nothing of what the work is.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
WARMUP_RUNS = 3


@contextmanager
def _without_collections() -> Iterator[None]:
    """A graph that is collected while another one is captured would spoil the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def record_graph(
    work: Callable[[], Result],
    restore: Callable[[], None] | None = None,
    *,
    num_runs: int = WARMUP_RUNS,
    pool: Any = None,
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The work as a graph, and the tensors that a replay writes.

    It is run some times before, so that kernels are compiled and libraries loaded; `restore` undoes
    what such a run changed. Recording itself computes nothing. Graphs of one `pool` share the
    memory of what they compute on the way, so they must not run side by side, nor leave results in
    it.
    """
    side = _find_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(num_runs):
            work()
            if restore is not None:
                restore()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # other threads may use the device meanwhile
    capture = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    with _without_collections(), capture:
        result = work()
    return graph, result


@cache
def _find_stream(device: int) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps tens of megabytes for every stream that it has seen."""
    return torch.cuda.Stream(device)
