"""transformers' caches over depthmix's own: a layer stores its routed tokens, and counts all.

The classes name themselves in transformers' table of layer types, so that `DynamicCache`,
`StaticCache` and `generate` make them without knowing them. Knows nothing of the model.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from depthmix.config import ModelConfig
from depthmix.hf.config import LAYER_TYPE
from depthmix.nn.attention import Place
from depthmix.nn.cache import LayerCache, PastIds, widen


class PastLayer:
    """What both kinds of layers share: stored tokens, and how many each row has seen."""

    compact: bool
    most: int | None = None
    keys: Tensor | None
    values: Tensor | None
    store: LayerCache | None = None
    counts: Int[Tensor, " B"] | None = None
    """Tokens that each row has seen, stored or not; padding is none."""
    past: PastIds | None = None
    """The ids seen, in the first layer of a model with a memory."""

    def see(self, num_rows: int, num_tokens: int, present: Tensor | None, device: object) -> None:
        """Count the tokens of a forward pass, whether or not they will be stored."""
        self.make_counts(num_rows, device)
        assert self.counts is not None
        self.counts += num_tokens if present is None else present.sum(dim=1)

    def make_counts(self, num_rows: int, device: object) -> None:
        """Begin with rows that have seen nothing."""
        if self.counts is None:
            self.counts = torch.zeros(num_rows, dtype=torch.long, device=device)  # pyrefly: ignore

    def make_past(self, num_rows: int, num_positions: int, device: torch.device) -> PastIds:
        """The ids seen so far, with room for so many of each row."""
        if self.past is None:
            self.past = PastIds(num_rows, num_positions, device)
        self.past.grow(num_positions)
        return self.past

    def make_store(self, keys: Float[Tensor, "B G S H"], num_slots: int) -> LayerCache:
        """Empty room for so many tokens of each row."""
        num_rows, num_heads, _, width = keys.shape
        self.dtype, self.device = keys.dtype, keys.device
        self.make_counts(num_rows, keys.device)
        self.is_initialized = True
        return LayerCache(
            num_rows, num_slots, num_heads, width, keys.device, keys.dtype, compact=self.compact
        )

    def attend(
        self,
        query: Float[Tensor, "B T N H"],
        key: Float[Tensor, "B S G H"],
        value: Float[Tensor, "B S G H"],
        place: Place,
        source: Place,
    ) -> Float[Tensor, "B T N H"]:
        """Store the new keys and values, then attend to all that is stored."""
        if self.store is None:
            self.lazy_initialization(key.transpose(1, 2), value.transpose(1, 2))
        assert self.store is not None
        self.make_room(self.store, key.shape[1], source)
        return self.store.attend(query, key, value, place, source)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the store; transformers' name for it."""
        raise NotImplementedError

    def make_room(self, store: LayerCache, num_keys: int, source: Place) -> None:
        """For the tokens that are stored next."""

    def show(self, store: LayerCache) -> None:
        """Keys and values where transformers looks for them, and in its order of dimensions."""
        self.keys, self.values = (t[:, :-1].transpose(1, 2) for t in (store.key, store.value))

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Take the rows of these numbers, one for each row."""
        self.take_rows(beam_idx)

    def take_rows(self, index: Int[Tensor, " rows"]) -> None:
        """Take the rows of these numbers, any number of them."""
        if self.counts is not None:
            self.counts = _take(self.counts, index)
        if self.past is not None:
            self.past.ids = _take(self.past.ids, index)
        store = self.store
        if store is not None:
            store.key, store.value = _take(store.key, index), _take(store.value, index)
            store.positions = _take(store.positions, index)
            store.lengths = _take(store.lengths, index)
            self.show(store)


class DynamicPastLayer(PastLayer, DynamicLayer):
    """Grows to what the fullest row has stored, and computes kept tokens only."""

    _layer_type = LAYER_TYPE
    compact = True

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self.store = self.counts = self.keys = self.values = self.past = None
        self.present: Bool[Tensor, "B seen"] | None = None
        """Which of the columns seen are tokens; None while all are."""
        self.num_seen = self.num_stored = 0
        self.is_initialized = False

    def see(self, num_rows: int, num_tokens: int, present: Tensor | None, device: object) -> None:
        """Count the tokens of a forward pass, whether or not they will be stored."""
        super().see(num_rows, num_tokens, present, device)
        assert self.counts is not None
        if present is not None or self.present is not None:
            before = self.present
            if before is None:
                before = self.counts.new_ones((num_rows, self.num_seen), dtype=torch.bool)
            if present is None:
                present = self.counts.new_ones((num_rows, num_tokens), dtype=torch.bool)
            self.present = torch.cat([before, present], dim=1)
        self.num_seen += num_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the store, with room for nothing."""
        self.store = self.make_store(key_states, 0)

    def make_room(self, store: LayerCache, num_keys: int, source: Place) -> None:
        """For what the fullest row will have stored."""
        if source.valid is None:
            self.num_stored += num_keys
        else:
            self.num_stored = int((store.lengths + source.valid.sum(dim=1)).max())
        for name in ("key", "value", "positions"):
            setattr(store, name, widen(getattr(store, name), self.num_stored))
        self.show(store)

    def get_seq_length(self) -> int:
        """Tokens seen, which is where the next one stands."""
        return self.num_seen

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last tokens seen: -n removes n, and n leaves n, as transformers has it."""
        number = int(tokens_to_remove)
        removed = min(self.num_seen, -number) if number <= 0 else max(0, self.num_seen - number)
        if removed == 0 or self.counts is None:
            return
        self.num_seen -= removed
        if self.present is None:
            self.counts = self.counts - removed
        else:
            self.present = self.present[:, : self.num_seen]
            self.counts = self.present.sum(dim=1)
        if self.store is not None:
            # positions ascend in a row, so what goes stands last
            slot_S = torch.arange(self.store.positions.shape[1], device=self.counts.device)
            stored = slot_S < self.store.lengths[:, None]
            stored &= self.store.positions < self.counts[:, None]
            self.store.lengths = stored.sum(dim=1)
            self.num_stored = int(self.store.lengths.max())

    def take_rows(self, index: Int[Tensor, " rows"]) -> None:
        """Take the rows of these numbers, any number of them."""
        super().take_rows(index)
        if self.present is not None:
            self.present = _take(self.present, index)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        if self.counts is not None:
            rows = torch.arange(len(self.counts), device=self.counts.device)
            self.take_rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only."""
        if self.counts is not None:
            self.take_rows(torch.arange(len(self.counts), device=self.counts.device)[indices])

    def reset(self) -> None:
        """Begin again."""
        self.forget()


class StaticPastLayer(PastLayer, StaticLayer):
    """A slot for each token that may come, and shapes that never change, as compilation needs."""

    _layer_type = LAYER_TYPE
    compact = False

    def see(self, num_rows: int, num_tokens: int, present: Tensor | None, device: object) -> None:
        """Count the tokens of a forward pass, whether or not they will be stored."""
        super().see(num_rows, num_tokens, present, device)
        self.cumulative_length.add_(num_tokens)  # pyrefly: ignore[missing-attribute]

    def make_counts(self, num_rows: int, device: object) -> None:
        """Begin with rows that have seen nothing."""
        super().make_counts(num_rows, device)
        self.cumulative_length = self.cumulative_length.to(device)  # pyrefly: ignore

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the store, with room for all that may come."""
        self.store = store = self.make_store(key_states, self.max_cache_len)
        self.show(store)
        if not torch.compiler.is_compiling():
            # else a recorded step would copy them each time
            held = [store.key, store.value, store.positions, store.lengths, self.counts]
            held += [] if self.past is None else [self.past.ids]
            for tensor in (*held, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)

    def reset(self) -> None:
        """Begin again, in the same memory."""
        self.cumulative_length.zero_()  # pyrefly: ignore[missing-attribute]
        if self.counts is not None:
            self.counts.zero_()
        if self.store is not None:
            self.store.lengths.zero_()


class PastTokens:
    """A transformers cache as the model reads it: a `ModelCache`."""

    def __init__(self, cache: Cache, config: ModelConfig, device: torch.device) -> None:
        """Refuses a cache that was made for another kind of model."""
        if not cache.layers:
            # made without a configuration, which says what its layers are
            cache.layers = [DynamicPastLayer() for _ in range(config.num_layers)]
        layers = [layer for layer in cache.layers if isinstance(layer, PastLayer)]
        if len(layers) != len(cache.layers) or len(layers) != config.num_layers:
            raise ValueError(
                "past_key_values was not made for this model: use DynamicCache(config=model.config)"
            )
        self.layers, self.max_seq_len, self.device = layers, config.max_seq_len, device

    def advance(
        self, num_rows: int, num_tokens: int, present: Bool[Tensor, "B T"] | None
    ) -> Int[Tensor, "B T"]:
        """Positions of the next tokens of each row; padding takes none."""
        first = self.layers[0]
        first.make_counts(num_rows, self.device)
        assert first.counts is not None
        if len(first.counts) != num_rows:
            raise ValueError(
                f"past_key_values holds {len(first.counts)} rows, the tokens have {num_rows}"
            )
        room = self._find_room(first, num_tokens)
        if room > self.max_seq_len:
            raise ValueError(
                f"{room} tokens are more than max_position_embeddings = {self.max_seq_len}: "
                f"generate fewer"
            )
        if present is None:
            offset = torch.arange(num_tokens, device=self.device)[None]
        else:
            offset = present.cumsum(dim=1) - 1
        # a copy: the counts change below
        positions_BT = (first.counts[:, None] + offset).clamp(min=0)
        for layer in self.layers:
            layer.see(num_rows, num_tokens, present, self.device)
        return positions_BT

    def recall(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        present: Bool[Tensor, "B T"] | None,
        count: int,
    ) -> Int[Tensor, "B T past"]:
        """The ids before each token, nearest first."""
        first = self.layers[0]
        # these tokens have been counted already
        past = first.make_past(len(tokens), self._find_room(first, 0), tokens.device)
        return past.recall(tokens, positions, present, count)

    def _find_room(self, layer: PastLayer, num_tokens: int) -> int:
        """Positions that may be needed, known without asking the device."""
        if isinstance(layer, StaticPastLayer):
            return layer.max_cache_len
        assert isinstance(layer, DynamicPastLayer)
        return layer.num_seen + num_tokens


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor; in its own memory where it still fits, as recorded steps know that."""
    taken = tensor.index_select(0, index.to(tensor.device))
    return tensor.copy_(taken) if taken.shape == tensor.shape else taken
