"""Losses in metrics: their names for each routing rule, and their other units."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# rules under which a run is measured (`ModelConfig.list_rules`); of each list, the first that a
# run has: the rule of its training, and the rule to compare runs by
TRAINED = ("topk", "dense")
JUDGED = ("causal", *TRAINED)


def name_metric(rule: str, metric: str = "loss") -> str:
    """The name in metrics: `loss` for a dense model, else `loss_topk` or `loss_causal`."""
    return metric if rule == "dense" else f"{metric}_{rule}"


def read_metric(record: Mapping[str, Any], rules: Sequence[str], metric: str = "loss") -> Any:
    """The metric under the first of these rules that a record has; None if it has none of them."""
    names = (name_metric(rule, metric) for rule in rules)
    return next((record[name] for name in names if name in record), None)


def perplexity(loss: float) -> float:
    """Convert a loss in nats per token; capped to a float's range, for a diverged loss."""
    return math.exp(min(loss, 700.0))


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """Convert a loss in nats per token to bits per byte, comparable between tokenizers."""
    return None if bytes_per_token is None else loss / math.log(2) / bytes_per_token
