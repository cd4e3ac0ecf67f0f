"""A trace of one text: its file, checks of what was read, and numbers about the router.

A trace is plain JSON (docs/seeing.md): tokens and their texts, and for each rule (`topk`, and
`causal` if the model has a causal head) lists with a value for each token. The numbers are shares,
histograms, dead tokens and the correlation with entropy. Independent of models; `view` draws.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from depthmix.files import parse_json, replace_file
from depthmix.units import format_count

FORMAT, VERSION = "depthmix trace", 1
RULES = ("topk", "causal")
_KEYS = ("model", "origin", "tokens", "texts", "window_starts", "num_added", "rules")

CLASSES = ("word start", "continuation", "number", "punctuation", "whitespace", "other")
NUM_SCORE_BINS = 24
NUM_POSITION_BINS = 16
NUM_DEAD_SHOWN = 16


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Write a trace with one line per list, so that people can read it."""
    check_trace(trace, str(path))
    replace_file(path, _to_lines(trace) + "\n")


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace; the error says why a file is not one."""
    try:
        trace = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a trace: {error}; 'depthmix trace' writes one") from error
    check_trace(trace, str(path))
    return trace


def cut_trace(trace: Mapping[str, Any], max_tokens: int) -> Mapping[str, Any]:
    """The same of a text's first tokens only."""
    end = trace["num_added"] + max_tokens
    if end >= len(trace["tokens"]):
        return trace

    def cut(tree: Mapping[str, Any], *names: str) -> dict[str, Any]:
        return {**tree, **{name: tree[name][:end] for name in names if tree.get(name) is not None}}

    rules = {
        name: cut(rule, "entropy", "loss")
        | {"blocks": [cut(block, "routed", "score", "predictor") for block in rule["blocks"]]}
        for name, rule in trace["rules"].items()
    }
    starts = [start for start in trace["window_starts"] if start < end]
    return cut(trace, "tokens", "texts") | {"window_starts": starts, "rules": rules}


@contextmanager
def explain_damage(trace: Path) -> Iterator[None]:
    """Turn errors from a damaged trace, whose values are not all checked, into one sentence."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{trace} is damaged ({error}): write it again with 'depthmix trace'"
        ) from error


def check_trace(trace: Any, name: str) -> None:
    """Refuse what is not a trace, or one whose lists do not fit each other."""
    if not isinstance(trace, Mapping) or trace.get("format") != FORMAT:
        raise ValueError(f"{name} is not a trace: 'depthmix trace RUN --text FILE' writes one")
    if trace.get("version") != VERSION:
        raise ValueError(
            f"{name} is a trace of version {trace.get('version')}, and this release reads "
            f"{VERSION}: write it again with 'depthmix trace'"
        )
    missing = [key for key in _KEYS if key not in trace]
    if missing:
        raise ValueError(f"{name} is damaged, it lacks {', '.join(missing)}: write it again")
    rules = trace["rules"]
    if not isinstance(rules, Mapping) or "topk" not in rules or set(rules) - set(RULES):
        raise ValueError(f"{name} is damaged, its rules must be topk and perhaps causal")
    for where, values in _list_columns(trace):
        if not isinstance(values, Sequence) or len(values) != len(trace["tokens"]):
            raise ValueError(
                f"{name} is damaged, {where} must have a value for each of the "
                f"{len(trace['tokens'])} tokens: write it again"
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
    """Indented JSON, but with each list of plain values on one line."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        parts = [f"{inner}{json.dumps(k)}: {_to_lines(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        parts = [inner + _to_lines(item, inner) for item in value]
        return "[\n" + ",\n".join(parts) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def measure_rule(trace: Mapping[str, Any], name: str) -> dict[str, Any]:
    """All numbers of one rule, as plain data."""
    rule = trace["rules"][name]
    routed = np.array([block["routed"] for block in rule["blocks"]], dtype=np.int64)
    depth = routed.sum(axis=0)
    return {
        "mean_depth": float(depth.mean()),
        "share_routed": [float(share) for share in routed.mean(axis=1)],
        "depth_counts": np.bincount(depth, minlength=len(routed) + 1).tolist(),
        "scores": [count_scores(block) for block in rule["blocks"]],
        "positions": share_by_position(trace, routed),
        "classes": share_by_class(classify_tokens(trace), routed),
        "dead": find_dead(trace["texts"], depth),
        "entropy": relate_entropy(depth, np.array(rule["entropy"]), len(routed)),
        "mean_loss": _mean([loss for loss in rule["loss"] if loss is not None]),
    }


def tell_trace(trace: Mapping[str, Any]) -> str:
    """A trace in a line."""
    tokens, rules = format_count(len(trace["tokens"]), "token"), trace["rules"]
    parts = [f"{tokens} in {format_count(len(trace['window_starts']), 'window')}"]
    for name, rule in rules.items():
        found = measure_rule(trace, name)
        share = sum(found["share_routed"]) / len(found["share_routed"])
        loss = "" if found["mean_loss"] is None else f", loss {found['mean_loss']:.3f}"
        parts.append(f"{rule['label']} routes {share:.1%}{loss}")
    return "; ".join(parts)


def compare_rules(trace: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """How causal decisions agree with those of top-k, per block; None without a causal head."""
    if "causal" not in trace["rules"]:
        return None
    found = []
    pairs = (trace["rules"][name]["blocks"] for name in ("topk", "causal"))
    for first, second in zip(*pairs, strict=True):
        topk, causal = (np.array(block["routed"], dtype=bool) for block in (first, second))
        both = int((topk & causal).sum())
        found.append(
            {
                "layer": first["layer"],
                "differ": int((topk ^ causal).sum()),
                "precision": both / int(causal.sum()) if causal.any() else None,
                "recall": both / int(topk.sum()) if topk.any() else None,
            }
        )
    return found


def count_scores(block: Mapping[str, Any]) -> dict[str, Any]:
    """A histogram of one block's router weights: of all tokens, and of those that were routed."""
    scores, routed = np.array(block["score"]), np.array(block["routed"], dtype=bool)
    low, high = float(scores.min()), float(scores.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts, _ = np.histogram(scores, NUM_SCORE_BINS, (low, high))
    inside, _ = np.histogram(scores[routed], NUM_SCORE_BINS, (low, high))
    return {
        "layer": block["layer"],
        "low": low,
        "high": high,
        "all": counts.tolist(),
        "routed": inside.tolist(),
        # sigmoid(score) > 0.5, the threshold that an auxiliary loss trains
        "share_positive": float((scores > 0).mean()),
    }


def share_by_position(
    trace: Mapping[str, Any], routed: Int[np.ndarray, "blocks tokens"]
) -> list[dict[str, Any]]:
    """Share of blocks that a token visited, by its place in the window."""
    place = np.arange(routed.shape[1])
    starts = np.array(trace["window_starts"])
    place = place - starts[np.searchsorted(starts, place, side="right") - 1]
    # a short text fills its bins, too
    longest = int(place.max()) + 1
    num_bins = min(NUM_POSITION_BINS, longest)
    number = place * num_bins // longest
    found = []
    for i in range(num_bins):
        inside = place[number == i]
        found.append(
            {
                "first": int(inside.min()),
                "last": int(inside.max()),
                "count": len(inside),
                "share": float(routed[:, number == i].mean()),
            }
        )
    return found


def classify_tokens(trace: Mapping[str, Any]) -> list[str]:
    """The class of each token by its text and by the text before it."""
    found, before = [], ""
    for token, text in zip(trace["tokens"], trace["texts"], strict=True):
        special = token == trace.get("end_token")
        found.append("other" if special else classify_text(text, before))
        # after a special token a new text begins
        before = "" if special else text or before
    return found


def classify_text(text: str, before: str) -> str:
    """The class of one piece of text."""
    if text and text.isspace():
        return "whitespace"
    core = text.strip()
    if any(char.isalpha() for char in core):
        first = next(i for i, char in enumerate(text) if char.isalpha())
        inside = first == 0 and before[-1:].isalnum()
        return "continuation" if inside else "word start"
    if any(char.isnumeric() for char in core):
        return "number"
    kinds = [unicodedata.category(char) for char in core]
    if kinds and all(kind[0] == "P" or kind in ("Sm", "Sc", "Sk") for kind in kinds):
        return "punctuation"
    return "other"


def share_by_class(
    classes: Sequence[str], routed: Int[np.ndarray, "blocks tokens"]
) -> list[dict[str, Any]]:
    """Share of blocks visited, and the number of tokens, for each class that occurs."""
    of = np.array(classes)
    return [
        {"name": name, "count": int(here.sum()), "share": float(routed[:, here].mean())}
        for name in CLASSES
        if (here := of == name).any()
    ]


def find_dead(texts: Sequence[str], depth: Int[np.ndarray, " tokens"]) -> dict[str, Any]:
    """Tokens that no routed block kept: how many, and their most frequent texts."""
    total = Counter(texts)
    dead = Counter(text for text, used in zip(texts, depth, strict=True) if used == 0)
    return {
        "count": dead.total(),
        "share": dead.total() / len(texts),
        "most": [
            {"text": text, "count": count, "of": total[text]}
            # tokens without a text of their own cannot be distinguished
            for text, count in dead.most_common(NUM_DEAD_SHOWN + 1)
            if text
        ][:NUM_DEAD_SHOWN],
    }


def relate_entropy(
    depth: Int[np.ndarray, " tokens"], entropy: Float[np.ndarray, " tokens"], num_blocks: int
) -> dict[str, Any]:
    """Pearson's correlation of depth and entropy, None where one is constant; means by depth."""
    constant = bool((depth == depth[0]).all() or (entropy == entropy[0]).all())
    groups = [entropy[depth == used] for used in range(num_blocks + 1)]
    return {
        "correlation": None if constant else float(np.corrcoef(depth, entropy)[0, 1]),
        "means": [_mean(group) for group in groups],
        "counts": [len(group) for group in groups],
    }


def _mean(values: Sequence[float] | Float[np.ndarray, " values"]) -> float | None:
    return float(np.mean(values)) if len(values) else None
