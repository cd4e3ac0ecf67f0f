"""CUDA graphs: GPU work recorded once and replayed without the host.

Knows nothing of what the work is.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
WARMUP_RUNS = 3

turns = threading.RLock()
"""Held while work is recorded or launched, since each thread may have an engine. Captures share a
stream. And if two kernels whose programs wait for each other ran on two streams, each might occupy
part of the device, and neither would have all its programs running."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause garbage collection: destroying a graph during a capture would invalidate it."""
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
    """Return the work as a graph, and the tensors that a replay writes.

    The work first runs `num_runs` times, so that kernels are compiled and libraries loaded;
    `restore` undoes the changes of such a run. Recording itself computes nothing. Graphs that share
    a `pool` share memory for intermediate results, so they must not run concurrently, nor leave
    results in it.
    """
    with turns:
        side = _find_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(num_runs):
                work()
                if restore is not None:
                    restore()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device during the capture
        capture = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        with _without_collections(), capture:
            result = work()
        return graph, result


@cache
def _find_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps tens of megabytes per stream it has seen."""
    return torch.cuda.Stream(device)
