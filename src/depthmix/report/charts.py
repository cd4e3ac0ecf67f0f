"""The figures of a report, as data: charts of panels of series, each point with its tooltip.

Decides which figures there are and what their axes show. `figures` makes images and the page's
drawings from the same data.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from depthmix.report.figures import Cell, Chart, Grid, Panel, Point, Series
from depthmix.report.fit import Fit, find_dense
from depthmix.report.load import Row, rank_kind
from depthmix.units import HOUR, MINUTE, format_flops, format_number, format_power

CURVE_POINTS = 60
# two dots show no relation; the summary has a sentence instead
MIN_DOTS = 3
MEGA = 1e6
# a curve is drawn a little beyond its sizes, to show its bend
CURVE_MARGIN = 0.08

# sigmoid(score) lies between 0 and 1
NUM_ROUTER_BINS = 20
# as many as fit in a panel
NUM_MAPPED_TOKENS = 48

Colors = Mapping[str, int]
"""Variant → its colour's number."""
Traces = Mapping[str, Mapping[str, Any]]
"""Name of a run → its trace by `depthmix trace`."""


def list_charts(
    rows: Sequence[Row], fits: Sequence[Fit], traces: Traces | None = None
) -> list[Chart]:
    """The figures for which these runs and traces have data."""
    colors = number_colors(rows)
    charts = (
        chart_isoflop(fits, colors),
        chart_training(fits, colors),
        chart_relative_flops(fits, colors),
        chart_time(rows, fits, colors),
        chart_grid(fits),
        chart_experts(fits, colors),
        chart_causal(rows, colors),
        chart_heads(fits, colors),
        chart_router(traces or {}),
        chart_depth(traces or {}),
    )
    return [chart for chart in charts if chart.panels]


def number_colors(rows: Sequence[Row]) -> dict[str, int]:
    """Each variant's colour, the same in every figure; dense comes first."""
    kinds = {row.variant: rank_kind(row.kind) for row in rows}
    order = sorted(kinds, key=lambda variant: (kinds[variant], variant))
    return {variant: i for i, variant in enumerate(order)}


def chart_isoflop(fits: Sequence[Fit], colors: Colors) -> Chart:
    """Loss against size, a panel for each budget with a curve."""
    panels = []
    for budget in _list_budgets(fits):
        series = []
        for fit in (fit for fit in fits if fit.budget == budget and len(fit.sizes) > 1):
            color = colors[fit.variant]
            if fit.curve is not None:
                series.append(Series("", color, "line", _trace(fit)))
            dots = [_place(row.parameters.total, row) for size in fit.sizes for row in size.rows]
            series.append(Series(fit.variant, color, "dots", dots))
            if fit.bracketed:
                star = Point(fit.parameters, fit.loss, describe_minimum(fit))
                series.append(Series("", color, "star", [star]))
        if series:
            labels = _describe_budget(budget, fits), "parameters", "validation loss"
            panels.append(Panel(*labels, series, log_x=True))
    return Chart(
        "isoflop",
        "Loss against size at equal training compute",
        "Every dot is a run, every curve a parabola in log(parameters) through means over seeds,"
        " every star a minimum that lies between the sizes tried. Routed models are judged by their"
        " causal loss where they have a causal head.",
        panels,
    )


def chart_relative_flops(fits: Sequence[Fit], colors: Colors) -> Chart:
    """Loss against the cost of a forward pass, relative to a dense model."""
    panels = []
    for budget in _list_budgets(fits):
        dense, here = find_dense(fits, budget), [fit for fit in fits if fit.budget == budget]
        if dense is None or len(here) < 2:
            continue
        unit = dense.flops_per_token
        series = [
            Series(
                fit.variant,
                colors[fit.variant],
                "dots",
                [
                    _place(row.flops_per_token / unit, row, f"{row.flops_per_token / unit:.2f} x")
                    for size in fit.sizes
                    for row in size.rows
                ],
            )
            for fit in here
        ]
        xs = [point.x for each in series for point in each.points]
        if len(xs) < MIN_DOTS:
            continue
        level = [Point(min(xs), dense.loss), Point(max(xs), dense.loss)]
        ys = [point.y for each in series for point in each.points]
        column = [Point(1.0, min(ys)), Point(1.0, max(ys))]
        guides = [Series("", 0, "guide", level), Series("", 0, "guide", column)]
        x_label = f"forward FLOPs a token, relative to the {dense.variant} optimum"
        panels.append(
            Panel(_describe_budget(budget, fits), x_label, "validation loss", [*guides, *series])
        )
    return Chart(
        "relative-flops",
        "Loss against forward FLOPs",
        "The dotted lines cross at the optimum that the axis names: runs below the level line"
        " are better, runs left of the other are cheaper to use.",
        panels,
    )


def chart_training(fits: Sequence[Fit], colors: Colors) -> Chart:
    """Training loss of the best size of each fit, over the budget."""
    panels = []
    for budget in _list_budgets(fits):
        series = []
        for fit in (fit for fit in fits if fit.budget == budget):
            # seeds would cover each other
            row = fit.best.rows[0]
            points = [Point(100 * x, y, f"{describe_run(row)}\nhere {y:.3f}") for x, y in row.curve]
            if len(points) > 1:
                series.append(Series(fit.variant, colors[fit.variant], "line", points))
        if series:
            labels = _describe_budget(budget, fits), "share of the budget spent, %", "training loss"
            panels.append(Panel(*labels, series))
    return Chart(
        "training",
        "Loss over training",
        "The best size of each variant, one seed; means over stretches of the run. Routed models"
        " train by top-k, so this is not the causal loss.",
        panels,
    )


def chart_time(rows: Sequence[Row], fits: Sequence[Fit], colors: Colors) -> Chart:
    """Loss against the time that training took."""
    panels = []
    for budget in dict.fromkeys(row.budget for row in rows):
        here = [row for row in rows if row.budget == budget and row.seconds]
        if len(here) < MIN_DOTS:
            continue
        longest = max(row.seconds or 0.0 for row in here)
        unit, name = (HOUR, "hours") if longest > 2 * HOUR else (MINUTE, "minutes")
        if longest <= 2 * MINUTE:
            unit, name = 1.0, "seconds"
        series = [
            Series(
                variant,
                color,
                "dots",
                [
                    _place(x, row, f"{x:.3g} {name}")
                    for row in here
                    if row.variant == variant and (x := (row.seconds or 0.0) / unit)
                ],
            )
            for variant, color in colors.items()
        ]
        series = [each for each in series if each.points]
        panels.append(
            Panel(_describe_budget(budget, fits), f"{name} of training", "validation loss", series)
        )
    return Chart(
        "time",
        "Loss against wall-clock",
        "Time spent on steps, without validation and checkpoints. Runs that shared a device, or ran"
        " on different ones, are not comparable here.",
        panels,
    )


def chart_grid(fits: Sequence[Fit]) -> Chart:
    """Capacity against frequency: the best loss of each pair that was tried."""
    panels = []
    for budget in _list_budgets(fits):
        found: dict[tuple[float, int], list[Fit]] = {}
        for fit in fits:
            row = fit.best.rows[0]
            if fit.budget == budget and fit.kind == "mod" and row.capacity and row.every:
                found.setdefault((row.capacity, row.every), []).append(fit)
        capacities, steps = sorted({c for c, _ in found}), sorted({e for _, e in found})
        if len(found) < 3 or len(capacities) < 2:
            continue
        cells = []
        for (capacity, every), alike in found.items():
            fit = min(alike, key=lambda fit: fit.best.loss)
            tip = "\n".join(describe_run(row) for row in fit.best.rows)
            cells.append(Cell(f"{capacity:.4g}", f"{every}", fit.best.loss, tip))
        panels.append(
            Grid(
                _describe_budget(budget, fits),
                "capacity of a routed block",
                "every n-th block routes",
                [f"{capacity:.4g}" for capacity in capacities],
                [f"{every}" for every in steps],
                cells,
            )
        )
    return Chart(
        "capacity-frequency",
        "Capacity and frequency of routing",
        "The lowest mean loss among the sizes of each pair. A stronger colour is better; what is"
        " empty was not tried.",
        panels,
    )


def chart_experts(fits: Sequence[Fit], colors: Colors) -> Chart:
    """Experts with and without routing over depth, by the cost of a forward pass."""
    panels = []
    for budget in _list_budgets(fits):
        here = [fit for fit in fits if fit.budget == budget]
        if not any({"moe", "mode"} & set(fit.kind.split()) for fit in here):
            continue
        series = [
            Series(
                fit.variant,
                colors[fit.variant],
                "dots",
                [
                    _place(row.flops_per_token / MEGA, row)
                    for size in fit.sizes
                    for row in size.rows
                ],
            )
            for fit in here
        ]
        if len(series) > 1 and sum(len(each.points) for each in series) >= MIN_DOTS:
            labels = "forward MFLOP a token", "validation loss"
            panels.append(Panel(_describe_budget(budget, fits), *labels, series))
    return Chart(
        "experts",
        "Experts with and without depth",
        "Every dot is a run. Staged MoDE routes whole blocks whose MLPs are experts; integrated"
        " MoDE has experts that do nothing among the others.",
        panels,
    )


def chart_causal(rows: Sequence[Row], colors: Colors) -> Chart:
    """The rise of the loss under causal decisions."""
    series = []
    for variant, color in colors.items():
        points = [
            Point(row.loss, 100 * (row.loss_causal - row.loss) / row.loss, describe_run(row))
            for row in rows
            if row.variant == variant and row.loss is not None and row.loss_causal is not None
        ]
        if points:
            series.append(Series(variant, color, "dots", points))
    panels = []
    xs = [point.x for each in series for point in each.points]
    if len(xs) >= MIN_DOTS:
        zero = Series("", 0, "guide", [Point(min(xs), 0.0), Point(max(xs), 0.0)])
        panels = [Panel("", "top-k loss", "causal above top-k loss, %", [zero, *series])]
    return Chart(
        "causal",
        "Causal against top-k loss",
        "Top-k chooses with a look at the whole sequence; a causal head decides each token from"
        " itself, as sampling must. What the second costs, in per cent of the first.",
        panels,
    )


def chart_heads(fits: Sequence[Fit], colors: Colors) -> Chart:
    """Precision and recall of the causal heads during training, of the best size of each fit."""
    panels = []
    for part in ("precision", "recall"):
        series, named = [], set()
        for fit in fits:
            for row in fit.best.rows:
                for head in row.heads:
                    label = f"{fit.variant}: {head.name}"
                    points = [
                        Point(100 * x, y, f"{describe_run(row)}\n{head.name} {part} {y:.3f}")
                        for x, y in getattr(head, part)
                    ]
                    if len(points) < 2:
                        continue
                    # each name once; repeats are other seeds or budgets
                    name = "" if label in named else label
                    named.add(label)
                    series.append(Series(name, colors[fit.variant], "line", points))
        if series:
            panels.append(Panel(part, "share of training, %", part, series))
    return Chart(
        "heads",
        "Precision and recall of the causal heads",
        "Of the tokens that a head would route, the share that top-k keeps (precision), and of"
        " those that top-k keeps, the share that it would route (recall). Only the best size of"
        " each budget and variant.",
        panels,
    )


def chart_router(traces: Traces) -> Chart:
    """Router weights of all tokens in all routed blocks, a line per run."""
    series = []
    for color, (name, trace) in enumerate(traces.items()):
        scores = [score for block in trace["rules"]["topk"]["blocks"] for score in block["score"]]
        if not scores:
            continue
        weights = 1 / (1 + np.exp(-np.asarray(scores, dtype=np.float64)))
        counts, edges = np.histogram(weights, NUM_ROUTER_BINS, (0.0, 1.0))
        above = 100 * float((weights > 0.5).mean())
        middles = (edges[:-1] + edges[1:]) / 2
        points = [
            Point(float(x), 100 * float(count) / len(weights), f"{name}\n{above:.1f} % above 0.5")
            for x, count in zip(middles, counts, strict=True)
        ]
        series.append(Series(f"{name}: {above:.1f} % above 0.5", color, "line", points))
    panels = []
    if series:
        highest = max(point.y for each in series for point in each.points)
        line = Series("", 0, "guide", [Point(0.5, 0.0), Point(0.5, highest)])
        panels = [Panel("", "sigmoid of the router's score", "% of tokens", [line, *series])]
    return Chart(
        "router",
        "Router weights",
        "Of all tokens of a text, over all routed blocks. An auxiliary loss teaches the router to"
        " have as many above 0.5 as top-k keeps; without it only the order counts.",
        panels,
    )


def chart_depth(traces: Traces) -> Chart:
    """The first tokens of the first run's text, and the routed blocks that take them."""
    panels = []
    for name, trace in list(traces.items())[:1]:
        # the end token that begins a text, and what follows
        for color, rule in enumerate(trace["rules"].values()):
            dots = [
                Point(place, block["layer"], f"{text!r}, block {block['layer']}")
                for block in rule["blocks"]
                for place, (text, routed) in enumerate(
                    zip(trace["texts"][:NUM_MAPPED_TOKENS], block["routed"], strict=False)
                )
                if routed
            ]
            if dots:
                labels = f"{name}: {rule['label']}", "token of the text", "routed block"
                panels.append(Panel(*labels, [Series(rule["label"], color, "dots", dots)]))
    return Chart(
        "depth-map",
        "Tokens and the blocks that take them",
        f"The first {NUM_MAPPED_TOKENS} tokens of a text; what has no dot passes by the block.",
        panels,
    )


def describe_run(row: Row) -> str:
    """A run in a few lines."""
    losses = f"loss {row.judged:.4f}"
    if row.loss_causal is not None:
        topk = "" if row.loss is None else f", top-k {row.loss:.4f}"
        losses = f"causal loss {row.loss_causal:.4f}{topk}"
    sizes = row.parameters
    return "\n".join(
        (
            row.name,
            f"{row.variant}, {format_number(sizes.total)} parameters"
            f" ({format_number(sizes.active)} active)",
            losses,
            f"seed {'unknown' if row.seed is None else row.seed},"
            f" {format_flops(row.flops_per_token)} a token",
        )
    )


def describe_minimum(fit: Fit) -> str:
    """A fitted minimum in a line or two."""
    size = format_number(fit.parameters)
    return f"{fit.variant}: fitted minimum\nloss {fit.loss:.4f} at {size} parameters"


def _place(x: int | float, row: Row, extra: str = "") -> Point:
    return Point(x, row.judged, "\n".join(filter(None, (describe_run(row), extra))))


def _trace(fit: Fit) -> list[Point]:
    assert fit.curve is not None
    low, high = (math.log(fit.sizes[k].parameters) for k in (0, -1))
    low, high = low - CURVE_MARGIN * (high - low), high + CURVE_MARGIN * (high - low)
    steps = (low + (high - low) * i / CURVE_POINTS for i in range(CURVE_POINTS + 1))
    return [Point(math.exp(x), fit.curve.at(math.exp(x))) for x in steps]


def _list_budgets(fits: Sequence[Fit]) -> list[float]:
    return sorted({fit.budget for fit in fits})


def _describe_budget(budget: float, fits: Sequence[Fit]) -> str:
    conventions = sorted({fit.convention for fit in fits if fit.budget == budget})
    return f"{format_power(budget)} training FLOPs ({', '.join(conventions)})"
