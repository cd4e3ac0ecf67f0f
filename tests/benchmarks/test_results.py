"""What results/ says: errors of models with few seeds, and marks on what is extrapolated."""

import math
import re

import pytest
import results

from depthmix.report.fit import average_seeds


def test_pages_say_what_the_records_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["results.py", "--check"])
    results.main()


@pytest.mark.parametrize(
    ("name", "num_seeds"),
    [("isoflop/1.3e16/dense/w288-l10", 2), ("shapes/4e15/mod/w288-l8", 1)],
)
def test_few_seeds_take_the_spread_of_all_models(name: str, num_seeds: int) -> None:
    size, (share, free) = results.take_size(name), results.pool_spread()
    assert size.num_seeds == num_seeds
    assert size.error == pytest.approx(share * size.loss / math.sqrt(num_seeds))
    assert free > 30


def test_three_seeds_keep_their_own_spread() -> None:
    size = results.take_size("isoflop/4e14/dense/w128-l4")
    assert size.spread == average_seeds(size.rows, lambda row: row.judged).spread


def test_the_pooled_spread_leaves_out_the_unsteady_model() -> None:
    share, _ = results.pool_spread()
    unsteady = results.take_size(results.UNSTEADY)
    assert unsteady.spread is not None
    assert unsteady.spread / unsteady.loss > 10 * share


def test_a_lead_beyond_the_dense_models_is_marked() -> None:
    marks = {
        (budget, cost): results.say_lead(results.take_best("mod", budget), cost).endswith("*")
        for budget in results.BUDGETS
        for cost in ("full", "executed")
    }
    assert {key for key, marked in marks.items() if marked} == {(1.3e16, "executed")}


def test_speedups_are_those_of_the_recorded_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"part": "single", "way": "greedy", "requests": 1, "model": "dense", "us_per_token": 30},
        {"part": "single", "way": "greedy", "requests": 1, "model": "mod", "us_per_token": 20},
        {"part": "batch", "way": "greedy", "requests": 8, "model": "dense", "tokens_per_second": 4},
        {"part": "batch", "way": "greedy", "requests": 8, "model": "mod", "tokens_per_second": 5},
    ]
    monkeypatch.setattr(results, "read_engine", {"large": rows}.get)
    assert results.find_speedup("large", "greedy", 1) == 1.5
    assert results.find_speedup("large", "greedy", 8) == 1.25


def test_missing_runs_are_those_without_a_record_of_their_convention() -> None:
    names = {run.folder for run in results.find_missing("isoflop", "gpu", 1.3e16)}
    assert names == {
        "1.3e16/dense/w224-l8-s0",
        "1.3e16/dense/w288-l10-s2",
        "1.3e16/dense/w384-l12-s0",
        "1.3e16/mod/w288-l8-s0",
        "1.3e16/mod/w288-l10-s2",
        "1.3e16/mod/w352-l10-s2",
        "1.3e16/mod/w512-l10-s0",
    }
    assert results.find_missing("isoflop", "gpu", 4e14) == []
    # its records count full FLOPs, and the plan executed ones
    assert len(results.find_missing("controls", "gpu", 1.3e15)) == 30


def test_every_picture_of_the_pages_is_made_from_records() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in results.PAGES)
    shown = set(re.findall(r"\]\((?:results/)?([\w-]+)\.png\)", pages))
    assert shown == {chart.key for chart in results.list_figures()}


def test_controls_show_each_seed() -> None:
    (panel,) = results.chart_controls().panels
    assert isinstance(panel, results.Panel)
    assert [len(series.points) for series in panel.series] == [3, 1, 1, 1, 3, 3, 2]
