"""The file of a trace: what is in it, how it is written, and what is wrong with one that is not.

A trace is plain JSON (docs/seeing.md): tokens and their texts, and for each rule, `topk` and where
the model has a causal head `causal`, lists with a value for each token. Knows no model.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.files import replace_file

FORMAT, VERSION = "depthmix trace", 1
RULES = ("topk", "causal")
_KEYS = ("model", "origin", "tokens", "texts", "window_starts", "num_added", "rules")


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace, a line for each list so that it can be looked through."""
    check_trace(trace, str(path))
    replace_file(path, _to_lines(trace) + "\n")


def read_trace(path: Path) -> dict[str, Any]:
    """A trace from its file, or a sentence that says why it is none."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no trace: {error}; 'depthmix trace' writes one") from error
    check_trace(trace, str(path))
    return trace


def check_trace(trace: Any, name: str) -> None:
    """Refuse what is no trace, or one whose lists do not fit each other."""
    if not isinstance(trace, Mapping) or trace.get("format") != FORMAT:
        raise ValueError(f"{name} is no trace: 'depthmix trace RUN --text FILE' writes one")
    if trace.get("version") != VERSION:
        raise ValueError(
            f"{name} is a trace of version {trace.get('version')}, and this release reads "
            f"{VERSION}: write it anew with 'depthmix trace'"
        )
    missing = [key for key in _KEYS if key not in trace]
    if missing:
        raise ValueError(f"{name} is damaged, it lacks {', '.join(missing)}: write it anew")
    rules = trace["rules"]
    if not isinstance(rules, Mapping) or "topk" not in rules or set(rules) - set(RULES):
        raise ValueError(f"{name} is damaged, its rules must be topk and perhaps causal")
    for where, values in _list_columns(trace):
        if not isinstance(values, Sequence) or len(values) != len(trace["tokens"]):
            raise ValueError(
                f"{name} is damaged, {where} must have a value for each of the "
                f"{len(trace['tokens'])} tokens: write it anew"
            )


def _list_columns(trace: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every list that has a value for each token."""
    columns = [("texts", trace["texts"])]
    for name, rule in trace["rules"].items():
        columns += [(f"rules.{name}.{key}", rule.get(key)) for key in ("entropy", "loss")]
        for number, block in enumerate(rule.get("blocks", [])):
            place = f"rules.{name}.blocks[{number}]"
            columns += [(f"{place}.{key}", block.get(key)) for key in ("routed", "score")]
            if block.get("predictor") is not None:
                columns.append((f"{place}.predictor", block["predictor"]))
    return columns


def _to_lines(value: Any, indent: str = "") -> str:
    """JSON with objects opened and lists of plain values on one line each."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        parts = [f"{inner}{json.dumps(k)}: {_to_lines(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        parts = [inner + _to_lines(item, inner) for item in value]
        return "[\n" + ",\n".join(parts) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
