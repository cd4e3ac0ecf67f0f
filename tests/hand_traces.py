"""A trace made by hand, whose numbers can be counted on fingers."""

from typing import Any

TEXTS = ["", "The", " cat", "s", ",", " ", "12", "\n", "</script>", "", "é"]
# two blocks: who is kept by top-k and by the causal rule
TOPK = ([1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0])
CAUSAL = ([1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1])


def make_trace(*, causal: bool = True) -> dict[str, Any]:
    """Eleven tokens in windows of four."""
    count = len(TEXTS)
    rules = {"topk": _make_rule("top-k", None, TOPK)}
    if causal:
        rules["causal"] = _make_rule("causal", "predictor", CAUSAL)
    return {
        "format": "depthmix trace",
        "version": 1,
        "model": {
            "num_layers": 4,
            "routed_layers": [1, 3],
            "max_seq_len": 4,
            "strategy": "expert_choice",
            "gate": "raw",
        },
        "end_token": 0,
        "num_added": 1,
        "window_starts": [0, 4, 8],
        "tokens": list(range(count)),
        "texts": list(TEXTS),
        "rules": rules,
        "origin": {
            "run": "runs/<b>{{data}}",
            "checkpoint": "step-00000004",
            "text": "a&b.txt",
            "command": ["depthmix", "trace"],
            "versions": {"depthmix": "0.1"},
            "time": "2026-11-15T12:00:00+00:00",
            "device": "cpu",
        },
    }


def _make_rule(label: str, selector: str | None, routed: tuple[list[int], ...]) -> dict[str, Any]:
    count = len(TEXTS)
    depth = [sum(path) for path in zip(*routed, strict=True)]
    blocks = [
        {
            "layer": 2 * number + 1,
            "capacity": 0.25,
            "routed": list(kept),
            "score": [kept[i] - 0.5 + i / 100 for i in range(count)],
            "predictor": [2.0 * kept[i] - 1 for i in range(count)],
        }
        for number, kept in enumerate(routed)
    ]
    return {
        "label": label,
        "selector": selector,
        # entropy falls with depth, exactly
        "entropy": [5.0 - used for used in depth],
        "loss": [*[3.0] * (count - 1), None],
        "blocks": blocks,
    }
