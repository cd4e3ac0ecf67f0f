"""A model's configuration: its fields with their bounds, and values derived from them.

Also checks the rules that relate several fields; each error suggests a fix. The options that are
chosen by name are in `choices`.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from depthmix.config import fields
from depthmix.config.choices import (
    CAUSAL_SELECTORS,
    EXPERT_STRATEGIES,
    SELECTORS,
    STRATEGIES,
    BypassName,
    ExpertStrategyName,
    GateName,
    MemoryPlaceName,
    NoiseGateName,
    StrategyName,
)
from depthmix.config.fields import Bounds, Count, NotNegative, Positive

Capacity = Annotated[
    float, Bounds(above=0, most=1, hint="0.125 keeps one token in eight, 1.0 keeps all")
]
# far more than any model has, and still few enough to list
NumLayers = Annotated[Count, Bounds(most=10_000)]


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """Which blocks route, how many tokens each keeps, and how the decision is taken.

    >>> RoutingConfig(strategy="expert_choice", capacity=0.25).causal_head
    'predictor'
    """

    strategy: StrategyName = "none"
    """Which tokens a routed block keeps."""
    capacity: Capacity | tuple[Capacity, ...] | Literal["linear", "cosine"] = 0.125
    """Fraction of tokens that a routed block keeps, in (0, 1]: a number, a list with one number per
    routed block, or the name of a schedule over depth (linear, cosine)."""
    capacity_first: Capacity = 0.85
    """With a named schedule: the first routed block's capacity."""
    capacity_last: Capacity = 0.15
    """With a named schedule: the last routed block's capacity."""
    every: Count = 2
    """Route every n-th block: 2 routes every other block, 1 routes all."""
    first_dense: NotNegative[int] = 0
    """Leave this many first blocks dense."""
    layers: tuple[int, ...] | None = None
    """Indices of the routed blocks, from 0. Default: set by `every` and `first_dense`."""
    first_tokens: NotNegative[int] = 0
    """Always route this many first positions of each document."""
    gate: GateName = "raw"
    """The factor on a routed block's update, as a function of the score r."""
    noise_gate: NoiseGateName = "learned"
    """stochastic: the score r that the gate is a function of. The paper's control is gaussian with
    gate = raw; gate = unit ignores the score."""
    normalize_input: bool = True
    """Compute scores from x / rms(x), so that they do not grow with the residual stream; false uses
    x itself, as in the paper."""
    init_std: NotNegative[float] = 0.02
    """Standard deviation of the router's initial weights; with 0, every score starts at 0."""
    aux_loss_weight: NotNegative[float] = 0.0
    """Weight of the router's binary cross-entropy against top-k membership; 0 turns it off."""
    predictor: bool = True
    """Train a small head, behind a stop-gradient, that predicts top-k membership causally."""
    predictor_width: Count = 64
    """Hidden width of the predictor."""
    predictor_loss_weight: NotNegative[float] = 0.01
    """Weight of the predictor's loss; as the gradient stops at its input, it acts as a learning
    rate."""
    balance_loss_weight: NotNegative[float] = 0.01
    """Weight of token_choice's balancing loss."""
    bias_rate: NotNegative[float] = 0.0
    """token_choice: add a bias to the scores that decide, which moves after each step by this times
    (capacity - share of tokens with a positive score). 0 uses the balancing loss instead."""
    place_factor: Annotated[float, Bounds(least=1)] = 1.0
    """token_choice: places per sequence as a multiple of capacity; more than 1 leaves room for
    sequences in which more tokens than average choose the block."""
    kv_capacity: Capacity | None = None
    """Decoupled routing: fraction of tokens that provide keys and values, at least `capacity`."""
    bypass: BypassName = "identity"
    """What a token gets from a routed block that does not keep it. The sizes of the tables are
    those of `memory`."""

    def __post_init__(self) -> None:
        fields.coerce(self, "routing.")

    @property
    def has_target(self) -> bool:
        """Whether a causal head can learn top-k membership."""
        return STRATEGIES[self.strategy].has_target

    @property
    def has_predictor(self) -> bool:
        """Whether routed blocks carry a predictor."""
        return self.predictor and self.has_target

    @property
    def draws_scores(self) -> bool:
        """Whether scores, and therefore gates, are noise drawn in each forward pass."""
        return STRATEGIES[self.strategy].is_random and self.noise_gate == "gaussian"

    @property
    def has_bias(self) -> bool:
        """Whether a bias holds the share of kept tokens at the capacity."""
        return STRATEGIES[self.strategy].is_balanced and self.bias_rate > 0

    def share_places(self, capacity: float) -> float:
        """Places of a routed block, as a share of the tokens."""
        return min(1.0, capacity * self.place_factor)

    @property
    def causal_head(self) -> Literal["predictor", "router"] | None:
        """The head that is trained to route causally, or None."""
        if self.has_predictor:
            return "predictor"
        trained = self.has_target and self.aux_loss_weight > 0
        return "router" if trained or STRATEGIES[self.strategy].trains_router else None


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Expert MLPs in place of a block's MLP: MoE, and Mixture-of-Depths-and-Experts.

    >>> experts = ExpertsConfig(strategy="expert_choice", num_experts=4, every=3)
    >>> ModelConfig(experts=experts).expert_layers
    (2, 5, 8, 11)
    """

    strategy: ExpertStrategyName = "none"
    """What chooses."""
    num_experts: Count = 8
    """Number of expert MLPs per block."""
    num_noop: NotNegative[int] = 0
    """Number of additional no-op experts; more than 0 gives an integrated MoDE."""
    per_token: Count = 1
    """Experts that each token chooses under token_choice."""
    capacity: float = 1.0
    """Average number of expert slots per token: every expert takes capacity · T / num_experts
    tokens; under token_choice all experts together take capacity · T."""
    every: Count = 1
    """Put experts in every n-th block."""
    width: Count | None = None
    """Hidden width of one expert. Default: the model's mlp_width."""
    aux_loss_weight: NotNegative[float] = 0.0
    """expert_choice: weight of the router's cross-entropy against membership."""
    predictor: bool = True
    """expert_choice: train a head, behind a stop-gradient, that predicts the choices causally."""
    predictor_width: Count = 64
    """Hidden width of that head."""
    predictor_loss_weight: NotNegative[float] = 0.01
    """Weight of that head's loss."""
    balance_loss_weight: NotNegative[float] = 0.01
    """token_choice: weight of the load-balancing loss."""

    def __post_init__(self) -> None:
        fields.coerce(self, "experts.")

    @property
    def has_target(self) -> bool:
        """Whether experts choose their tokens, which a causal head can learn."""
        return EXPERT_STRATEGIES[self.strategy].has_target

    @property
    def tokens_choose(self) -> bool:
        """Whether tokens choose their experts, balanced by a loss."""
        return EXPERT_STRATEGIES[self.strategy].tokens_choose

    @property
    def has_predictor(self) -> bool:
        """Whether blocks with experts carry a predictor."""
        return self.predictor and self.has_target


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Tables of n-grams of token ids, whose vectors are looked up instead of computed.

    >>> MemoryConfig(place="blocks").num_tables
    4
    """

    place: MemoryPlaceName = "none"
    """Where the tables' vectors are added to the residual stream, for every token."""
    every: Count = 1
    """With place = blocks: after every n-th block."""
    ngrams: tuple[Annotated[Count, Bounds(most=16)], ...] = (2, 3)
    """Lengths of the n-grams: a token's own id and the ids before it."""
    num_hashes: Annotated[Count, Bounds(most=64)] = 2
    """Tables for each length, so that two n-grams rarely share all their rows."""
    num_rows: Annotated[Count, Bounds(most=2**30)] = 2**16
    """Rows of each table."""
    width: Count | None = None
    """Width of all tables together. Default: the model's width."""

    def __post_init__(self) -> None:
        fields.coerce(self, "memory.")

    @property
    def num_tables(self) -> int:
        """One for each length and hash."""
        return len(self.ngrams) * self.num_hashes

    @property
    def num_previous(self) -> int:
        """How many earlier ids the longest n-gram needs."""
        return max(self.ngrams, default=1) - 1


class Shape(NamedTuple):
    """A model's widths with all defaults filled in."""

    num_kv_heads: int
    head_width: int
    mlp_width: int
    expert_width: int
    memory_width: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, its depth routing and its experts.

    >>> config = ModelConfig(width=256, routing=RoutingConfig(strategy="expert_choice"))
    >>> config.routed_layers
    (1, 3, 5, 7, 9, 11)
    >>> config.override({"routing.every": 4}).routed_layers
    (3, 7, 11)
    """

    vocab_size: Count = 16384
    """Vocabulary size."""
    max_seq_len: Count = 1024
    """Longest sequence in tokens; positions are smaller than this."""
    num_layers: NumLayers = 12
    """Number of blocks."""
    width: Count = 512
    """Width of the residual stream."""
    num_heads: Count = 8
    """Number of query heads."""
    num_kv_heads: Count | None = None
    """Number of key/value heads, a divisor of num_heads. Default: num_heads."""
    head_width: Count | None = None
    """Width of one head, even. Default: width / num_heads."""
    mlp_width: Count | None = None
    """Hidden width of the MLP. Default: 8/3 · width in steps of 128 (swiglu), 4 · width (gelu)."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Type of the MLP: swiglu or gelu."""
    qk_norm: bool = False
    """RMS-normalise queries and keys in each head."""
    qkv_bias: bool = False
    """Add learned biases to queries, keys and values, as Qwen2 does."""
    residual_mix: bool = False
    """Before each block, x becomes a·x + b·x0 with x0 the embeddings; a and b are learned and start
    at 1 and 0."""
    value_embedding: bool = False
    """Add to each block's values a second embedding of the token, by a learned factor per block."""
    tied_head: bool = True
    """Use the embedding matrix as the output head."""
    rope_theta: Positive[float] = 10000.0
    """Base of the rotary position frequencies."""
    rope_factors: tuple[Positive[float], ...] | None = None
    """Divides those frequencies: one number for all, or Llama 3's factor, low factor, high factor
    and original length."""
    norm_eps: Positive[float] = 1e-6
    """Epsilon inside every RMSNorm."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """Depth routing."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Expert MLPs."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Tables of n-grams."""

    def __post_init__(self) -> None:
        fields.coerce(self)
        problem = next(find_problems(self), None)
        if problem is not None:
            raise ValueError(problem)

    @property
    def shape(self) -> Shape:
        """The widths with all defaults filled in."""
        default = 4 * self.width if self.mlp == "gelu" else math.ceil(self.width / 48) * 128
        mlp_width = self.mlp_width or default
        return Shape(
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_width=self.head_width or self.width // self.num_heads,
            mlp_width=mlp_width,
            expert_width=self.experts.width or mlp_width,
            memory_width=self.memory.width or self.width,
        )

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Indices of the routed blocks."""
        if self.routing.strategy == "none":
            return ()
        if self.routing.layers is not None:
            return self.routing.layers
        first, every = self.routing.first_dense, self.routing.every
        return tuple(range(first + every - 1, self.num_layers, every))

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the blocks with experts."""
        if self.experts.strategy == "none":
            return ()
        return tuple(range(self.experts.every - 1, self.num_layers, self.experts.every))

    @property
    def memory_layers(self) -> tuple[int, ...]:
        """Indices of the blocks after which the memory is added."""
        if self.memory.place != "blocks":
            return ()
        return tuple(range(self.memory.every - 1, self.num_layers, self.memory.every))

    @property
    def bypass_layers(self) -> tuple[int, ...]:
        """Indices of the routed blocks whose other tokens get a lookup."""
        return self.routed_layers if self.routing.bypass == "lookup" else ()

    @property
    def has_memory(self) -> bool:
        """Whether the model has tables of n-grams."""
        return self.memory.place != "none" or bool(self.bypass_layers)

    @property
    def capacities(self) -> tuple[float, ...]:
        """Capacity of each routed block, in order."""
        routing, count = self.routing, len(self.routed_layers)
        if count == 0:
            return ()
        if isinstance(routing.capacity, tuple):
            return routing.capacity
        if not isinstance(routing.capacity, str):
            return (float(routing.capacity),) * count
        first, last = routing.capacity_first, routing.capacity_last
        shares = [i / max(1, count - 1) for i in range(count)]
        if routing.capacity == "cosine":
            shares = [(1 - math.cos(math.pi * share)) / 2 for share in shares]
        return tuple(first + (last - first) * share for share in shares)

    @property
    def causal_selector(self) -> str | None:
        """The causal selector that training prepares the model for, for depth and experts alike.

        None if no head is trained for it, or if the training rule is itself causal.
        """
        if not self.needs_selector_to_decode:
            return None
        experts = self.experts
        wanted = [self.routing.causal_head] if self.routed_layers else ["predictor", "router"]
        if self.expert_layers and experts.has_target and experts.aux_loss_weight == 0:
            # no loss trained the experts' router to give positive scores to its choices
            wanted = [head for head in wanted if head != "router"]
        known = (head for head in wanted if head and self.find_selector_problem(head) is None)
        return next(known, None)

    @property
    def needs_selector_to_decode(self) -> bool:
        """Whether the training rule needs more of the sequence than a cache holds."""
        experts = self.experts
        limited = experts.tokens_choose and experts.capacity < experts.per_token
        experts_look = experts.has_target or limited
        return bool(self.routed_layers) or (bool(self.expert_layers) and experts_look)

    def find_selector_problem(self, selector: str | None) -> str | None:
        """Why this model cannot route by `selector`; None if it can."""
        if selector is None:
            return None
        if selector not in SELECTORS:
            return f"unknown selector '{selector}': use one of {', '.join(SELECTORS)}"
        if selector != "topk" and self.routing.draws_scores:
            return (
                f"Gaussian gates are drawn again in each pass, so selector '{selector}' cannot "
                f"use them: use 'topk'"
            )
        if selector in ("predictor", "router") and STRATEGIES[self.routing.strategy].is_random:
            return (
                f"a random choice has no causal head for selector '{selector}': use 'topk' or 'all'"
            )
        if selector == "predictor":
            if self.routed_layers and not self.routing.has_predictor:
                return (
                    f"selector 'predictor' needs a predictor: set routing.predictor = true (with "
                    f"{say_targets()} routing), or use selector 'router'"
                )
            if self.experts.has_target and not self.experts.predictor:
                return (
                    "selector 'predictor' needs the experts' predictor too: set "
                    "experts.predictor = true, or use selector 'router'"
                )
        return None

    def choose_selector(self, wanted: str | None, *, looks_ahead: bool = False) -> str | None:
        """The causal selector for generating and scoring: `wanted`, or the trained one.

        A model without a trained one needs an explicit choice: any default would be a guess. With
        `looks_ahead`, `topk` may be chosen too, which can score texts but not generate.
        """
        if looks_ahead and wanted == "topk":
            return wanted
        if self.routed_layers and self.routing.draws_scores:
            raise ValueError(
                "Gaussian gates are drawn again in each pass: a model with routing.noise_gate = "
                "gaussian can be trained and validated, but not sampled"
            )
        fits = [s for s in CAUSAL_SELECTORS if self.find_selector_problem(s) is None]
        advice = f"use {' or '.join(map(repr, fits))}"
        if wanted == "topk":
            raise ValueError(f"selector 'topk' needs tokens that are not generated yet: {advice}")
        problem = self.find_selector_problem(wanted)
        if problem is not None:
            # the rest of that message is about training, where 'topk' works and a head can be added
            raise ValueError(f"{problem.split(': ')[0]}: {advice}")
        if wanted is not None or not self.needs_selector_to_decode:
            return wanted
        if self.causal_selector is None:
            raise ValueError(
                f"this model has no head trained for causal routing, so name a selector: {advice}"
            )
        return self.causal_selector

    def list_rules(self) -> dict[str, str | None]:
        """Name of each rule that the model is evaluated by → its selector, the training rule first.

        Only `dense` if no choice looks ahead; otherwise `topk`, the training rule, and `causal` if
        a head is trained for it.
        """
        if not self.needs_selector_to_decode:
            return {"dense": None}
        causal = self.causal_selector
        return {"topk": None} | ({} if causal is None else {"causal": causal})

    def dense_twin(self) -> "ModelConfig":
        """The same model with every token passing through every block."""
        return dataclasses.replace(self, routing=RoutingConfig())

    def override(self, overrides: Mapping[str, Any]) -> "ModelConfig":
        """A copy with dotted fields replaced: `{"routing.capacity": 0.25, "width": 768}`."""
        for name in overrides:
            if name.startswith("train."):
                raise ValueError(
                    f"'{name}' is a field of training, and only the model's can be set here: "
                    f"leave it out"
                )
        return fields.override(self, overrides)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` gives the same configuration back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> "ModelConfig":
        """Build from plain data, refusing unknown fields by name."""
        return fields.build(ModelConfig, tree)

    def to_toml(self) -> str:
        """TOML text; `from_toml` gives the same configuration back."""
        return fields.to_toml(self)

    @staticmethod
    def from_toml(text: str) -> "ModelConfig":
        """Inverse of `to_toml`."""
        return fields.from_toml(ModelConfig, text)

    def to_json(self) -> str:
        """JSON text; `from_json` gives the same configuration back."""
        return fields.to_json(self)

    @staticmethod
    def from_json(text: str) -> "ModelConfig":
        """Inverse of `to_json`."""
        return fields.from_json(ModelConfig, text)


def count_share(share: float, count: int) -> int:
    """A fraction of a count, rounded up; the small slack keeps 0.07 · 100 from becoming 8."""
    return math.ceil(share * count - 1e-9)


def num_kept(capacity: float, num_tokens: int) -> int:
    """k = ceil(C·T), at least one."""
    return max(1, count_share(capacity, num_tokens))


def say_targets() -> str:
    """The strategies whose top-k a head can learn, joined for a sentence."""
    *names, last = (name for name, strategy in STRATEGIES.items() if strategy.has_target)
    return f"{', '.join(names)} or {last}"


def find_problems(config: ModelConfig) -> Iterator[str]:
    """Everything wrong with a configuration, one sentence each; the first is raised."""
    if config.head_width is None and config.width % config.num_heads:
        yield (
            f"num_heads = {config.num_heads} does not divide width = {config.width}: choose a "
            f"divisor, or set head_width"
        )
    if config.num_heads % config.shape.num_kv_heads:
        yield (
            f"num_kv_heads = {config.num_kv_heads} does not divide num_heads = "
            f"{config.num_heads}: choose one of {_divisors(config.num_heads)}"
        )
    if config.shape.head_width % 2:
        yield f"head_width = {config.shape.head_width} is odd: rotary positions need an even width"
    yield from _rope_problems(config)
    if config.routing.strategy != "none":
        yield from _routing_problems(config, config.routing)
    yield from _expert_problems(config, config.experts)
    yield from _memory_problems(config, config.memory)


def _rope_problems(config: ModelConfig) -> Iterator[str]:
    factors = config.rope_factors
    if factors is None:
        return
    given = f"rope_factors = {list(factors)}"
    if len(factors) not in (1, 4):
        yield f"{given} must be one number, or four: factor, low, high and first length"
    elif len(factors) == 4 and factors[1] >= factors[2]:
        yield f"{given} must have a low frequency factor, the second, below the high one, the third"


def _routing_problems(config: ModelConfig, routing: RoutingConfig) -> Iterator[str]:
    routed = config.routed_layers
    if routing.layers is not None:
        inside = all(0 <= layer < config.num_layers for layer in routed)
        if not routed or not inside or list(routed) != sorted(set(routed)):
            yield (
                f"routing.layers = {list(routed)} must be distinct blocks in ascending order, from "
                f"0 to {config.num_layers - 1}"
            )
    elif not routed:
        yield (
            f"routing.every = {routing.every} and routing.first_dense = {routing.first_dense} "
            f"leave no routed block among {config.num_layers}: lower them, or set "
            f"routing.strategy = 'none'"
        )
    listed = routing.capacity
    if isinstance(listed, tuple) and len(listed) != len(routed):
        yield (
            f"routing.capacity lists {len(listed)} numbers, but {len(routed)} blocks route "
            f"({_join(routed)}): give one number for each"
        )
    capacities, strategy = config.capacities, STRATEGIES[routing.strategy]
    if strategy.is_final and list(capacities) != sorted(capacities, reverse=True):
        yield (
            f"routing.capacity must not increase with depth under {routing.strategy}, where a "
            f"token that left never returns"
        )
    if strategy.is_final and routed and routed != tuple(range(routed[0], config.num_layers)):
        yield (
            f"routing.strategy = '{routing.strategy}' needs every block after the first routed "
            f"one to route too, as a token that left passes no later block: set routing.every = 1, "
            f"and routing.first_dense to the number of blocks that all tokens pass"
        )
    if strategy.is_final and routing.kv_capacity is not None:
        yield (
            f"routing.kv_capacity cannot be combined with {routing.strategy}, where a token that "
            f"left offers no keys: leave it out"
        )
    if routing.noise_gate != "learned" and not strategy.is_random:
        yield (
            f"routing.noise_gate = '{routing.noise_gate}' is for random routing: set "
            f"routing.strategy = 'stochastic', or leave it out"
        )
    if not strategy.is_balanced or routing.kv_capacity is not None:
        for name, value, default in (
            ("bias_rate", routing.bias_rate, 0.0),
            ("place_factor", routing.place_factor, 1.0),
        ):
            if value != default:
                yield (
                    f"routing.{name} = {value} is for token_choice without kv_capacity: set "
                    f"routing.strategy = 'token_choice' and no routing.kv_capacity, or leave it out"
                )
    if routing.first_tokens > num_kept(min(capacities), config.max_seq_len):
        yield (
            f"routing.first_tokens = {routing.first_tokens} is more than the "
            f"{num_kept(min(capacities), config.max_seq_len)} tokens that the smallest capacity "
            f"keeps at max_seq_len = {config.max_seq_len}"
        )
    if routing.aux_loss_weight > 0 and not routing.has_target:
        yield (
            f"routing.aux_loss_weight must be 0 under {routing.strategy}, which has no top-k to "
            f"learn: use {say_targets()}"
        )
    if strategy.asks_head and routing.causal_head is None:
        yield (
            f"routing.strategy = '{routing.strategy}' needs a trained causal head: set "
            f"routing.predictor = true, or routing.aux_loss_weight above 0"
        )
    if routing.kv_capacity is not None and routing.kv_capacity < max(capacities):
        yield (
            f"routing.kv_capacity = {routing.kv_capacity} is below the capacity "
            f"{max(capacities)}: every updated token provides keys, so it must be at least that"
        )


def _expert_problems(config: ModelConfig, experts: ExpertsConfig) -> Iterator[str]:
    if experts.strategy == "none":
        if experts.num_noop:
            yield "experts.num_noop needs experts: set experts.strategy"
        return
    if experts.num_experts > config.max_seq_len:
        yield (
            f"experts.num_experts = {experts.num_experts} is greater than the {config.max_seq_len} "
            f"tokens of max_seq_len: some experts would never get one"
        )
    if not config.expert_layers:
        yield (
            f"experts.every = {experts.every} leaves none of the {config.num_layers} blocks with "
            f"experts: choose at most {config.num_layers}"
        )
    choices = experts.num_experts + experts.num_noop
    if experts.tokens_choose and experts.per_token > choices:
        yield f"experts.per_token = {experts.per_token} is more than the {choices} experts"
    most = experts.num_experts if experts.has_target else experts.per_token
    if not 0 < experts.capacity <= most:
        yield f"experts.capacity = {experts.capacity} must lie in (0, {most}]"


def _memory_problems(config: ModelConfig, memory: MemoryConfig) -> Iterator[str]:
    if config.routing.bypass != "identity" and not config.routed_layers:
        yield (
            f"routing.bypass = '{config.routing.bypass}' needs routed blocks: set "
            f"routing.strategy, or leave it out"
        )
    if not config.has_memory:
        return
    if list(memory.ngrams) != sorted(set(memory.ngrams)) or not memory.ngrams:
        yield f"memory.ngrams = {list(memory.ngrams)} must be distinct lengths in ascending order"
    elif config.shape.memory_width % memory.num_tables:
        yield (
            f"memory.width = {config.shape.memory_width} must be a multiple of the "
            f"{memory.num_tables} tables (memory.ngrams times memory.num_hashes)"
        )
    if memory.place == "blocks" and not config.memory_layers:
        yield (
            f"memory.every = {memory.every} leaves none of the {config.num_layers} blocks with a "
            f"memory: choose at most {config.num_layers}"
        )
    if memory.place == "blocks" and config.bypass_layers:
        yield (
            "routing.bypass = 'lookup' and memory.place = 'blocks' give skipped tokens the same "
            "vectors twice: choose one of them"
        )


def _divisors(number: int) -> str:
    return _join(n for n in range(1, number + 1) if number % n == 0)


def _join(items: Iterable[int]) -> str:
    return ", ".join(map(str, items))
