"""Every rule refuses what it should, with a sentence that names the field and what would do."""

import math
import re
from decimal import ROUND_CEILING, Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from depthmix.config import ModelConfig, load_preset
from depthmix.config.rules import find_problems, num_kept

MOD = {"routing.strategy": "expert_choice"}
MOE = {"experts.strategy": "expert_choice"}
TOKEN_MOE = {"experts.strategy": "token_choice"}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # overrides, the field that the message names, what else it says
    *[
        ({name: 0}, name, "at least 1")
        for name in ("vocab_size", "max_seq_len", "num_layers", "width", "num_heads")
    ],
    ({"num_layers": 10**12}, "num_layers", "more than 10000"),
    ({"num_layers": 10**400}, "num_layers", "more than 10000"),
    *[({name: 0}, name, "at least 1") for name in ("num_kv_heads", "head_width", "mlp_width")],
    ({"num_heads": 5, "num_kv_heads": 5}, "num_heads", "does not divide width = 64"),
    ({"num_kv_heads": 3}, "num_kv_heads", "choose one of 1, 2, 4"),
    ({"head_width": 7}, "head_width", "even width"),
    ({"width": 12, "num_heads": 4}, "head_width", "even width"),
    ({"rope_theta": 0.0}, "rope_theta", "greater than 0"),
    ({"rope_theta": math.inf}, "rope_theta", "a finite number, greater than 0"),
    ({"rope_factors": ()}, "rope_factors = []", "one number, or four"),
    ({"rope_factors": (8.0, 1.0)}, "rope_factors = [8.0, 1.0]", "one number, or four"),
    ({"rope_factors": (0.0,)}, "rope_factors", "positive"),
    ({"rope_factors": (8.0, 1.0, math.inf, 64.0)}, "rope_factors", "positive"),
    ({"rope_factors": (8.0, 4.0, 4.0, 64.0)}, "rope_factors", "the second, below the high one"),
    ({"norm_eps": -1e-6}, "norm_eps", "greater than 0"),
    ({"norm_eps": math.nan}, "norm_eps", "greater than 0"),
    ({"routing.every": 0}, "routing.every", "at least 1"),
    ({"routing.first_dense": -1}, "routing.first_dense", "0 or more"),
    ({"routing.first_tokens": -1}, "routing.first_tokens", "0 or more"),
    ({"routing.init_std": -0.1}, "routing.init_std", "0 or more"),
    ({"routing.init_std": math.nan}, "routing.init_std", "0 or more"),
    ({"routing.aux_loss_weight": -0.1}, "routing.aux_loss_weight", "0 or more"),
    ({"routing.predictor_loss_weight": -0.1}, "routing.predictor_loss_weight", "0 or more"),
    ({"routing.balance_loss_weight": math.inf}, "routing.balance_loss_weight", "0 or more"),
    ({"routing.predictor_width": 0}, "routing.predictor_width", "at least 1"),
    ({"routing.capacity_first": 0.0}, "routing.capacity_first", "(0, 1]"),
    ({"routing.capacity_last": 1.5}, "routing.capacity_last", "(0, 1]"),
    ({"routing.capacity": 0.0}, "routing.capacity", "(0, 1]"),
    ({"routing.capacity": 1.01}, "routing.capacity", "(0, 1]"),
    ({"routing.capacity": math.nan}, "routing.capacity", "(0, 1]"),
    ({"routing.capacity": (0.5, -0.5)}, "routing.capacity", "(0, 1]"),
    ({"routing.every": 5}, "routing.every", "none of the 4 blocks"),
    ({"routing.first_dense": 4, "routing.every": 1}, "routing.first_dense", "'none'"),
    ({"routing.layers": ()}, "routing.layers = []", "from 0 to 3"),
    ({"routing.layers": (1, 4)}, "routing.layers = [1, 4]", "from 0 to 3"),
    ({"routing.layers": (-1, 2)}, "routing.layers = [-1, 2]", "from 0 to 3"),
    ({"routing.layers": (2, 1)}, "routing.layers = [2, 1]", "rising order"),
    ({"routing.layers": (1, 1)}, "routing.layers = [1, 1]", "different blocks"),
    ({"routing.layers": (1,), "routing.capacity": (0.5, 0.5)}, "routing.capacity", "1 blocks"),
    ({"routing.capacity": (0.5,)}, "routing.capacity", "2 blocks route (1, 3)"),
    ({"routing.capacity": ()}, "routing.capacity", "lists 0 numbers"),
    (
        {"routing.strategy": "early_exit", "routing.capacity": (0.25, 0.5)},
        "routing.capacity",
        "must not rise with depth",
    ),
    ({"routing.first_tokens": 9}, "routing.first_tokens", "8 places"),
    (
        {"routing.strategy": "stochastic", "routing.aux_loss_weight": 0.1},
        "routing.aux_loss_weight",
        "no top-k to learn",
    ),
    (
        {"routing.strategy": "token_choice", "routing.aux_loss_weight": 0.1},
        "routing.aux_loss_weight",
        "expert_choice, early_exit or causal",
    ),
    (
        {"routing.strategy": "causal", "routing.predictor": False},
        "routing.strategy",
        "routing.predictor = true",
    ),
    ({"routing.kv_capacity": 1.5}, "routing.kv_capacity", "(0, 1]"),
    ({"routing.kv_capacity": 0.1}, "routing.kv_capacity", "below the capacity 0.125"),
    (
        {"routing.capacity": (0.75, 0.25), "routing.kv_capacity": 0.5},
        "routing.kv_capacity",
        "below the capacity 0.75",
    ),
    *[
        ({f"experts.{name}": 0}, f"experts.{name}", "at least 1")
        for name in ("num_experts", "per_token", "every", "predictor_width", "width")
    ],
    ({"experts.num_noop": -1}, "experts.num_noop", "0 or more"),
    ({"experts.aux_loss_weight": -1.0}, "experts.aux_loss_weight", "0 or more"),
    ({"experts.predictor_loss_weight": -1.0}, "experts.predictor_loss_weight", "0 or more"),
    ({"experts.balance_loss_weight": -1.0}, "experts.balance_loss_weight", "0 or more"),
    ({"experts.num_noop": 1}, "experts.num_noop", "set experts.strategy"),
    ({**MOE, "experts.num_experts": 65}, "experts.num_experts", "64 tokens of max_seq_len"),
    ({**MOE, "experts.every": 5}, "experts.every", "at most 4"),
    (
        {**TOKEN_MOE, "experts.num_experts": 2, "experts.num_noop": 1, "experts.per_token": 4},
        "experts.per_token",
        "more than the 3 experts",
    ),
    ({**MOE, "experts.capacity": 9.0}, "experts.capacity", "(0, 8]"),
    ({**MOE, "experts.capacity": 0.0}, "experts.capacity", "(0, 8]"),
    ({**TOKEN_MOE, "experts.per_token": 2, "experts.capacity": 2.5}, "experts.capacity", "(0, 2]"),
]


@pytest.mark.parametrize(("overrides", "field", "says"), REFUSED, ids=lambda case: str(case)[:60])
def test_rule_names_the_field(overrides: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        load_preset("tiny", **overrides)
    message = str(refusal.value)
    assert re.search(rf"(^|[ ']){re.escape(field)}($|[ ,.:=])", message), message


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_heads": 5, "num_kv_heads": 5, "head_width": 8},
        {"routing.capacity": 1.0},
        {"routing.capacity": (0.5, 0.25), "routing.strategy": "early_exit"},
        {"routing.capacity": (0.5, 0.5), "routing.strategy": "early_exit"},
        {"routing.first_tokens": 8},
        {"routing.kv_capacity": 0.125},
        {"routing.strategy": "causal", "routing.predictor": False, "routing.aux_loss_weight": 0.1},
        {"routing.strategy": "none", "routing.capacity": (0.5,)},
        {"routing.strategy": "none", "routing.first_dense": 9},
        {"routing.init_std": 0.0},
        {**MOE, "experts.capacity": 8.0},
        {**MOE, "experts.num_experts": 64},
        {**MOE, "experts.every": 4},
        {**TOKEN_MOE, "experts.per_token": 8, "experts.capacity": 8.0},
        {**TOKEN_MOE, "experts.num_experts": 2, "experts.num_noop": 1, "experts.per_token": 3},
        {"experts.capacity": 99.0},
    ],
    ids=str,
)
def test_the_edge_of_each_rule_is_allowed(overrides: dict[str, Any]) -> None:
    assert isinstance(load_preset("tiny", **overrides), ModelConfig)


def test_a_valid_configuration_has_no_problems() -> None:
    assert list(find_problems(load_preset("tiny"))) == []


@example(70, 100)
@example(140, 50)
@given(st.integers(1, 1000), st.integers(1, 4096))
def test_num_kept_is_the_exact_ceiling(thousandths: int, num_tokens: int) -> None:
    """k = ceil(C·T) as decimals have it: 0.07 · 100 is 7, though floats make it more."""
    exact = Decimal(thousandths) / 1000 * num_tokens
    expected = int(exact.to_integral_value(rounding=ROUND_CEILING))
    assert num_kept(thousandths / 1000, num_tokens) == expected


def test_num_kept_is_at_least_one_and_at_most_all() -> None:
    assert num_kept(1e-12, 5) == 1
    assert num_kept(1.0, 5) == 5
    assert num_kept(0.125, 1) == 1
