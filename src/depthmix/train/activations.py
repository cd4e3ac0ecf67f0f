"""How many bytes a training step keeps for its backward pass, estimated from a configuration.

Adds up the tensors that autograd saves in each kind of layer; the tests hold the sum to what it
really saves on small models. Knows nothing of torch, nor of what else is in a GPU's memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

from depthmix.config import ModelConfig, RunConfig, num_kept

FLOAT32 = 4


class Activations(NamedTuple):
    """Bytes of one sequence."""

    layers: tuple[int, ...]
    """What each layer saves."""
    stream: int
    """The residual stream between two layers, all that checkpointing keeps of a layer."""
    ends: int
    """What is saved before the first layer and after the last one."""

    @property
    def saved(self) -> int:
        """All that is saved."""
        return self.ends + sum(self.layers)

    def find_peak(self, *, recompute: bool) -> int:
        """The most at once: what is saved, and a layer's gradients beside it."""
        if recompute:
            return self.ends + len(self.layers) * self.stream + 2 * max(self.layers)
        return self.saved + max(self.layers)


def count_activations(run: RunConfig, element_bytes: int = 2) -> Activations:
    """What one sequence of a run keeps, its matrix products being of so many bytes a number."""
    config, num_tokens = run.model, run.seq_len
    compiled = run.train.compile is not False
    sizes = _Sizes(config, element_bytes, compiled)
    # packed documents need a mask of all pairs where blocks of it cannot be skipped
    masked = run.train.document_mask and not (compiled and config.shape.head_width >= 16)
    layers = tuple(
        sum(_list_saved(config, sizes, layer, num_tokens, masked))
        for layer in range(config.num_layers)
    )
    stream = num_tokens * config.width * element_bytes
    # the last norm is not part of a layer, and so never compiled
    norm = _Sizes(config, element_bytes, False).norm(config.width)
    phases = FLOAT32 * config.shape.head_width
    return Activations(layers, stream, num_tokens * (norm + phases))


class _Sizes(NamedTuple):
    """Bytes for each token of what the parts of a layer save.

    A compiled layer makes again what is cheap: float32 copies, and products of two tensors.
    """

    config: ModelConfig
    element: int
    compiled: bool

    def norm(self, width: int) -> int:
        """Input, output and one number; eager, three float32 tensors and the output."""
        if self.compiled:
            return 2 * width * self.element + FLOAT32
        cast = self.element if self.element < FLOAT32 else 0
        return width * (3 * FLOAT32 + cast) + FLOAT32

    def head_norm(self, width: int) -> int:
        """A norm of queries or keys, whose output is counted as such."""
        return self.norm(width) - width * self.element if self.config.qk_norm else 0

    @property
    def query(self) -> int:
        """Queries, what attention makes of them, and its softmax's sum."""
        width = self.config.num_heads * self.config.shape.head_width
        sums = FLOAT32 * self.config.num_heads
        return 2 * width * self.element + sums + self.head_norm(width)

    @property
    def key_value(self) -> int:
        """Keys and values."""
        width = self.config.shape.num_kv_heads * self.config.shape.head_width
        return 2 * width * self.element + self.head_norm(width)

    def hidden(self, width: int) -> int:
        """An MLP's inside: gate, input and their product, or one tensor before and after GELU."""
        gated = 3 if self.compiled else 4
        return width * self.element * (gated if self.config.mlp == "swiglu" else 2)

    def router(self, *, normalize: bool = False) -> int:
        """Float32 copies of a router's input, beside the input itself."""
        num_casts = int(self.element < FLOAT32)
        if normalize:
            num_casts += 1 + num_casts
        return 0 if self.compiled else num_casts * FLOAT32 * self.config.width

    def predictor(self, hidden: int) -> int:
        """A predictor's hidden layer, and one number."""
        return hidden * (self.element + (0 if self.compiled else FLOAT32)) + FLOAT32


def _list_saved(
    config: ModelConfig, sizes: _Sizes, layer: int, num_tokens: int, masked: bool
) -> Iterator[int]:
    """Bytes that the parts of one layer save of one sequence."""
    width, element = config.width, sizes.element
    kept = offered = num_tokens
    num_deciders = 0
    if layer in config.routed_layers:
        capacity = config.capacities[config.routed_layers.index(layer)]
        kept = offered = num_kept(capacity, num_tokens)
        num_deciders = 1
        if config.routing.kv_capacity is not None:
            num_deciders, offered = 2, num_kept(config.routing.kv_capacity, num_tokens)
    apart = num_deciders == 2
    if num_deciders:
        # every token is scored; a score, an index and a place take 16 bytes
        router = sizes.router(normalize=config.routing.normalize_input)
        scored = router + 16
        if config.routing.has_predictor:
            scored += sizes.predictor(config.routing.predictor_width)
        yield num_tokens * (width * element + num_deciders * scored)
        # what was gathered: its phases, its copy for the gate, and in the end its update
        gathered = kept + (offered if apart else 0)
        yield gathered * (FLOAT32 * config.shape.head_width + router)
        yield kept * width * element
    yield kept * (2 * sizes.norm(width) + sizes.query) + offered * sizes.key_value
    if apart:
        # keys and values have a norm of their own, and their gate
        yield offered * (sizes.norm(width) + sizes.key_value // 2)
    if masked or apart:
        yield kept * offered * element
    if layer not in config.expert_layers:
        yield kept * sizes.hidden(config.shape.mlp_width)
        return
    experts = config.experts
    yield kept * (sizes.router() + 8 * experts.num_experts)
    if experts.has_predictor:
        yield kept * sizes.predictor(experts.predictor_width)
    # each pair: what goes in, the inside, what comes out, and its weighted sum
    weighted = width * (element if sizes.compiled else FLOAT32)
    pair = 2 * width * element + sizes.hidden(config.shape.expert_width) + weighted
    yield _count_pairs(config, kept) * pair


def _count_pairs(config: ModelConfig, num_tokens: int) -> int:
    """(token, expert) places of one sequence."""
    experts = config.experts
    if experts.strategy == "expert_choice":
        share = experts.capacity / experts.num_experts
        return experts.num_experts * num_kept(share, num_tokens)
    return num_kept(min(experts.capacity, experts.per_token), num_tokens)
