"""Keys and values of past tokens, with a separate length for every layer and sequence.

A routed block's cache stores only its routed tokens, with their true positions. Ids of past tokens
are kept too, for models that look up n-grams.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.nn.attention import Place, attend, make_mask
from depthmix.nn.ngrams import NO_TOKEN


class Stored(NamedTuple):
    """A layer's cache as attention reads it."""

    key: Float[Tensor, "B S G H"]
    value: Float[Tensor, "B S G H"]
    positions: Int[Tensor, "B S"]
    valid: Bool[Tensor, "B S"]


class LayerCache:
    """One layer's keys and values; tokens are appended row by row, each row at its own end."""

    most: int | None = None

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        num_kv_heads: int,
        head_width: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        compact: bool,
    ) -> None:
        self.compact = compact
        # one slot more than is ever read: what has no place is written there
        shape = (batch_size, num_slots + 1, num_kv_heads, head_width)
        # zeros, because attention multiplies unread slots by a weight of zero
        self.key = torch.zeros(shape, device=device, dtype=dtype)
        self.value = torch.zeros(shape, device=device, dtype=dtype)
        self.positions = torch.zeros(shape[:2], device=device, dtype=torch.long)
        self.lengths = torch.zeros(batch_size, device=device, dtype=torch.long)

    def append(
        self,
        key: Float[Tensor, "B T G H"],
        value: Float[Tensor, "B T G H"],
        positions: Int[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None,
    ) -> Stored:
        """Store the valid tokens at each row's end, in order; returns all that is stored."""
        batch_size, num_tokens = key.shape[:2]
        num_slots = self.key.shape[1] - 1
        if valid is None:
            valid = torch.ones((batch_size, num_tokens), device=key.device, dtype=torch.bool)
        place_BT = self.lengths[:, None] + valid.cumsum(dim=1) - 1
        slot_BT = torch.where(valid, place_BT, num_slots)
        row_B1 = torch.arange(batch_size, device=key.device)[:, None]
        self.key[row_B1, slot_BT] = key.to(self.key.dtype)
        self.value[row_B1, slot_BT] = value.to(self.value.dtype)
        self.positions[row_B1, slot_BT] = positions.expand(batch_size, -1)
        self.lengths += valid.sum(dim=1)
        slot_S = torch.arange(num_slots, device=key.device)
        return Stored(
            key=self.key[:, :num_slots].to(key.dtype),
            value=self.value[:, :num_slots].to(value.dtype),
            positions=self.positions[:, :num_slots],
            valid=slot_S < self.lengths[:, None],
        )

    def attend(
        self,
        query: Float[Tensor, "B T N H"],
        key: Float[Tensor, "B S G H"],
        value: Float[Tensor, "B S G H"],
        place: Place,
        source: Place,
    ) -> Float[Tensor, "B T N H"]:
        """Store, then attend to all that is stored; a row is one document."""
        stored = self.append(key, value, source.positions, source.valid)
        mask = make_mask(place, stored.positions, None, stored.valid)
        return attend(query, stored.key, stored.value, mask)


class PastIds:
    """The ids of each row by position, for models with a memory; padding has none."""

    def __init__(self, num_rows: int, num_positions: int, device: torch.device | str) -> None:
        # one place more than is ever read: padding is written there
        shape = (num_rows, num_positions + 1)
        self.ids = torch.zeros(shape, device=device, dtype=torch.long)

    def recall(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "#B T"],
        present: Bool[Tensor, "B T"] | None,
        count: int,
        rows: Int[Tensor, "B T"] | None = None,
    ) -> Int[Tensor, "B T past"]:
        """Store these ids, and return the ids before each; `rows` if a row here holds several."""
        positions = positions.expand_as(tokens)
        at = positions if present is None else positions.where(present, self.ids.shape[1] - 1)
        if rows is None:
            rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
        self.ids[rows, at] = tokens
        back = torch.arange(1, count + 1, device=tokens.device)
        before_BTn = positions[..., None] - back
        ids_BTn = self.ids[rows[..., None], before_BTn.clamp(min=0)]
        return ids_BTn.where(before_BTn >= 0, NO_TOKEN)

    def grow(self, num_positions: int) -> None:
        """Make room for more positions."""
        self.ids = widen(self.ids, num_positions)


def widen(held: Shaped[Tensor, "B S *rest"], num_slots: int) -> Shaped[Tensor, "B S2 *rest"]:
    """Room for `num_slots` slots in each row, and one more, which stays the last."""
    missing = num_slots + 1 - held.shape[1]
    if missing <= 0:
        return held
    more = held.new_zeros((held.shape[0], missing, *held.shape[2:]))
    return torch.cat([held[:, :-1], more, held[:, -1:]], dim=1)


class Cache:
    """The caches of all layers, and how many tokens each row has seen.

    >>> model = Transformer(load_preset("tiny"))
    >>> cache = Cache(model.config, batch_size=1, num_tokens=16)
    >>> prompt = model(torch.tensor([[1, 2, 3]]), selector="predictor", cache=cache)
    >>> after = model(prompt.logits[:, -1:].argmax(-1), selector="predictor", cache=cache)
    >>> int(cache.seen), after.logits.shape
    (4, torch.Size([1, 1, 256]))
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        num_tokens: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        compact: bool | None = None,
    ) -> None:
        """Room for `num_tokens` tokens in each row, even if a router keeps all of them.

        `compact` computes kept tokens only; False keeps shapes independent of the
        routing and never waits for the device. Unless given, a CPU computes kept tokens only.
        """
        if num_tokens > config.max_seq_len:
            raise ValueError(
                f"a cache of {num_tokens} tokens is longer than max_seq_len = "
                f"{config.max_seq_len}: ask for fewer, or override max_seq_len"
            )
        self.batch_size = batch_size
        self.num_tokens = num_tokens
        # an upper bound kept on the host: no row can hold more, and asking costs no device sync
        self.num_appended = 0
        self.seen = torch.zeros(batch_size, device=device, dtype=torch.long)
        kv_heads, head_width = config.shape.num_kv_heads, config.shape.head_width
        device = torch.device(device)
        compact = device.type == "cpu" if compact is None else compact
        self.layers = [
            LayerCache(batch_size, num_tokens, kv_heads, head_width, device, dtype, compact=compact)
            for _ in range(config.num_layers)
        ]
        self.past = PastIds(batch_size, num_tokens, device) if config.has_memory else None

    def recall(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        present: Bool[Tensor, "B T"] | None,
        count: int,
    ) -> Int[Tensor, "B T past"]:
        """The ids before each token, nearest first."""
        assert self.past is not None
        return self.past.recall(tokens, positions, present, count)

    def advance(
        self, num_rows: int, num_tokens: int, present: Bool[Tensor, "B T"] | None
    ) -> Int[Tensor, "B T"]:
        """Positions of the next tokens of each row; padding takes none."""
        if num_rows != self.batch_size:
            raise ValueError(
                f"the cache was made for {self.batch_size} rows, the tokens have {num_rows}"
            )
        if self.num_appended + num_tokens > self.num_tokens:
            raise ValueError(
                f"the cache has room for {self.num_tokens} tokens, {self.num_appended} are taken "
                f"and {num_tokens} more were given: make a larger Cache"
            )
        self.num_appended += num_tokens
        if present is None:
            present = torch.ones((num_rows, num_tokens), device=self.seen.device, dtype=torch.bool)
        positions_BT = (self.seen[:, None] + present.cumsum(dim=1) - 1).clamp(min=0)
        self.seen += present.sum(dim=1)
        return positions_BT
