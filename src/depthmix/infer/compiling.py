"""A model whose layers run compiled for a while, or are replaced.

Knows nothing of what is computed with it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from depthmix.nn import Transformer

MOST_SHAPES = 64


@contextmanager
def compiled_layers(
    model: Transformer,
    *,
    compile: bool,
    replaced: Mapping[int, Callable[..., object]] | None = None,
) -> Iterator[None]:
    """Layers run compiled inside, one by one, so that equal ones share their code.

    `replaced` are called in the place of the layers of these numbers.
    """
    for index, layer in enumerate(model.layers):
        if replaced and index in replaced:
            layer._compiled_call_impl = replaced[index]
        elif compile:
            layer.compile(fullgraph=True, dynamic=False)
    try:
        # each size of a batch or a prompt is compiled apart, and torch would stop at eight
        with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
            yield
    finally:
        # what is not recorded has as many shapes as lengths, and runs as it is
        for layer in model.layers:
            layer._compiled_call_impl = None
