"""A self-contained page of a trace: text coloured by depth, and the router in numbers.

Prepares the data; the template `view.html` draws. Does not load torch.
"""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from depthmix.report.look import dress, read_part
from depthmix.report.traces import check_trace, classify_tokens, compare_rules, measure_rule

TEMPLATE = "view.html"


def write_page(trace: Mapping[str, Any]) -> str:
    """The page's HTML."""
    check_trace(trace, "this")
    data = {
        **trace,
        "rules": {name: _lighten(rule, name) for name, rule in trace["rules"].items()},
        "classes": classify_tokens(trace),
        "measures": {name: measure_rule(trace, name) for name in trace["rules"]},
        "agreement": compare_rules(trace),
    }
    look = dress(read_part(TEMPLATE))
    title = f"Depth of {trace['origin'].get('run', 'a model')}"
    # split first: a text or a name may contain what looks like a placeholder
    head, _, tail = look.html.partition("{{data}}")
    head = head.replace("{{policy}}", html.escape(look.policy, quote=False))
    return head.replace("{{title}}", html.escape(title)) + embed_json(data) + tail


def _lighten(rule: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The part of a rule that a page shows: two digits, and a predictor only if it decides."""
    blocks = [
        {
            **block,
            "score": _shorten(block["score"]),
            "predictor": _shorten(block["predictor"])
            if block.get("predictor") and name == "causal"
            else None,
        }
        for block in rule["blocks"]
    ]
    shown = {key: _shorten(rule[key]) for key in ("entropy", "loss")}
    return {**rule, **shown, "blocks": blocks}


def _shorten(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 2) for value in values]


def embed_json(value: Any) -> str:
    """JSON that is safe inside a script element, which it can neither close nor open."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
