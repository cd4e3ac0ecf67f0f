"""How deep each token went, and what it cost: counted, not estimated.

Attention counts the (query, key) pairs that the causal mask allows, and the head counts the tokens
whose logits were requested. Does not depend on torch.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from depthmix.config import ModelConfig
from depthmix.flops import count_lookups, list_blocks, matrix_sizes

Path = tuple[bool, ...]
"""Which routed blocks a token went through, in order."""


class Usage(NamedTuple):
    """Work spent on some tokens of one sequence, over all layers."""

    num_visits: int
    """Block visits: the blocks run, counted once per token."""
    num_routed_visits: int
    """Visits to routed blocks."""
    num_expert_visits: int
    """Visits to blocks with experts."""
    num_stored: int
    """Keys and values stored."""
    num_routed_stored: int
    """Keys and values stored in routed blocks."""
    num_pairs: int
    """(query, key) pairs computed by attention."""
    num_expert_pairs: int
    """(token, expert) pairs computed by experts."""


class Paths(Sequence[Path]):
    """Paths of tokens, one byte per routed block; decoded on access, as few users read them all."""

    def __init__(self, taken: bytes, num_tokens: int) -> None:
        self.taken, self.num_tokens = taken, num_tokens
        self.num_routes = len(taken) // num_tokens if num_tokens else 0

    def __len__(self) -> int:
        return self.num_tokens

    @overload
    def __getitem__(self, index: int) -> Path: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Path, ...]: ...

    def __getitem__(self, index: int | slice) -> Path | tuple[Path, ...]:
        numbers = range(self.num_tokens)[index]
        if isinstance(numbers, int):
            return self._read(numbers)
        return tuple(map(self._read, numbers))

    def __iter__(self) -> Iterator[Path]:
        return map(self._read, range(self.num_tokens))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Paths of {self.num_tokens} tokens through {self.num_routes} routed blocks"

    def _read(self, number: int) -> Path:
        begin = number * self.num_routes
        return tuple(map(bool, self.taken[begin : begin + self.num_routes]))


class Trail:
    """Collects the paths of a sample's tokens as they are computed."""

    def __init__(self) -> None:
        self.taken, self.num_tokens = bytearray(), 0

    def add(self, start: int, count: int, taken: bytes) -> None:
        """Record the paths of `count` tokens from position `start`, one byte per routed block.

        Tokens recomputed after a preemption take the same paths as before.
        """
        num_again = self.num_tokens - start
        if num_again > 0:
            num_again = min(count, num_again)
            taken = taken[num_again * (len(taken) // count) :]
            start, count = self.num_tokens, count - num_again
        self.num_tokens = start + count
        self.taken += taken

    def read(self) -> Paths:
        """Return all paths so far."""
        return Paths(bytes(self.taken), self.num_tokens)


class Depth(NamedTuple):
    """Where a sequence's compute went."""

    blocks: Sequence[Path]
    """For every token computed, starting with the prompt: which routed blocks it went through, in
    order."""
    flops: int
    """FLOPs spent; tokens computed twice count twice."""
    dense_flops: int
    """FLOPs of the same work if every token went through every block."""
    num_visits: int
    """Block visits, counted once per token and block run; all blocks, not only routed ones."""
    num_visits_dense: int
    """Block visits if every token went through every block."""

    @property
    def share_saved(self) -> float:
        """Fraction of the dense FLOPs that was saved."""
        return 1 - self.flops / self.dense_flops if self.dense_flops else 0.0

    @property
    def share_executed(self) -> float:
        """Fraction of the dense block visits that took place."""
        return self.num_visits / self.num_visits_dense if self.num_visits_dense else 1.0


def join_depths(depths: Sequence[Depth]) -> Depth:
    """Merge the compute of several sequences."""
    blocks = tuple(path for depth in depths for path in depth.blocks)
    return Depth(blocks, *(sum(column) for column in list(zip(*depths, strict=True))[1:]))


class DepthMeter:
    """Sums up one sample's compute."""

    def __init__(self, config: ModelConfig, selector: str | None = None) -> None:
        sizes, blocks = matrix_sizes(config), list(list_blocks(config))
        self.sizes, self.num_layers = sizes, len(blocks)
        self.num_deciders = sum(block.num_deciders for block in blocks)
        # a predictor decides without the router, which then scores kept tokens only
        self.num_scoring = 0 if selector == "predictor" else self.num_deciders
        self.decoupled = config.routing.kv_capacity is not None
        # a bypass is computed for the tokens that skip its block
        self.num_bypasses = len(config.bypass_layers)
        self.num_lookups = count_lookups(config) - self.num_bypasses
        self.pair_flops = 4 * config.num_heads * config.shape.head_width
        # one token through all blocks, without depth routing
        num_expert_blocks = sum(block.has_experts for block in blocks)
        places = round(num_expert_blocks * config.experts.capacity)
        self.dense_weights = (
            self.num_layers * (sizes.query + sizes.out + sizes.key_value)
            + (self.num_layers - num_expert_blocks) * sizes.mlp
            + num_expert_blocks * (sizes.expert_router + sizes.expert_predictor)
            + places * sizes.expert
            + self.num_lookups * sizes.lookup
        )
        self._used = Usage(0, 0, 0, 0, 0, 0, 0)
        self.num_tokens = self.num_dense_pairs = 0

    def copy(self) -> "DepthMeter":
        """Return a new, empty meter for the same model."""
        other = object.__new__(DepthMeter)
        other.__dict__ |= self.__dict__
        other._used = Usage(0, 0, 0, 0, 0, 0, 0)
        other.num_tokens = other.num_dense_pairs = 0
        return other

    def add(self, count: int, used: Usage) -> None:
        """Add the work spent on the sample's first `count` tokens.

        Called whenever the sample gives up its place in the cache, so tokens computed twice count
        twice.
        """
        self._used = Usage(*map(operator.add, self._used, used))
        self.num_tokens += count
        self.num_dense_pairs += self.num_layers * count * (count + 1) // 2

    def read(self, num_logits: int, paths: Sequence[Path]) -> Depth:
        """Return the total so far, given the number of tokens whose logits were requested."""
        used, sizes, count = self._used, self.sizes, self.num_tokens
        weights = used.num_visits * (sizes.query + sizes.out) + used.num_stored * sizes.key_value
        weights += (used.num_visits - used.num_expert_visits) * sizes.mlp
        weights += used.num_expert_visits * (sizes.expert_router + sizes.expert_predictor)
        weights += used.num_expert_pairs * sizes.expert
        # a deciding router scores every token, and the kept ones again for the gate
        num_scored = count * self.num_scoring + used.num_routed_visits
        num_scored += used.num_routed_stored if self.decoupled else 0
        weights += num_scored * sizes.depth_router
        weights += count * self.num_deciders * sizes.depth_predictor
        num_looked_up = count * (self.num_lookups + self.num_bypasses)
        num_looked_up -= used.num_routed_visits if self.num_bypasses else 0
        weights += num_looked_up * sizes.lookup
        head = num_logits * sizes.head
        return Depth(
            blocks=paths,
            flops=2 * (weights + head) + used.num_pairs * self.pair_flops,
            dense_flops=2 * (count * self.dense_weights + head)
            + self.num_dense_pairs * self.pair_flops,
            num_visits=used.num_visits,
            num_visits_dense=count * self.num_layers,
        )
