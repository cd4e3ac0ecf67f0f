"""Each figure is there where its runs are, and shows them."""

from pathlib import Path

import pytest

from depthmix.report.charts import list_charts, number_colors
from depthmix.report.figures import Chart, Grid, Panel, Series
from depthmix.report.fit import fit_runs
from depthmix.report.load import load_runs
from hand_traces import make_trace
from synthetic_runs import DENSE, MOD, WIDTHS, Bowl, count_parameters, write_bowl, write_run

CENTER = count_parameters({**DENSE, "width": 64}) * 1.1


def chart_folder(folder: Path) -> dict[str, Chart]:
    rows = load_runs(folder).rows
    return {chart.key: chart for chart in list_charts(rows, fit_runs(rows))}


def take_panels(chart: Chart) -> list[Panel]:
    return [panel for panel in chart.panels if isinstance(panel, Panel)]


def take_series(panel: Panel, style: str) -> dict[str, Series]:
    return {series.name: series for series in panel.series if series.style == style}


def test_isoflop_has_a_panel_for_each_budget(tmp_path: Path) -> None:
    for i, budget in enumerate((1e12, 4e12)):
        write_bowl(tmp_path / str(i), "dense", DENSE, Bowl(CENTER, 3.7 - i), budget=budget)
    write_bowl(tmp_path, "mod", MOD, Bowl(9e9, 3.5), routed=True, budget=1.01e12)
    charts = chart_folder(tmp_path)
    first, second = take_panels(charts["isoflop"])
    assert (first.title, second.title) == (
        "1e12 training FLOPs (executed)",
        "4e12 training FLOPs (executed)",
    )
    dots = take_series(first, "dots")
    assert dots.keys() == {"dense", "mod"}
    assert [point.x for point in dots["dense"].points] == [
        count_parameters({**DENSE, "width": width}) for width in WIDTHS
    ]
    # only a bracketed minimum gets a star
    stars = [series for series in first.series if series.style == "star"]
    assert [series.color for series in stars] == [dots["dense"].color]
    assert stars[0].points[0][:2] == pytest.approx((CENTER, 3.7))
    # the causal loss is the one to look at
    tip = dots["mod"].points[0].tip
    loss = dots["mod"].points[0].y
    assert tip.startswith("mod-32-s0\nmod, ")
    assert f"causal loss {loss:.4f}, top-k {loss - 0.01:.4f}" in tip
    lines = [series for series in second.series if series.style == "line"]
    assert min(point.y for point in lines[0].points) == pytest.approx(2.7, abs=1e-3)


def test_forward_flops_are_relative_to_the_dense_optimum(tmp_path: Path) -> None:
    write_bowl(tmp_path, "mod", MOD, Bowl(CENTER, 3.5), routed=True)
    assert "relative-flops" not in chart_folder(tmp_path)
    write_bowl(tmp_path, "dense", DENSE, Bowl(CENTER, 3.7))
    (panel,) = take_panels(chart_folder(tmp_path)["relative-flops"])
    dots = take_series(panel, "dots")
    fits = {fit.variant: fit for fit in fit_runs(load_runs(tmp_path).rows)}
    optimum = fits["dense"].flops_per_token
    for name, fit in fits.items():
        expected = [size.flops_per_token / optimum for size in fit.sizes]
        assert [point.x for point in dots[name].points] == pytest.approx(expected)
    xs = [point.x for point in dots["dense"].points]
    assert xs[2] < 1 < xs[3]


def test_a_grid_needs_several_pairs(tmp_path: Path) -> None:
    for capacity, every, loss in ((0.125, 2, 3.4), (0.5, 2, 3.5), (0.125, 1, 3.6)):
        assert "capacity-frequency" not in chart_folder_or_none(tmp_path)
        fields = {**MOD, "routing.capacity": capacity, "routing.every": every}
        for width, more in ((32, 0.1), (64, 0.0)):
            name = f"{capacity}-{every}-{width}"
            write_run(tmp_path / name, {**fields, "width": width}, loss, causal=loss + more)
    (grid,) = chart_folder(tmp_path)["capacity-frequency"].panels
    assert isinstance(grid, Grid)
    assert (grid.columns, grid.rows) == (["0.125", "0.5"], ["1", "2"])
    assert {(cell.column, cell.row): cell.value for cell in grid.cells} == {
        ("0.125", "1"): 3.6,
        ("0.125", "2"): 3.4,
        ("0.5", "2"): 3.5,
    }
    assert all("-64\n" in cell.tip for cell in grid.cells), "of the better size"


def chart_folder_or_none(folder: Path) -> dict[str, Chart]:
    return chart_folder(folder) if any(folder.iterdir()) else {}


def test_causal_above_topk_in_per_cent(tmp_path: Path) -> None:
    write_run(tmp_path / "dense", DENSE, 3.0)
    assert "causal" not in chart_folder(tmp_path)
    write_run(tmp_path / "mod", MOD, 4.0, causal=4.01)
    assert "causal" not in chart_folder(tmp_path), "a dot alone says less than the table"
    write_run(tmp_path / "other", {**MOD, "width": 32}, 5.0, causal=5.1)
    assert "causal" not in chart_folder(tmp_path), "two dots show no relation"
    write_run(tmp_path / "third", {**MOD, "width": 48}, 8.0, causal=8.08)
    (panel,) = take_panels(chart_folder(tmp_path)["causal"])
    (series,) = take_series(panel, "dots").values()
    assert series.name == "mod"
    assert sorted(point[:2] for point in series.points) == [
        pytest.approx((4.0, 0.25)),
        pytest.approx((5.0, 2.0)),
        pytest.approx((8.0, 1.0)),
    ]


def test_heads_are_those_of_the_best_size(tmp_path: Path) -> None:
    write_run(tmp_path / "worse", {**MOD, "width": 32}, 3.6, causal=3.6)
    for seed in (0, 1):
        write_run(tmp_path / f"best-{seed}", MOD, 3.5, causal=3.5, recipe={"seed": seed})
    chart = chart_folder(tmp_path)["heads"]
    precision, recall = take_panels(chart)
    assert (precision.title, recall.title) == ("precision", "recall")
    assert [series.name for series in precision.series] == ["mod: predictor", ""]
    assert [[p[:2] for p in series.points] for series in recall.series] == [
        [(50.0, pytest.approx(0.5)), (100.0, pytest.approx(0.7))]
    ] * 2
    assert not any("worse" in p.tip for series in precision.series for p in series.points)
    assert [series.name for series in chart.list_legend()] == ["mod: predictor"]


def test_a_line_has_more_points_than_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mod", MOD, 3.5, causal=3.5)
    charts = chart_folder(tmp_path)
    assert {"heads", "training"} <= charts.keys()
    metrics = run.path / "metrics.jsonl"
    last = [line for line in metrics.read_text().splitlines() if '"step": 100' in line]
    assert len(last) == 2
    metrics.write_text("\n".join(last) + "\n")
    assert not {"heads", "training"} & chart_folder(tmp_path).keys()


def test_training_is_that_of_the_best_size(tmp_path: Path) -> None:
    for budget in (1e11, 1e12):
        place = tmp_path / f"{budget:.0e}"
        write_run(place / "worse", {**MOD, "width": 32}, 3.6, causal=3.6, budget=budget)
        for seed in (0, 1):
            options = {"recipe": {"seed": seed}, "budget": budget}
            write_run(place / f"best-{seed}", MOD, 3.5, causal=3.5, **options)
    write_run(tmp_path / "dense", DENSE, 3.7)
    few, many = take_panels(chart_folder(tmp_path)["training"])
    assert (few.title, many.title) == (
        "1e11 training FLOPs (executed)",
        "1e12 training FLOPs (executed)",
    )
    assert [series.name for series in few.series] == ["mod"]
    assert [series.name for series in many.series] == ["dense", "mod"]
    points = many.series[1].points
    assert [point[:2] for point in points] == [(50.0, 5.0), (100.0, 5.0)]
    assert points[0].tip.startswith("1e+12/best-0\nmod, ")
    assert points[0].tip.endswith("here 5.000")


def test_time_is_in_a_fitting_unit(tmp_path: Path) -> None:
    write_run(tmp_path / "dense", DENSE, 3.0)
    assert chart_folder(tmp_path).keys() == {"training"}, "one run alone has only its own curve"
    run = write_run(tmp_path / "mod", MOD, 4.0, causal=4.01)
    assert chart_folder(tmp_path).keys() == {"training", "heads"}, "two dots show no relation"
    write_run(tmp_path / "again", DENSE, 3.1, recipe={"seed": 1})
    (panel,) = take_panels(chart_folder(tmp_path)["time"])
    assert panel.x_label == "seconds of training"
    run.append_metrics({"step": 100, "kind": "train", "seconds_per_step": 3600.0, "flops": 1})
    run.append_metrics({"step": 200, "kind": "train", "seconds_per_step": 3600.0, "flops": 1})
    run.close()
    (panel,) = take_panels(chart_folder(tmp_path)["time"])
    assert panel.x_label == "hours of training"
    dots = take_series(panel, "dots")
    assert dots["dense"].points[0].x == pytest.approx(50 / 3600)
    assert dots["mod"].points[0].x > 100


def test_a_variant_keeps_its_colour(tmp_path: Path) -> None:
    write_run(tmp_path / "a", MOD, 3.0, budget=1e11)
    write_run(tmp_path / "b", DENSE, 3.0, budget=1e12)
    write_run(tmp_path / "c", {"routing.strategy": "stochastic"}, 3.0, budget=1e12)
    colors = number_colors(load_runs(tmp_path).rows)
    assert colors == {"dense": 0, "mod": 1, "stochastic learned gate": 2}


def test_experts_stand_by_the_cost_of_a_forward_pass(tmp_path: Path) -> None:
    moe = {**DENSE, "experts.strategy": "expert_choice", "experts.num_experts": 2}
    for seed in (0, 1):
        write_run(tmp_path / f"moe-{seed}", moe, 3.5, recipe={"seed": seed})
    assert "experts" not in chart_folder(tmp_path)
    write_run(tmp_path / "staged", {**moe, **MOD}, 3.4, causal=3.4)
    (panel,) = take_panels(chart_folder(tmp_path)["experts"])
    dots = take_series(panel, "dots")
    assert {name: len(series.points) for name, series in dots.items()} == {
        "moe": 2,
        "mode staged": 1,
    }
    (row,) = (row for row in load_runs(tmp_path).rows if row.kind == "mode staged")
    assert dots["mode staged"].points[0][:2] == (row.flops_per_token / 1e6, 3.4)


def test_traces_show_router_weights_and_tokens(tmp_path: Path) -> None:
    trace = make_trace()
    charts = {chart.key: chart for chart in list_charts([], [], {"a": trace, "b": trace})}
    (panel,) = take_panels(charts["router"])
    scores = [score for block in trace["rules"]["topk"]["blocks"] for score in block["score"]]
    above = 100 * sum(score > 0 for score in scores) / len(scores)
    lines = take_series(panel, "line")
    assert lines.keys() == {f"{name}: {above:.1f} % above 0.5" for name in "ab"}
    for line in lines.values():
        assert sum(point.y for point in line.points) == pytest.approx(100)
        right = sum(point.y for point in line.points if point.x > 0.5)
        assert right == pytest.approx(above)
    # only the first run has a map, a panel for each rule
    topk, causal = take_panels(charts["depth-map"])
    assert (topk.title, causal.title) == tuple(
        f"a: {rule['label']}" for rule in trace["rules"].values()
    )
    dots = {point[:2] for series in topk.series for point in series.points}
    assert dots == {
        (place, block["layer"])
        for block in trace["rules"]["topk"]["blocks"]
        for place, routed in enumerate(block["routed"])
        if routed
    }
    assert {"router", "depth-map"}.isdisjoint(chart.key for chart in list_charts([], []))
