"""Losses have one name in metrics for each rule, and convert to other measures."""

import math
import sys

import pytest

from depthmix.config import ModelConfig, load_preset
from depthmix.runs.losses import (
    JUDGED,
    TRAINED,
    bits_per_byte,
    name_metric,
    perplexity,
    read_metric,
)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (load_preset("tiny"), ["loss_topk", "loss_causal"]),
        (load_preset("tiny").dense_twin(), ["loss"]),
    ],
)
def test_each_rule_of_a_model_has_a_name(config: ModelConfig, names: list[str]) -> None:
    rules = config.list_rules()
    assert [name_metric(rule) for rule in rules] == names
    assert set(rules) <= set(JUDGED)


def test_the_first_rule_that_a_record_has_counts() -> None:
    routed = {"loss_topk": 3.0, "loss_causal": 3.5, "bits_per_byte_topk": 1.0}
    assert read_metric(routed, TRAINED) == 3.0
    assert read_metric(routed, JUDGED) == 3.5
    assert read_metric(routed, JUDGED, "bits_per_byte") == 1.0
    assert read_metric({"loss": 2.0}, TRAINED) == read_metric({"loss": 2.0}, JUDGED) == 2.0
    assert read_metric({}, JUDGED) is None


def test_another_rule_does_not_stand_in_for_a_loss_that_is_not_finite() -> None:
    assert read_metric({"loss_topk": 3.0, "loss_causal": None}, JUDGED) is None


def test_perplexity_of_a_diverged_loss_is_finite() -> None:
    assert perplexity(math.log(8)) == pytest.approx(8)
    assert perplexity(1e9) < sys.float_info.max


def test_bits_per_byte() -> None:
    # eight equally likely tokens of two bytes: three bits for two bytes
    assert bits_per_byte(math.log(8), 2.0) == pytest.approx(1.5)
    assert bits_per_byte(1.0, None) is None
