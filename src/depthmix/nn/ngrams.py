"""A memory of n-grams: vectors looked up by a hash of the last token ids, not computed.

Owns the tables, which all blocks share, and a block's way to read them; the ids that decoding has
to remember are in `cache`. Sequences and packed documents never share an n-gram.
"""

import hashlib
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthmix.config import MemoryConfig
from depthmix.nn.layers import Linear
from depthmix.nn.router import Router

# a prime; sums of ids times factors below it stay far from overflow in int64
_MODULUS = 2**31 - 1
# an id that stands for "no token": before the first one of a document
NO_TOKEN = -1


class NgramTables(nn.Module):
    """One table for each n and hash, concatenated; new tables hold zeros and change nothing."""

    def __init__(self, config: MemoryConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.num_tables, self.num_rows = config.num_tables, config.num_rows
        # a single matrix, so that one kernel reads all tables
        self.rows = nn.Embedding(self.num_tables * self.num_rows, width // self.num_tables)

    def forward(
        self, tokens: Int[Tensor, "B T"], previous: Int[Tensor, "B T past"]
    ) -> Float[Tensor, "B T W"]:
        """The vectors of each token's n-grams; `previous` are the ids before it, nearest first."""
        row_BTt = hash_ngrams(tokens, previous, self.config)
        first_t = torch.arange(self.num_tables, device=tokens.device) * self.num_rows
        return self.rows(row_BTt + first_t).flatten(2)


class Lookup(nn.Module):
    """(1 + tanh(w·x / rms(x))) · P m: a token's n-grams, projected, with a learned factor."""

    def __init__(self, memory_width: int, width: int) -> None:
        super().__init__()
        self.projection = Linear(memory_width, width)
        self.gate = Router(width, normalize=True, init_std=0.0)

    def forward(
        self, x: Float[Tensor, "B T D"], found: Float[Tensor, "B T W"]
    ) -> Float[Tensor, "B T D"]:
        factor = 1 + torch.tanh(self.gate(x))
        return (factor * self.projection(found.to(x.dtype))).to(x.dtype)


def hash_ngrams(
    tokens: Int[Tensor, "B T"], previous: Int[Tensor, "B T past"], config: MemoryConfig
) -> Int[Tensor, "B T tables"]:
    """The row of each token's n-grams in each table; the same on every device and in every run."""
    # 0 stands for no token
    ids_BTn = torch.cat([tokens[..., None], previous], dim=2) + 1
    sums: list[Tensor] = []
    for length in config.ngrams:
        for number in range(config.num_hashes):
            first, *rest = list_factors(length, number)
            sum_BT = ids_BTn[..., 0] * first
            for back, factor in enumerate(rest, 1):
                sum_BT = sum_BT + ids_BTn[..., back] * factor
            sums.append(sum_BT)
    return torch.stack(sums, dim=2) % _MODULUS % config.num_rows


@cache
def list_factors(length: int, number: int) -> tuple[int, ...]:
    """The factors of the last `length` ids in one of that length's hashes, drawn by SHA-256."""
    digests = (
        hashlib.sha256(f"{length} {number} {place}".encode()).digest() for place in range(length)
    )
    return tuple(int.from_bytes(digest[:8]) % (_MODULUS - 1) + 1 for digest in digests)


def list_previous(
    tokens: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None, count: int
) -> Int[Tensor, "B T past"]:
    """The ids before each token in its document, nearest first; `NO_TOKEN` where there is none."""
    found = []
    for back in range(1, count + 1):
        ids_BT = _shift(tokens, back)
        if documents is not None:
            ids_BT = ids_BT.where(_shift(documents, back) == documents, NO_TOKEN)
        found.append(ids_BT)
    return torch.stack(found, dim=2) if found else tokens[..., None][..., :0]


def _shift(values: Int[Tensor, "B T"], back: int) -> Int[Tensor, "B T"]:
    head = torch.full_like(values[:, :back], NO_TOKEN)
    return torch.cat([head, values[:, : max(0, values.shape[1] - back)]], dim=1)
