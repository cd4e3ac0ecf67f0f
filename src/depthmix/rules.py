"""What makes a configuration valid: every rule, each a sentence that says what would be.

Owns no data of its own; `config.py` asks it once, when a configuration is made.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthmix.config import ExpertsConfig, ModelConfig, RoutingConfig

# far beyond any model, and few enough to list
MOST_LAYERS = 10_000


def num_kept(capacity: float, num_tokens: int) -> int:
    """k = ceil(C·T), at least one; the small slack keeps 0.07 · 100 from becoming 8."""
    return max(1, math.ceil(capacity * num_tokens - 1e-9))


def find_problems(config: "ModelConfig") -> Iterator[str]:
    """Everything wrong with a configuration, a sentence each; the first one is raised."""
    routing, experts = config.routing, config.experts
    for name in ("vocab_size", "max_seq_len", "num_layers", "width", "num_heads"):
        yield from _below_one(name, getattr(config, name))
    if config.num_layers > MOST_LAYERS:
        yield f"num_layers = {config.num_layers} is more than {MOST_LAYERS}, the most there may be"
    for name in ("num_kv_heads", "head_width", "mlp_width"):
        yield from _below_one(name, getattr(config, name))
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
    for name in ("rope_theta", "norm_eps"):
        if not 0 < getattr(config, name) < math.inf:
            yield f"{name} = {getattr(config, name)} must be a positive number"
    yield from _rope_problems(config)
    yield from _routing_problems(config, routing)
    yield from _expert_problems(config, experts)


def _rope_problems(config: "ModelConfig") -> Iterator[str]:
    factors = config.rope_factors
    if factors is None:
        return
    given = f"rope_factors = {list(factors)}"
    if len(factors) not in (1, 4):
        yield f"{given} must be one number, or four: factor, low, high and first length"
    elif not all(0 < number < math.inf for number in factors):
        yield f"{given} must be positive numbers"
    elif len(factors) == 4 and factors[1] >= factors[2]:
        yield f"{given} must have a low frequency factor, the second, below the high one, the third"


def _routing_problems(config: "ModelConfig", routing: "RoutingConfig") -> Iterator[str]:
    yield from _below_one("routing.every", routing.every)
    for name in ("first_dense", "first_tokens", "init_std"):
        yield from _negative(f"routing.{name}", getattr(routing, name))
    for name in ("aux_loss_weight", "predictor_loss_weight", "balance_loss_weight"):
        yield from _negative(f"routing.{name}", getattr(routing, name))
    yield from _below_one("routing.predictor_width", routing.predictor_width)
    yield from _bad_share("routing.capacity_first", routing.capacity_first)
    yield from _bad_share("routing.capacity_last", routing.capacity_last)
    given = routing.capacity
    for value in given if isinstance(given, tuple) else () if isinstance(given, str) else (given,):
        yield from _bad_share("routing.capacity", value)
    if routing.strategy == "none":
        return
    routed = config.routed_layers
    if routing.layers is not None:
        inside = all(0 <= layer < config.num_layers for layer in routed)
        if not routed or not inside or list(routed) != sorted(set(routed)):
            yield (
                f"routing.layers = {list(routed)} must be different blocks in rising order, from 0 "
                f"to {config.num_layers - 1}"
            )
    elif not routed:
        yield (
            f"routing.every = {routing.every} and routing.first_dense = {routing.first_dense} "
            f"leave none of the {config.num_layers} blocks to route: lower them, or set "
            f"routing.strategy = 'none'"
        )
    if isinstance(given, tuple) and len(given) != len(routed):
        yield (
            f"routing.capacity lists {len(given)} numbers, but {len(routed)} blocks route "
            f"({_join(routed)}): give one number for each"
        )
    capacities = config.capacities
    if routing.strategy == "early_exit" and list(capacities) != sorted(capacities, reverse=True):
        yield (
            "routing.capacity must not rise with depth under early_exit, where a token that left "
            "does not come back"
        )
    if routing.first_tokens > num_kept(min(capacities), config.max_seq_len):
        yield (
            f"routing.first_tokens = {routing.first_tokens} is more than the "
            f"{num_kept(min(capacities), config.max_seq_len)} places that the smallest capacity "
            f"gives at max_seq_len = {config.max_seq_len}"
        )
    if routing.aux_loss_weight > 0 and not routing.has_target:
        yield (
            f"routing.aux_loss_weight must be 0 under {routing.strategy}, which has no top-k to "
            f"learn: use expert_choice, early_exit or causal"
        )
    if routing.strategy == "causal" and routing.causal_head is None:
        yield (
            "routing.strategy = 'causal' needs a trained head to decide: set "
            "routing.predictor = true, or routing.aux_loss_weight above 0"
        )
    if routing.kv_capacity is not None:
        yield from _bad_share("routing.kv_capacity", routing.kv_capacity)
        if routing.kv_capacity < max(capacities):
            yield (
                f"routing.kv_capacity = {routing.kv_capacity} is below the capacity "
                f"{max(capacities)}: an updated token offers its keys too, so it must not be less"
            )


def _expert_problems(config: "ModelConfig", experts: "ExpertsConfig") -> Iterator[str]:
    for name in ("num_experts", "per_token", "every", "predictor_width", "width"):
        yield from _below_one(f"experts.{name}", getattr(experts, name))
    yield from _negative("experts.num_noop", experts.num_noop)
    for name in ("aux_loss_weight", "predictor_loss_weight", "balance_loss_weight"):
        yield from _negative(f"experts.{name}", getattr(experts, name))
    if experts.strategy == "none":
        if experts.num_noop:
            yield "experts.num_noop needs experts: set experts.strategy"
        return
    if experts.num_experts > config.max_seq_len:
        yield (
            f"experts.num_experts = {experts.num_experts} is more than the {config.max_seq_len} "
            f"tokens of max_seq_len: some experts would never get one"
        )
    if not config.expert_layers:
        yield (
            f"experts.every = {experts.every} leaves none of the {config.num_layers} blocks with "
            f"experts: choose at most {config.num_layers}"
        )
    choices = experts.num_experts + experts.num_noop
    if experts.strategy == "token_choice" and experts.per_token > choices:
        yield f"experts.per_token = {experts.per_token} is more than the {choices} experts"
    most = experts.num_experts if experts.strategy == "expert_choice" else experts.per_token
    if not 0 < experts.capacity <= most:
        yield f"experts.capacity = {experts.capacity} must lie in (0, {most}]"


def _below_one(name: str, value: int | None) -> Iterator[str]:
    if value is not None and value < 1:
        yield f"{name} = {value} must be at least 1"


def _negative(name: str, value: int | float) -> Iterator[str]:
    if not 0 <= value < math.inf:
        yield f"{name} = {value} must be 0 or more"


def _bad_share(name: str, value: float) -> Iterator[str]:
    if not 0 < value <= 1:
        yield f"{name} = {value} must lie in (0, 1]: 0.125 keeps one token in eight, 1.0 keeps all"


def _divisors(number: int) -> str:
    return _join(n for n in range(1, number + 1) if number % n == 0)


def _join(items: Iterable[int]) -> str:
    return ", ".join(map(str, items))
