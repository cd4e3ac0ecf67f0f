"""A trace → one page that needs nothing else: text coloured by depth, and the router in numbers.

Owns what goes into the template `view.html`, which draws. Knows no torch.
"""

import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from depthmix.report.traces import check_trace, classify_tokens, compare_rules, measure_rule

TEMPLATE = "view.html"


def write_page(trace: Mapping[str, Any]) -> str:
    """The page's HTML."""
    check_trace(trace, "this")
    data = {
        **trace,
        "classes": classify_tokens(trace),
        "measures": {name: measure_rule(trace, name) for name in trace["rules"]},
        "agreement": compare_rules(trace),
    }
    template = resources.files("depthmix.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    title = f"Depth of {trace['origin'].get('run', 'a model')}"
    # cut first: what a text or a name holds must not be taken for a place to fill
    head, _, tail = template.partition("{{data}}")
    return head.replace("{{title}}", html.escape(title)) + embed_json(data) + tail


def embed_json(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can close or open one."""
    told = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
