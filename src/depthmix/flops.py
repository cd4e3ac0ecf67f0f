"""Exact FLOPs, parameters and cache bytes of a model, computed from its configuration.

The conventions (docs/math.md): a matrix product counts 2·m·n·k, attention its two products over
every (query, key) pair, and a backward pass twice the forward pass. "executed" counts only the
pairs that causality allows, and adds the optimiser's products. Norms, activations, softmax, rotary
positions and moving tokens count nothing. Does not import torch; the tests compare the counts with
`FlopCounterMode` on the real model.

>>> routed, dense = load_preset("60m"), load_preset("60m-dense")
>>> round(flops.forward_flops(routed) / flops.forward_flops(dense), 3)
0.628
"""

from collections.abc import Iterator
from typing import NamedTuple

from depthmix.config import ModelConfig, num_kept

__all__ = [
    "PARTS",
    "TRAINING_FACTOR",
    "Parameters",
    "count_expert_pairs",
    "count_lookups",
    "count_parts",
    "executed_flops",
    "flops_per_token",
    "forward_flops",
    "kv_cache_bytes",
    "list_blocks",
    "list_matrices",
    "matrix_sizes",
    "num_memory_parameters",
    "num_parameters",
    "optimizer_flops",
    "training_flops",
]

PARTS = (
    "attention_projections",
    "attention_scores",
    "mlp",
    "experts",
    "routers",
    "predictors",
    "memory",
    "head",
)
"""The parts that `count_parts` returns; experts' routers and predictors are among the others.
A memory's lookups cost nothing, but their projections and gates do."""

TRAINING_FACTOR = 3
"""A training step counts as three forward passes, two of them for the backward pass."""


MUON_ITERATIONS = 5
"""Newton-Schulz iterations in each step of Muon."""


class Parameters(NamedTuple):
    """Parameters of a model, and how many of them process a token."""

    total: int
    """All parameters; a tied head is counted once, as the embedding."""
    active: int
    """Parameters that process a token in training, on average and rounded: a routed block counts by
    its capacity, experts by their slots per token, and the vocabulary's matrices in full."""
    total_non_embedding: int
    """`total` without the vocabulary's matrices (the embedding, and an untied head) and without the
    rows of a memory."""
    active_non_embedding: int
    """`active` without those matrices."""


def forward_flops(
    config: ModelConfig,
    *,
    seq_len: int | None = None,
    batch_size: int = 1,
    causal_half: bool = False,
) -> int:
    """FLOPs of one forward pass, by the training rule, over `batch_size` sequences of `seq_len`.

    Empty `seq_len` means `max_seq_len`. `causal_half` counts only the (query, key) pairs that
    causality allows, see `count_parts`; use it for a GPU's utilisation, never to compare models.
    """
    _check_positive("batch_size", batch_size)
    return batch_size * sum(count_parts(config, seq_len, causal_half=causal_half).values())


def training_flops(
    config: ModelConfig,
    *,
    seq_len: int | None = None,
    batch_size: int = 1,
    causal_half: bool = False,
) -> int:
    """FLOPs of one training step, by convention three times the forward pass.

    The actual number differs a little: predictors stop the gradient at their input, and
    memory-saving attention recomputes its scores.
    """
    forward = forward_flops(config, seq_len=seq_len, batch_size=batch_size, causal_half=causal_half)
    return TRAINING_FACTOR * forward


def optimizer_flops(config: ModelConfig, optimizer: str) -> int:
    """FLOPs of an optimiser's matrix products in one step, for any batch size; AdamW has none.

    Muon multiplies a matrix of m rows and n ≥ m columns with itself, the m×m result with itself,
    and that with the matrix, five times.
    """
    if optimizer == "adamw":
        return 0
    if optimizer != "muon":
        raise ValueError(f"there is no optimizer '{optimizer}': use adamw or muon")
    sides = (sorted(shape) for shape in list_matrices(config))
    each = (2 * short * short * (2 * long + short) for short, long in sides)
    return MUON_ITERATIONS * sum(each)


def executed_flops(
    config: ModelConfig,
    optimizer: str,
    *,
    seq_len: int | None = None,
    batch_size: int = 1,
) -> int:
    """FLOPs of one training step as executed: causal attention pairs, and the optimiser."""
    step = training_flops(config, seq_len=seq_len, batch_size=batch_size, causal_half=True)
    return step + optimizer_flops(config, optimizer)


def flops_per_token(
    config: ModelConfig, *, seq_len: int | None = None, causal_half: bool = False
) -> float:
    """Forward FLOPs of a sequence per token; training takes `TRAINING_FACTOR` times as many."""
    num_tokens = _check_seq_len(config, seq_len)
    return forward_flops(config, seq_len=num_tokens, causal_half=causal_half) / num_tokens


def count_parts(
    config: ModelConfig, seq_len: int | None = None, *, causal_half: bool = False
) -> dict[str, int]:
    """Forward FLOPs of one sequence by part of the model; they add up to `forward_flops`.

    With `causal_half`, attention among K tokens counts K·(K + 1)/2 pairs in place of K². Where K
    queries meet M ≥ K keys (decoupled routing) it counts K·(M + 1)/2, which is exact on average
    if keys without a query are equally likely anywhere.
    """
    num_tokens = _check_seq_len(config, seq_len)
    sizes = matrix_sizes(config)
    pair_width = config.num_heads * config.shape.head_width
    # weights of matrix products, used once per token: two FLOPs each
    weights = dict.fromkeys(PARTS, 0)
    scores = 0
    for block in list_blocks(config):
        kept, offered = block.count_updated(num_tokens), block.count_offered(num_tokens)
        weights["attention_projections"] += kept * (sizes.query + sizes.out)
        weights["attention_projections"] += offered * sizes.key_value
        # two products of two FLOPs; causality leaves half of the pairs, plus half of the diagonal
        scores += (2 * (offered + 1) if causal_half else 4 * offered) * kept * pair_width
        # a router scores every token, and the kept ones again for the gate
        scored = (0, num_tokens + kept, 2 * num_tokens + kept + offered)[block.num_deciders]
        weights["routers"] += 0 if config.routing.draws_scores else scored * sizes.depth_router
        weights["predictors"] += num_tokens * block.num_deciders * sizes.depth_predictor
        if block.has_experts:
            weights["experts"] += count_expert_pairs(config, kept) * sizes.expert
            weights["routers"] += kept * sizes.expert_router
            weights["predictors"] += kept * sizes.expert_predictor
        else:
            weights["mlp"] += kept * sizes.mlp
    # a bypass is computed for all tokens in training, where only some of them get it
    weights["memory"] = num_tokens * count_lookups(config) * sizes.lookup
    weights["head"] = num_tokens * sizes.head
    return {part: 2 * count for part, count in weights.items()} | {"attention_scores": scores}


def num_parameters(config: ModelConfig) -> Parameters:
    """The model's parameters, counted as `sum(p.numel() for p in model.parameters())` does."""
    sizes, experts = matrix_sizes(config), config.experts
    head_norm = config.shape.head_width if config.qk_norm else 0
    # the predictors' last layers have a bias, one number for each score
    decider = sizes.depth_router + sizes.depth_predictor + bool(sizes.depth_predictor)
    expert_decider = sizes.expert_router + sizes.expert_predictor
    if sizes.expert_predictor:
        expert_decider += experts.num_experts
    query_bias, kv_bias = (config.qkv_bias * n // config.width for n in sizes[:2])
    # the last norm, and factors of the residual stream
    total = config.width + (2 * config.num_layers if config.residual_mix else 0)
    active = float(total)
    for block in list_blocks(config):
        # the mixer's input norm, keys and values process every token that provides them
        offering = sizes.key_value + config.width + head_norm + kv_bias + config.value_embedding
        updating = sizes.query + sizes.out + config.width + head_norm + query_bias
        updating += expert_decider if block.has_experts else sizes.mlp
        deciding = block.num_deciders * decider
        in_experts = sizes.expert if block.has_experts else 0
        total += offering + updating + deciding + experts.num_experts * in_experts
        active += block.offered * offering + deciding
        active += block.updated * (updating + experts.capacity * in_experts)
    reading = count_lookups(config) * sizes.lookup
    total += reading
    active += reading
    vocabulary = sizes.head if config.tied_head else 2 * sizes.head
    if config.value_embedding:
        vocabulary += config.vocab_size * config.shape.num_kv_heads * config.shape.head_width
    return Parameters(
        total=total + vocabulary + num_memory_parameters(config),
        active=round(active) + vocabulary,
        total_non_embedding=total,
        active_non_embedding=round(active),
    )


def num_memory_parameters(config: ModelConfig) -> int:
    """The rows of a memory of n-grams, which are in `total` only: a token reads few of them."""
    if not config.has_memory:
        return 0
    return config.memory.num_rows * config.shape.memory_width


def kv_cache_bytes(
    config: ModelConfig,
    *,
    seq_len: int | None = None,
    batch_size: int = 1,
    bytes_per_element: int = 2,
) -> int:
    """Bytes of the keys and values of `seq_len` tokens; 2 bytes per number means bf16.

    A routed block holds ceil(C·T) tokens: exactly under top-k, on average under a causal selector
    that has learned its capacity. Under decoupled routing C is `kv_capacity`.
    """
    _check_positive("batch_size", batch_size)
    _check_positive("bytes_per_element", bytes_per_element)
    num_tokens = _check_seq_len(config, seq_len)
    num_stored = sum(block.count_stored(num_tokens) for block in list_blocks(config))
    per_token = 2 * config.shape.num_kv_heads * config.shape.head_width
    return batch_size * num_stored * per_token * bytes_per_element


class Sizes(NamedTuple):
    """Number of weights in each matrix or pair of matrices; 0 if the model has none."""

    query: int
    key_value: int
    out: int
    mlp: int
    expert: int
    depth_router: int
    depth_predictor: int
    expert_router: int
    expert_predictor: int
    lookup: int
    head: int


def matrix_sizes(config: ModelConfig) -> Sizes:
    """The sizes of a configuration's matrices."""
    width, shape, routing, experts = config.width, config.shape, config.routing, config.experts
    # SwiGLU has two input matrices, GELU one, and both one output matrix
    mlp_matrices = 3 if config.mlp == "swiglu" else 2
    query = width * config.num_heads * shape.head_width
    predicts = experts.has_predictor
    return Sizes(
        query=query,
        key_value=2 * width * shape.num_kv_heads * shape.head_width,
        out=query,
        mlp=mlp_matrices * width * shape.mlp_width,
        expert=mlp_matrices * width * shape.expert_width,
        depth_router=width,
        depth_predictor=routing.predictor_width * (width + 1) if routing.has_predictor else 0,
        expert_router=width * (experts.num_experts + experts.num_noop),
        expert_predictor=experts.predictor_width * (width + experts.num_experts) if predicts else 0,
        # a projection and a gate
        lookup=width * (shape.memory_width + 1) if config.has_memory else 0,
        head=config.vocab_size * width,
    )


def list_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Rows and columns of the blocks' matrices, without routers and experts."""
    width, shape = config.width, config.shape
    mixed, stored = (n * shape.head_width for n in (config.num_heads, shape.num_kv_heads))
    # queries and keys are one matrix
    attention = [(mixed + stored, width), (stored, width), (width, mixed)]
    num_in = 2 if config.mlp == "swiglu" else 1
    mlp = [*num_in * [(shape.mlp_width, width)], (width, shape.mlp_width)]
    count, hidden = config.experts.num_experts, shape.expert_width
    experts = [*count * [(width, num_in * hidden)], *count * [(hidden, width)]]
    found: list[tuple[int, int]] = []
    for block in list_blocks(config):
        found += attention + (experts if block.has_experts else mlp)
    return found + count_lookups(config) * [(width, shape.memory_width)]


def count_lookups(config: ModelConfig) -> int:
    """The places where a model with a memory reads it."""
    num_added = len(config.memory_layers) + (config.memory.place == "input")
    return num_added + len(config.bypass_layers)


class BlockShare(NamedTuple):
    """One block: the fractions of tokens that it updates, and that provide keys and values."""

    updated: float
    offered: float
    num_deciders: int
    """Depth routers, each with its predictor: none, one, or two under decoupled routing."""
    has_experts: bool
    places: float
    """Share of tokens that it has room for; `updated` unless `place_factor` leaves more."""

    def count_updated(self, num_tokens: int) -> int:
        return num_kept(self.places, num_tokens) if self.num_deciders else num_tokens

    def count_offered(self, num_tokens: int) -> int:
        share = max(self.places, self.offered)
        return num_kept(share, num_tokens) if self.num_deciders else num_tokens

    def count_stored(self, num_tokens: int) -> int:
        """Keys and values that stay in the cache, where empty places leave none."""
        return num_kept(self.offered, num_tokens) if self.num_deciders else num_tokens


def list_blocks(config: ModelConfig) -> Iterator[BlockShare]:
    """The model's blocks, from the first to the last."""
    capacity = dict(zip(config.routed_layers, config.capacities, strict=True))
    expert_layers, kv_capacity = set(config.expert_layers), config.routing.kv_capacity
    for layer in range(config.num_layers):
        has_experts = layer in expert_layers
        if layer not in capacity:
            yield BlockShare(1.0, 1.0, 0, has_experts, 1.0)
            continue
        share = capacity[layer]
        places = config.routing.share_places(share)
        if kv_capacity is None:
            yield BlockShare(share, share, 1, has_experts, places)
        else:
            yield BlockShare(share, kv_capacity, 2, has_experts, places)


def count_expert_pairs(config: ModelConfig, num_tokens: int) -> int:
    """(token, expert) pairs that a set of experts computes; empty slots are computed too."""
    experts = config.experts
    if experts.has_target:
        capacity = experts.capacity / experts.num_experts
        return experts.num_experts * num_kept(capacity, num_tokens)
    if experts.capacity < experts.per_token:
        return num_kept(experts.capacity, num_tokens)
    return num_tokens * experts.per_token


def _check_seq_len(config: ModelConfig, seq_len: int | None) -> int:
    if seq_len is None:
        return config.max_seq_len
    _check_positive("seq_len", seq_len)
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len = {seq_len} is longer than max_seq_len = {config.max_seq_len}: ask for at "
            f"most that, or override max_seq_len"
        )
    return seq_len


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value} must be at least 1")
