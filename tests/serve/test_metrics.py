"""The dashboard asks for what there is, and shows all of it."""

import json
import re
from pathlib import Path

from depthmix.serve.metrics import Metrics, write_metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def test_the_dashboard_shows_every_metric() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = board["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"depthmix_\w+", query)}
    metrics = Metrics()
    # a counter with labels has no line before it counts
    metrics.requests.labels("/v1/completions", "completed").inc()
    text = write_metrics({"a": metrics}).decode()
    shown = set(re.findall(r"^(depthmix_\w+)", text, re.MULTILINE))
    assert asked <= shown
    # creation times of counters are left out; histograms are read by their buckets
    shown = {re.sub(r"_bucket$", "", name) for name in asked}
    kept = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown if "_created" not in name}
    assert shown == kept
    for query in queries:
        # every metric is that of the models that were chosen, and all brackets are closed
        assert query.count("depthmix_") == query.count('{model=~"$model"}')
        for pair in ("()", "{}", "[]"):
            assert query.count(pair[0]) == query.count(pair[1])
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_two_models_share_a_family_and_keep_their_numbers() -> None:
    first, second = Metrics(), Metrics()
    first.tokens_out.inc(3)
    second.tokens_out.inc(4)
    hostile = 'a"b\\c\n'
    lines = write_metrics({"a": first, hostile: second}).decode().splitlines()
    assert lines.count("# TYPE depthmix_generated_tokens_total counter") == 1
    assert 'depthmix_generated_tokens_total{model="a"} 3.0' in lines
    assert r'depthmix_generated_tokens_total{model="a\"b\\c\n"} 4.0' in lines
