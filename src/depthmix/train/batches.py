"""Batches as training uses them: on its device, and those of a validation.

Knows nothing of models.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from depthmix.data.loader import Batch, Loader
from depthmix.data.shards import Corpus

TokenBatch = tuple[Int[Tensor, "B T"], Int[Tensor, "B T"], Int[Tensor, "B T"] | None]


def move_batch(batch: Batch, device: torch.device, *, document_mask: bool) -> TokenBatch:
    """A batch as tensors on a device; without the mask, a row is one document."""
    arrays = (batch.tokens, batch.targets, batch.documents if document_mask else None)
    tensors = [None if a is None else torch.from_numpy(a.astype(np.int64)) for a in arrays]
    if device.type == "cuda":
        tensors = [
            None if t is None else t.pin_memory().to(device, non_blocking=True) for t in tensors
        ]
    tokens, targets, documents = tensors
    assert tokens is not None
    assert targets is not None
    return tokens, targets, documents


def make_val_loader(corpus: Corpus, shape: dict[str, Any]) -> Loader | None:
    """The validation split in its own order; None where it is shorter than one row."""
    split = corpus.split("val")
    if split.num_tokens <= shape["seq_len"]:
        return None
    return Loader(split, **shape, shuffle=False)


def read_val_batches(loader: Loader, num_batches: int) -> Iterator[Batch]:
    """The same first batches every time, at least one and at most a whole epoch."""
    loader.position = 0
    for _ in range(min(num_batches, max(1, loader.num_rows_per_epoch // loader.batch_size))):
        yield loader.next()
