"""The tables of names: complete, listed in `--help`, and the only ones that fields take."""

import pytest

from depthmix.config import fields, load_preset
from depthmix.config.choices import (
    CAUSAL_SELECTORS,
    EXPERT_STRATEGIES,
    GATES,
    NOISE_GATES,
    SELECTORS,
    STRATEGIES,
)
from depthmix.config.model import ModelConfig

# what some names need beside them
BESIDE = {"early_exit": {"routing.every": 1}, "gaussian": {"routing.strategy": "stochastic"}}

TABLES = {
    "routing.strategy": list(STRATEGIES),
    "routing.gate": list(GATES),
    "routing.noise_gate": list(NOISE_GATES),
    "experts.strategy": list(EXPERT_STRATEGIES),
}


@pytest.mark.parametrize("field", TABLES)
def test_fields_accept_exactly_the_names_of_their_table(field: str) -> None:
    text = fields.document_fields(ModelConfig)[field]
    for name in TABLES[field]:
        section, _, bare = field.partition(".")
        config = load_preset("tiny", **BESIDE.get(name, {}), **{field: name})
        assert getattr(getattr(config, section), bare) == name
        assert f" {name}: " in text
    names = ", ".join(f"'{name}'" for name in TABLES[field])
    with pytest.raises(
        ValueError, match=f"{field} = 'other' does not fit: it must be one of {names}"
    ):
        load_preset("tiny", **{field: "other"})


def test_every_routing_strategy_has_display_names() -> None:
    routed = [strategy for name, strategy in STRATEGIES.items() if name != "none"]
    for words in ("meaning", "label", "kind"):
        assert len({getattr(strategy, words) for strategy in routed} - {""}) == len(routed)


def test_a_strategy_has_one_rule_for_its_causal_head() -> None:
    # a head learns top-k, or the router needs none, or chance decides, or nothing is to decide
    for name, strategy in STRATEGIES.items():
        rules = strategy.has_target + strategy.trains_router + strategy.is_random
        assert rules == (name != "none"), name
        assert strategy.has_target or not strategy.asks_head, name


def test_either_experts_choose_or_tokens_do() -> None:
    for name, strategy in EXPERT_STRATEGIES.items():
        assert strategy.has_target + strategy.tokens_choose == (name != "none"), name


def test_causal_selectors_are_selectors() -> None:
    assert set(CAUSAL_SELECTORS) == set(SELECTORS) - {"topk"}
