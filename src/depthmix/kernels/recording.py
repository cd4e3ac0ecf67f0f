"""Work on a GPU as a graph: recorded once, replayed without asking the host.

Knows nothing of what the work is.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
WARMUP_RUNS = 3


def record_graph(
    work: Callable[[], Result], restore: Callable[[], None] | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The work as a graph, and the tensors that a replay writes.

    It is run some times before, so that kernels are compiled and libraries loaded; `restore` undoes
    what such a run changed. Recording itself computes nothing.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_RUNS):
            work()
            if restore is not None:
                restore()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result
