"""What makes a model valid beyond the bounds of each field: rules that relate several of them.

Each is a sentence that says what would do. Owns no data of its own; `model` asks it once, when a
configuration is made.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from depthmix.config.choices import STRATEGIES

if TYPE_CHECKING:
    from depthmix.config.model import ExpertsConfig, ModelConfig, RoutingConfig


def num_kept(capacity: float, num_tokens: int) -> int:
    """k = ceil(C·T), at least one; the small slack keeps 0.07 · 100 from becoming 8."""
    return max(1, math.ceil(capacity * num_tokens - 1e-9))


def say_targets() -> str:
    """The strategies with a top-k that a head can learn, as a sentence lists them."""
    *names, last = (name for name, strategy in STRATEGIES.items() if strategy.has_target)
    return f"{', '.join(names)} or {last}"


def find_problems(config: "ModelConfig") -> Iterator[str]:
    """Everything wrong with a configuration, a sentence each; the first one is raised."""
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
    listed = routing.capacity
    if isinstance(listed, tuple) and len(listed) != len(routed):
        yield (
            f"routing.capacity lists {len(listed)} numbers, but {len(routed)} blocks route "
            f"({_join(routed)}): give one number for each"
        )
    capacities, strategy = config.capacities, STRATEGIES[routing.strategy]
    if strategy.is_final and list(capacities) != sorted(capacities, reverse=True):
        yield (
            f"routing.capacity must not rise with depth under {routing.strategy}, where a token "
            f"that left does not come back"
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
            f"learn: use {say_targets()}"
        )
    if strategy.asks_head and routing.causal_head is None:
        yield (
            f"routing.strategy = '{routing.strategy}' needs a trained head to decide: set "
            f"routing.predictor = true, or routing.aux_loss_weight above 0"
        )
    if routing.kv_capacity is not None and routing.kv_capacity < max(capacities):
        yield (
            f"routing.kv_capacity = {routing.kv_capacity} is below the capacity "
            f"{max(capacities)}: an updated token offers its keys too, so it must not be less"
        )


def _expert_problems(config: "ModelConfig", experts: "ExpertsConfig") -> Iterator[str]:
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


def _divisors(number: int) -> str:
    return _join(n for n in range(1, number + 1) if number % n == 0)


def _join(items: Iterable[int]) -> str:
    return ", ".join(map(str, items))
