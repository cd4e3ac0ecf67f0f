"""A trace on disk comes back as it was, and what is none is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from depthmix.report.traces import check_trace, read_trace, write_trace
from hand_traces import make_trace


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
        ([], "is no trace: 'depthmix trace RUN"),
        ({"format": "other"}, "is no trace: 'depthmix trace RUN"),
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
def test_what_is_no_trace_is_refused(tmp_path: Path, trace: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_trace(trace, "this")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    with pytest.raises(ValueError, match=sentence):
        read_trace(path)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for data in (b"text", b"\xff\xfe"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"trace.json is no trace: .*'depthmix trace' writes"):
            read_trace(path)


def test_nothing_broken_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ValueError, match="texts must have"):
        write_trace(break_trace("texts", value=[]), path)
    assert not path.exists()
