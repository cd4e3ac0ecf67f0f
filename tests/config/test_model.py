"""Configurations: rules that refuse, what is derived from fields, and exact round trips."""

import dataclasses
import math
import re
from decimal import ROUND_CEILING, Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from depthmix.config import (
    SELECTORS,
    ExpertsConfig,
    ModelConfig,
    RoutingConfig,
    fields,
    load_preset,
)
from depthmix.config.model import find_problems, num_kept

MOD = {"routing.strategy": "expert_choice"}
MOE = {"experts.strategy": "expert_choice"}
TOKEN_MOE = {"experts.strategy": "token_choice"}
EXIT = {"routing.strategy": "early_exit", "routing.layers": (2, 3)}

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
    ({"rope_factors": (0.0,)}, "rope_factors = 0.0", "must be greater than 0"),
    ({"rope_factors": (8.0, 1.0, math.inf, 64.0)}, "rope_factors = inf", "be a finite number"),
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
    ({"routing.every": 5}, "routing.every", "no routed block among 4"),
    ({"routing.first_dense": 4, "routing.every": 1}, "routing.first_dense", "'none'"),
    ({"routing.layers": ()}, "routing.layers = []", "from 0 to 3"),
    ({"routing.layers": (1, 4)}, "routing.layers = [1, 4]", "from 0 to 3"),
    ({"routing.layers": (-1, 2)}, "routing.layers = [-1, 2]", "from 0 to 3"),
    ({"routing.layers": (2, 1)}, "routing.layers = [2, 1]", "ascending order"),
    ({"routing.layers": (1, 1)}, "routing.layers = [1, 1]", "distinct blocks"),
    ({"routing.layers": (1,), "routing.capacity": (0.5, 0.5)}, "routing.capacity", "1 blocks"),
    ({"routing.capacity": (0.5,)}, "routing.capacity", "2 blocks route (1, 3)"),
    ({"routing.capacity": ()}, "routing.capacity", "lists 0 numbers"),
    (
        {"routing.strategy": "early_exit", "routing.layers": (2, 3), "routing.capacity": (0.2, 1)},
        "routing.capacity",
        "must not increase with depth",
    ),
    ({"routing.strategy": "early_exit"}, "routing.strategy", "set routing.every = 1"),
    (
        {"routing.strategy": "early_exit", "routing.layers": (1, 2)},
        "routing.strategy",
        "passes no later block",
    ),
    (
        {"routing.strategy": "early_exit", "routing.every": 1, "routing.kv_capacity": 0.5},
        "routing.kv_capacity",
        "offers no keys",
    ),
    ({"routing.noise_gate": "gaussian"}, "routing.noise_gate", "'stochastic'"),
    ({"routing.bias_rate": 0.1}, "routing.bias_rate", "token_choice"),
    ({"routing.place_factor": 1.5}, "routing.place_factor", "token_choice"),
    ({"routing.place_factor": 0.5}, "routing.place_factor", "at least 1"),
    (
        {
            "routing.strategy": "token_choice",
            "routing.kv_capacity": 0.5,
            "routing.bias_rate": 0.1,
        },
        "routing.bias_rate",
        "without kv_capacity",
    ),
    ({"routing.first_tokens": 9}, "routing.first_tokens", "8 tokens"),
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


def test_configurations_are_frozen_and_hashable() -> None:
    config = load_preset("tiny")
    for target, name in ((config, "width"), (config.routing, "every"), (config.experts, "every")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, 1)
    assert hash(config) == hash(load_preset("tiny"))


def test_unknown_fields_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"'routing\.capasity'. Did you mean 'routing\.capacity'"):
        load_preset("tiny", **{"routing.capasity": 0.5})
    with pytest.raises(ValueError, match=r"'widht'\. Did you mean 'width'"):
        ModelConfig.from_dict({"widht": 3})
    with pytest.raises(
        ValueError, match=r"'experts\.per_tokens'. Did you mean 'experts\.per_token'"
    ):
        ModelConfig.from_dict({"experts": {"per_tokens": 3}})


def test_overrides_from_text_and_plain_data_agree() -> None:
    plain = {
        "width": 96,
        "num_kv_heads": None,
        "qk_norm": True,
        "rope_theta": 5e5,
        "routing.capacity": (0.5, 0.25),
        "routing.gate": "tanh1",
        "experts.strategy": "token_choice",
    }
    text = {
        "width": "96",
        "num_kv_heads": "none",
        "qk_norm": "true",
        "rope_theta": "5e5",
        "routing.capacity": "[0.5, 0.25]",
        "routing.gate": "tanh1",
        "experts.strategy": "token_choice",
    }
    assert load_preset("tiny").override(plain) == load_preset("tiny").override(text)
    nested = {"routing": {"capacity": [0.5, 0.25], "gate": "tanh1"}}
    found = load_preset("tiny").override(nested).routing
    assert found == load_preset("tiny").override(plain).routing


def test_sections_may_be_tables() -> None:
    config = ModelConfig.from_dict(
        {"routing": {"strategy": "expert_choice", "capacity": [0.5] * 6}}
    )
    assert config.routing.capacity == (0.5,) * 6
    assert isinstance(config.routing, RoutingConfig)
    assert isinstance(config.experts, ExpertsConfig)


@pytest.mark.parametrize(
    ("overrides", "mlp", "expert"),
    [
        ({"width": 48}, 128, 128),
        ({"width": 52, "num_heads": 2}, 256, 256),
        ({"width": 768}, 2048, 2048),
        ({"width": 48, "mlp": "gelu"}, 192, 192),
        ({"mlp_width": 100}, 100, 100),
        ({"mlp_width": 100, "experts.width": 7}, 100, 7),
    ],
)
def test_empty_widths_are_filled_in(overrides: dict[str, Any], mlp: int, expert: int) -> None:
    config = load_preset("tiny", **overrides)
    assert (config.shape.mlp_width, config.shape.expert_width) == (mlp, expert)


def test_heads_are_filled_in() -> None:
    config = load_preset("tiny", num_kv_heads=None)
    assert (config.shape.num_kv_heads, config.shape.head_width) == (4, 16)
    config = load_preset("tiny", head_width=6)
    assert (config.shape.num_kv_heads, config.shape.head_width) == (2, 6)


@pytest.mark.parametrize(
    ("every", "first_dense", "expected"),
    [(1, 0, (0, 1, 2, 3, 4, 5)), (2, 0, (1, 3, 5)), (2, 1, (2, 4)), (3, 0, (2, 5)), (1, 5, (5,))],
)
def test_routed_layers(every: int, first_dense: int, expected: tuple[int, ...]) -> None:
    routing = {"routing.every": every, "routing.first_dense": first_dense}
    config = load_preset("tiny", num_layers=6, **routing)
    assert config.routed_layers == expected
    assert config.capacities == (0.125,) * len(expected)
    assert config.override({"routing.strategy": "none"}).routed_layers == ()


def test_routed_layers_may_be_listed() -> None:
    routing = {"strategy": "expert_choice", "layers": [0, 3], "every": 7, "first_dense": 9}
    config = ModelConfig.from_dict({"num_layers": 4, "routing": routing})
    assert config.routed_layers == (0, 3)
    assert ModelConfig.from_dict(config.to_dict()) == config
    # on a command line it is text, and 'none' empties it
    assert config.override({"routing.layers": "[1, 2]"}).routed_layers == (1, 2)
    by_rule = {"routing.layers": "none", "routing.every": 2, "routing.first_dense": 0}
    assert config.override(by_rule).routed_layers == (1, 3)
    assert config.override({"routing.strategy": "none"}).routed_layers == ()


def test_expert_layers() -> None:
    config = load_preset("tiny", num_layers=6, **{"experts.every": 3})
    assert config.expert_layers == ()
    assert config.override({"experts.strategy": "token_choice"}).expert_layers == (2, 5)


def test_capacity_schedules() -> None:
    config = load_preset("tiny", num_layers=5, **{"routing.every": 1, "routing.capacity": "linear"})
    assert config.capacities == pytest.approx((0.85, 0.675, 0.5, 0.325, 0.15))
    ends = {"routing.capacity_first": 1.0, "routing.capacity_last": 0.2}
    assert config.override(ends).capacities == pytest.approx((1.0, 0.8, 0.6, 0.4, 0.2))
    cosine = config.override({"routing.capacity": "cosine"}).capacities
    by_hand = [0.15 + 0.7 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)]
    assert cosine == pytest.approx(by_hand)
    listed = config.override({"routing.capacity": [0.9, 0.8, 0.7, 0.6, 0.5]})
    assert listed.capacities == (0.9, 0.8, 0.7, 0.6, 0.5)
    single = load_preset("tiny", **{"routing.every": 4, "routing.capacity": "linear"})
    assert single.capacities == (0.85,)


@pytest.mark.parametrize(
    ("routing", "selector"),
    [
        ({"strategy": "none"}, None),
        ({"strategy": "expert_choice"}, "predictor"),
        ({"strategy": "early_exit", "every": 1}, "predictor"),
        ({"strategy": "causal"}, "predictor"),
        ({"strategy": "expert_choice", "predictor": False}, None),
        ({"strategy": "expert_choice", "predictor": False, "aux_loss_weight": 0.01}, "router"),
        ({"strategy": "expert_choice", "aux_loss_weight": 0.01}, "predictor"),
        ({"strategy": "token_choice"}, "router"),
        ({"strategy": "stochastic"}, None),
    ],
)
def test_causal_selector(routing: dict[str, Any], selector: str | None) -> None:
    assert load_preset("tiny", routing=routing).causal_selector == selector


@pytest.mark.parametrize(
    ("overrides", "rules"),
    [
        ({"routing.strategy": "none"}, {"dense": None}),
        ({}, {"topk": None, "causal": "predictor"}),
        (
            {"routing.aux_loss_weight": 0.01, "routing.predictor": False},
            {"topk": None, "causal": "router"},
        ),
        ({"routing.strategy": "stochastic"}, {"topk": None}),
        ({"routing.strategy": "none", **MOE}, {"topk": None, "causal": "predictor"}),
        ({"routing.strategy": "none", **TOKEN_MOE}, {"dense": None}),
    ],
)
def test_routing_rules_of_a_validation(
    overrides: dict[str, Any], rules: dict[str, str | None]
) -> None:
    assert load_preset("tiny", **overrides).list_rules() == rules


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ({"routing.strategy": "none"}, False),
        ({}, True),
        ({"routing.strategy": "token_choice"}, True),
        ({"routing.strategy": "none", "experts.strategy": "expert_choice"}, True),
        ({"routing.strategy": "none", "experts.strategy": "token_choice"}, False),
        (
            {
                "routing.strategy": "none",
                "experts.strategy": "token_choice",
                "experts.per_token": 2,
            },
            True,
        ),
        (
            {
                "routing.strategy": "none",
                "experts.strategy": "token_choice",
                "experts.per_token": 2,
                "experts.capacity": 2.0,
            },
            False,
        ),
    ],
)
def test_needs_selector_to_decode(overrides: dict[str, Any], needed: bool) -> None:
    assert load_preset("tiny", **overrides).needs_selector_to_decode is needed


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        ({"routing.strategy": "none"}, {"topk", "predictor", "router", "all"}),
        ({}, {"topk", "predictor", "router", "all"}),
        ({"routing.predictor": False}, {"topk", "router", "all"}),
        ({"routing.strategy": "token_choice"}, {"topk", "router", "all"}),
        ({"routing.strategy": "stochastic"}, {"topk", "all"}),
        ({"routing.strategy": "stochastic", "routing.noise_gate": "gaussian"}, {"topk"}),
        ({"experts.strategy": "expert_choice"}, {"topk", "predictor", "router", "all"}),
        (
            {"experts.strategy": "expert_choice", "experts.predictor": False},
            {"topk", "router", "all"},
        ),
    ],
)
def test_selectors(overrides: dict[str, Any], allowed: set[str]) -> None:
    config = load_preset("tiny", **overrides)
    assert config.find_selector_problem(None) is None
    assert {s for s in SELECTORS if config.find_selector_problem(s) is None} == allowed


def test_selector_problems_say_what_to_do() -> None:
    config = load_preset("tiny")
    assert "use one of topk, predictor, router, all" in str(config.find_selector_problem("best"))
    without = config.override({"routing.predictor": False})
    assert "routing.predictor = true" in str(without.find_selector_problem("predictor"))
    experts = {"experts.strategy": "expert_choice", "experts.predictor": False}
    problem = config.override(experts).find_selector_problem("predictor")
    assert "experts.predictor = true" in str(problem)
    random = config.override({"routing.strategy": "stochastic"})
    assert "'topk' or 'all'" in str(random.find_selector_problem("router"))


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Random valid configurations as plain data, every field of them."""
    share = st.floats(0.001, 1.0)
    weight = st.floats(0.0, 10.0)
    heads, layers = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 8))
    every = draw(st.integers(1, layers))
    first_dense = draw(st.integers(0, layers - every))
    strategy = draw(
        st.sampled_from(
            ["none", "expert_choice", "token_choice", "stochastic", "early_exit", "causal"]
        )
    )
    if strategy == "early_exit":
        every = 1
    num_routed = len(range(first_dense + every - 1, layers, every))
    listed = st.lists(share, min_size=num_routed, max_size=num_routed).map(
        lambda values: tuple(sorted(values, reverse=True))
    )
    capacity = draw(share | listed | st.sampled_from(["linear", "cosine"]))
    first = draw(share)
    last = draw(st.floats(0.001, first))
    has_target = strategy in ("expert_choice", "early_exit", "causal")
    routing = dict(
        strategy=strategy,
        capacity=capacity,
        capacity_first=first,
        capacity_last=last,
        every=every,
        first_dense=first_dense,
        first_tokens=draw(st.integers(0, 1)),
        gate=draw(st.sampled_from(["raw", "sigmoid", "tanh1", "unit"])),
        normalize_input=draw(st.booleans()),
        init_std=draw(weight),
        aux_loss_weight=draw(st.floats(0.001, 10)) if has_target else 0.0,
        predictor=draw(st.booleans()),
        predictor_width=draw(st.integers(1, 512)),
        predictor_loss_weight=draw(weight),
        balance_loss_weight=draw(weight),
        kv_capacity=None if strategy == "early_exit" else draw(st.none() | st.just(1.0)),
        noise_gate=draw(st.sampled_from(["learned", "gaussian"]))
        if strategy == "stochastic"
        else "learned",
        bypass="identity" if strategy == "none" else draw(st.sampled_from(["identity", "lookup"])),
    )
    places = ["none", "input"] if routing["bypass"] == "lookup" else ["none", "input", "blocks"]
    memory = dict(
        place=draw(st.sampled_from(places)),
        every=draw(st.integers(1, layers)),
        ngrams=draw(st.sampled_from([(2,), (1, 3)])),
        num_hashes=draw(st.integers(1, 4)),
        num_rows=draw(st.integers(1, 10**6)),
        width=24 * draw(st.integers(1, 9)),
    )
    num_experts = draw(st.integers(1, 8))
    experts = dict(
        strategy=draw(st.sampled_from(["expert_choice", "token_choice"])),
        num_experts=num_experts,
        num_noop=draw(st.integers(0, 3)),
        per_token=draw(st.integers(1, num_experts)),
        capacity=draw(share),
        every=draw(st.integers(1, layers)),
        width=draw(st.none() | st.integers(1, 100)),
        aux_loss_weight=draw(weight),
        predictor=draw(st.booleans()),
        predictor_width=draw(st.integers(1, 512)),
        predictor_loss_weight=draw(weight),
        balance_loss_weight=draw(weight),
    )
    return dict(
        vocab_size=draw(st.integers(1, 10**6)),
        max_seq_len=draw(st.integers(8, 10**6)),
        num_layers=layers,
        width=heads * 2 * draw(st.integers(1, 64)),
        num_heads=heads,
        num_kv_heads=draw(st.sampled_from([None, 1, 2, heads])),
        head_width=draw(st.none() | st.integers(1, 64).map(lambda n: 2 * n)),
        mlp_width=draw(st.none() | st.integers(1, 1000)),
        mlp=draw(st.sampled_from(["swiglu", "gelu"])),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        residual_mix=draw(st.booleans()),
        value_embedding=draw(st.booleans()),
        tied_head=draw(st.booleans()),
        rope_theta=draw(st.floats(1e-3, 1e9)),
        rope_factors=draw(st.sampled_from([None, (4.0,), (32.0, 1.0, 4.0, 8192.0)])),
        norm_eps=draw(st.floats(1e-12, 1.0)),
        routing=routing,
        experts=draw(st.sampled_from([experts, {}])),
        memory=memory,
    )


@settings(max_examples=50)
@given(trees())
def test_every_text_form_round_trips_exactly(tree: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(tree)
    for name in fields.document_fields(ModelConfig):
        section, _, field = name.rpartition(".")
        given_values = tree[section] if section else tree
        if field in given_values:
            assert _look_up(config, name) == given_values[field]
    assert ModelConfig.from_toml(config.to_toml()) == config
    assert ModelConfig.from_json(config.to_json()) == config
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert config.override({}) == config
    flat = {name: _look_up(config, name) for name in fields.document_fields(ModelConfig)}
    assert ModelConfig().override(flat) == config


@given(trees())
def test_derived_values_are_consistent(tree: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(tree)
    assert len(config.capacities) == len(config.routed_layers)
    assert all(0 < capacity <= 1 for capacity in config.capacities)
    assert all(0 <= layer < config.num_layers for layer in config.routed_layers)
    twin = config.dense_twin()
    assert twin.routed_layers == ()
    assert (twin.experts, twin.shape) == (config.experts, config.shape)
    # generating and scoring use the trained head, or need an explicit selector
    if not config.needs_selector_to_decode:
        assert config.causal_selector is None
        assert config.choose_selector(None) is None
    elif config.causal_selector is None:
        reason = "no head trained for causal routing|trained and validated, but not sampled"
        with pytest.raises(ValueError, match=reason):
            config.choose_selector(None)
    else:
        assert config.find_selector_problem(config.causal_selector) is None
        assert config.choose_selector(None) == config.causal_selector
    if not config.routing.draws_scores:
        assert config.choose_selector("all") == "all"


def _look_up(config: ModelConfig, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def test_every_field_is_documented() -> None:
    docs = fields.document_fields(ModelConfig)
    assert len(docs) > 35
    assert [name for name, text in docs.items() if not text] == []


@pytest.mark.parametrize(("overrides", "field", "says"), REFUSED, ids=lambda case: str(case)[:60])
def test_errors_name_the_field(overrides: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        load_preset("tiny", **overrides)
    message = str(refusal.value)
    assert re.search(rf"(^|[ ']){re.escape(field)}($|[ ,.:=])", message), message


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_heads": 5, "num_kv_heads": 5, "head_width": 8},
        {"routing.capacity": 1.0},
        {**EXIT, "routing.capacity": (0.5, 0.25)},
        {**EXIT, "routing.capacity": (0.5, 0.5)},
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
def test_limits_of_each_rule_are_allowed(overrides: dict[str, Any]) -> None:
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


def test_unlike_names_get_a_few_nearest_fields() -> None:
    with pytest.raises(
        ValueError, match=r"no configuration field 'zzz'\. The nearest are: "
    ) as refused:
        ModelConfig().override({"zzz": 1})
    assert len(str(refused.value)) < 150


def test_training_fields_are_refused_for_a_model() -> None:
    with pytest.raises(ValueError, match=r"'train\.seed' is a field of training, .* leave it out"):
        ModelConfig().override({"train.seed": 3})
