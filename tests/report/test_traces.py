"""A trace comes back from disk as it was, and is counted as by hand."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from depthmix.report.traces import (
    NUM_DEAD_SHOWN,
    check_trace,
    classify_text,
    classify_tokens,
    compare_rules,
    count_scores,
    cut_trace,
    find_dead,
    measure_rule,
    read_trace,
    relate_entropy,
    share_by_position,
    write_trace,
)
from hand_traces import TOPK, make_trace


@pytest.mark.parametrize("causal", [True, False])
def test_round_trip(tmp_path: Path, causal: bool) -> None:
    trace, path = make_trace(causal=causal), tmp_path / "trace.json"
    write_trace(trace, path)
    assert read_trace(path) == trace
    assert json.loads(path.read_text()) == trace
    # a list with a value for each token is one line
    assert max(map(len, path.read_text().splitlines())) < 200
    assert f' "tokens": {json.dumps(trace["tokens"], separators=(",", ":"))},' in (
        path.read_text().splitlines()
    )


@pytest.mark.parametrize("causal", [True, False])
def test_the_first_tokens_of_a_trace_are_a_trace(tmp_path: Path, causal: bool) -> None:
    trace = make_trace(causal=causal)
    assert cut_trace(trace, 10) == trace
    short = cut_trace(trace, 4)
    write_trace(short, tmp_path / "trace.json")
    assert short["tokens"] == [0, 1, 2, 3, 4]
    assert short["window_starts"] == [0, 4]
    for name, rule in trace["rules"].items():
        assert short["rules"][name]["entropy"] == rule["entropy"][:5]
        for block, whole in zip(short["rules"][name]["blocks"], rule["blocks"], strict=True):
            assert block["routed"] == whole["routed"][:5]
            assert block["score"] == whole["score"][:5]
    assert make_trace(causal=causal) == trace, "it is not changed"


def break_trace(*keys: Any, value: Any) -> dict[str, Any]:
    trace = make_trace()
    place: Any = trace
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return trace


@pytest.mark.parametrize(
    ("trace", "sentence"),
    [
        ([], "is not a trace: 'depthmix trace RUN"),
        ({"format": "other"}, "is not a trace: 'depthmix trace RUN"),
        (break_trace("version", value=9), "version 9, and this release reads 1"),
        ({"format": "depthmix trace", "version": 1, "model": {}}, "lacks origin, tokens, texts"),
        (break_trace("rules", value={"causal": {}}), "its rules must be topk"),
        (break_trace("rules", "extra", value={}), "its rules must be topk"),
        (break_trace("texts", value=["a"]), "texts must have a value for each of the 11 tokens"),
        (break_trace("rules", "causal", "loss", value=None), r"rules\.causal\.loss must have"),
        (
            break_trace("rules", "topk", "blocks", 1, "score", value=[1.0]),
            r"rules\.topk\.blocks\[1\]\.score must have",
        ),
        (
            break_trace("rules", "topk", "blocks", 0, "predictor", value=[1.0]),
            r"rules\.topk\.blocks\[0\]\.predictor must have",
        ),
    ],
)
def test_files_that_are_not_traces_are_refused(tmp_path: Path, trace: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_trace(trace, "this")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=sentence):
        read_trace(path)


def test_files_that_are_not_json_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for data in (b"text", b"\xff\xfe"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"is not a trace: .*'depthmix trace' writes"):
            read_trace(path)


def test_nothing_broken_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ValueError, match="texts must have"):
        write_trace(break_trace("texts", value=[]), path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "before", "wanted"),
    [
        ("The", "", "word start"),
        (" cat", "The", "word start"),
        ("s", " cat", "continuation"),
        ("s", "'", "word start"),
        ("(self", "f", "word start"),
        ("b2", "a", "continuation"),
        ("é", "caf", "continuation"),
        (" 12", "", "number"),
        ("1.5", "a", "number"),
        (",", "a", "punctuation"),
        (" =", "a", "punctuation"),
        ("$", "", "punctuation"),
        ("\n\t", "a", "whitespace"),
        ("", "a", "other"),
        ("\ufffd", "a", "other"),
        ("☃", "a", "other"),
    ],
)
def test_classes(text: str, before: str, wanted: str) -> None:
    assert classify_text(text, before) == wanted


def test_a_token_without_text_does_not_end_a_word() -> None:
    trace = make_trace()
    trace["texts"][-3:] = ["caf", "", "é"]
    assert classify_tokens(trace)[-3:] == ["word start", "other", "continuation"]
    trace["end_token"] = trace["tokens"][-2]
    assert classify_tokens(trace)[-1] == "word start"


def test_a_rule_in_numbers() -> None:
    told = measure_rule(make_trace(), "topk")
    assert told["depth_counts"] == [7, 2, 2]
    assert told["mean_depth"] == pytest.approx(6 / 11)
    assert told["share_routed"] == pytest.approx([3 / 11, 3 / 11])
    assert told["mean_loss"] == 3.0
    shares = {each["name"]: (each["count"], each["share"]) for each in told["classes"]}
    assert shares == {
        # "The", " cat", "</script>", and "é" after the bracket
        "word start": (4, pytest.approx(2 / 8)),
        "continuation": (1, 0.0),
        "number": (1, 0.5),
        "punctuation": (1, 0.0),
        "whitespace": (2, pytest.approx(1 / 4)),
        "other": (2, pytest.approx(2 / 4)),
    }
    assert told["entropy"] == {
        "correlation": pytest.approx(-1),
        "means": [5.0, 4.0, 3.0],
        "counts": [7, 2, 2],
    }
    assert told["dead"]["count"] == 7
    assert told["dead"]["share"] == pytest.approx(7 / 11)
    assert {"text": "The", "count": 1, "of": 1} in told["dead"]["most"]
    assert all(each["text"] for each in told["dead"]["most"])


def test_positions_are_those_of_windows() -> None:
    found = share_by_position(make_trace(), np.array(TOPK))
    # tokens 0, 4, 8; then 1, 5, 9; then 2, 6, 10; then 3, 7
    assert [each["count"] for each in found] == [3, 3, 3, 2]
    assert [each["share"] for each in found] == pytest.approx([2 / 6, 0, 3 / 6, 1 / 4])
    assert [(each["first"], each["last"]) for each in found] == [(i, i) for i in range(4)]


def test_long_windows_are_binned_without_gaps() -> None:
    trace = {"window_starts": [0, 100]}
    found = share_by_position(trace, np.ones((2, 137), dtype=np.int64))
    assert sum(each["count"] for each in found) == 137
    edges = [(each["first"], each["last"]) for each in found]
    assert edges[0][0] == 0
    assert edges[-1][1] == 99
    assert all(left[1] + 1 == right[0] for left, right in pairwise(edges))
    assert {each["share"] for each in found} == {1.0}


def test_scores_are_counted_once() -> None:
    block = make_trace()["rules"]["topk"]["blocks"][0]
    told = count_scores(block)
    assert (sum(told["all"]), sum(told["routed"])) == (11, 3)
    assert (told["low"], told["high"]) == (min(block["score"]), max(block["score"]))
    assert told["share_positive"] == pytest.approx(3 / 11)
    # the routed ones are at the right end
    assert told["routed"][-3:] == told["all"][-3:]
    alike = count_scores({"layer": 1, "score": [2.0, 2.0], "routed": [1, 0]})
    assert (alike["low"], alike["high"], sum(alike["all"])) == (1.5, 2.5, 2)


def test_rules_are_compared_block_by_block() -> None:
    assert compare_rules(make_trace()) == [
        {"layer": 1, "differ": 1, "precision": 1.0, "recall": pytest.approx(2 / 3)},
        {
            "layer": 3,
            "differ": 2,
            "precision": pytest.approx(2 / 3),
            "recall": pytest.approx(2 / 3),
        },
    ]
    assert compare_rules(make_trace(causal=False)) is None
    trace = make_trace()
    trace["rules"]["causal"]["blocks"][0]["routed"] = [0] * 11
    told = compare_rules(trace)
    assert told is not None
    assert (told[0]["precision"], told[0]["recall"]) == (None, 0.0)


def test_the_dead_are_listed_by_frequency() -> None:
    texts = ["", "", "", "b", "b", "a", *[f"t{i}" for i in range(NUM_DEAD_SHOWN)]]
    depth = np.array([0, 0, 0, 0, 0, 1, *[0] * NUM_DEAD_SHOWN])
    told = find_dead(texts, depth)
    assert told["count"] == len(texts) - 1
    assert told["most"][0] == {"text": "b", "count": 2, "of": 2}
    assert len(told["most"]) == NUM_DEAD_SHOWN


def test_no_correlation_where_nothing_varies() -> None:
    told = relate_entropy(np.array([1, 1]), np.array([0.5, 1.5]), 2)
    assert told == {"correlation": None, "means": [None, 1.0, None], "counts": [0, 2, 0]}
    assert relate_entropy(np.array([0, 1]), np.array([1.0, 1.0]), 1)["correlation"] is None
    assert relate_entropy(np.array([0, 1]), np.array([1.0, 2.0]), 1)[
        "correlation"
    ] == pytest.approx(1)
