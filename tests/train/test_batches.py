"""Batches on a device, and those that every validation sees."""

from pathlib import Path

import numpy as np
import torch

from depthmix.data.shards import Corpus
from depthmix.train.batches import make_val_loader, move_batch, read_val_batches
from tiny_runs import write_data

SHAPE = {"seq_len": 16, "batch_size": 2, "seed": 0}


def test_validations_see_the_same_batches(tmp_path: Path) -> None:
    corpus = Corpus.open(write_data(tmp_path / "data"))
    loader = make_val_loader(corpus, SHAPE)
    assert loader is not None
    first = list(read_val_batches(loader, 2))
    again = list(read_val_batches(loader, 2))
    assert len(first) == 2
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
    most = loader.num_rows_per_epoch // 2
    assert len(list(read_val_batches(loader, 10**6))) == most
    assert len(list(read_val_batches(loader, 1))) == 1
    assert make_val_loader(corpus, {**SHAPE, "seq_len": 10**6}) is None


def test_documents_come_where_they_are_told_apart(tmp_path: Path) -> None:
    loader = make_val_loader(Corpus.open(write_data(tmp_path / "data")), SHAPE)
    assert loader is not None
    batch = loader.next()
    tokens, targets, documents = move_batch(batch, torch.device("cpu"), document_mask=True)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert documents is not None
    assert documents.tolist() == batch.documents.tolist()
    assert move_batch(batch, torch.device("cpu"), document_mask=False)[2] is None
