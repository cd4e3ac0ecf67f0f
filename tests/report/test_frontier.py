"""Leads at equal cost are those worked out by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from depthmix.report.fit import fit_runs
from depthmix.report.frontier import (
    COSTS,
    Corner,
    Lead,
    find_lead,
    find_leads,
    fit_trend,
    fit_trends,
    trace_frontier,
)
from depthmix.report.load import load_runs
from synthetic_runs import DENSE, MOD, write_run

BUDGETS = (1e12, 4e12, 1.6e13)


def write_seeds(
    folder: Path, overrides: dict[str, Any], losses: tuple[float, ...], budget: float
) -> None:
    kind = overrides["routing.strategy"]
    for seed, loss in enumerate(losses):
        path = folder / f"{kind}-{budget:g}-s{seed}"
        routed = overrides is MOD
        recipe = {"seed": seed, "batch_size": round(16 * budget / BUDGETS[0])}
        write_run(
            path, overrides, loss, causal=loss if routed else None, budget=budget, recipe=recipe
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Dense losses of 4, 2 and 1; routed ones of 2 at the middle budget; seeds differ by 2 %."""
    for budget, loss in zip(BUDGETS, (4.0, 2.0, 1.0), strict=True):
        write_seeds(tmp_path, DENSE, (0.99 * loss, 1.01 * loss), budget)
    write_seeds(tmp_path, MOD, (1.98, 2.02), BUDGETS[1])
    return tmp_path


def test_a_lead_is_against_dense_at_the_same_cost(folder: Path) -> None:
    fits = fit_runs(load_runs(folder).rows)
    (routed,) = (fit for fit in fits if fit.kind == "mod")
    # relative errors: two seeds 2 % apart have a standard deviation of 2 % / √2, and their mean 1 %
    corners = [Corner(1.0, 4.0, 0.01), Corner(4.0, 2.0, 0.01), Corner(16.0, 1.0, 0.01)]
    for spent, dense, share in ((4.0, 2.0, 0.0), (2.0, math.sqrt(8), 0.5), (64.0, 0.5, 2.0)):
        lead = find_lead(corners, routed.best, lambda row, spent=spent: spent)
        assert lead is not None
        assert lead.percent == pytest.approx(100 * (2.0 / dense - 1))
        # a run is off by 1 %, the dense line by what its two corners are, each by its weight
        error = 0.01 * math.sqrt(1 + (1 - share) ** 2 + share**2)
        assert lead.error == pytest.approx(100 * 2.0 / dense * error)
        # a loss of 2 takes dense a cost of 4
        assert lead.multiplier == pytest.approx(4.0 / spent)
        # the loss falls by half for four times the cost: its relative error counts double
        assert lead.multiplier_error == pytest.approx(4.0 / spent * 2 * 0.01 * math.sqrt(2))
        assert not lead.extrapolated


def test_leads_beyond_the_dense_models_are_marked(folder: Path) -> None:
    fits = fit_runs(load_runs(folder).rows)
    (routed,) = (fit for fit in fits if fit.kind == "mod")
    lead = find_lead([Corner(1.0, 8.0, 0.01), Corner(4.0, 4.0, None)], routed.best, lambda row: 4.0)
    assert lead is not None
    assert lead.percent == pytest.approx(-50)
    assert lead.error is None, "the dense corner has one seed"
    assert lead.multiplier == pytest.approx(4.0)
    assert lead.extrapolated
    # without a slope, only what cost the same is compared
    for spent, known in ((4.05, True), (4.2, False)):
        lead = find_lead([Corner(4.0, 4.0, 0.01)], routed.best, lambda row, spent=spent: spent)
        assert (lead is not None) == known
    assert find_lead([], routed.best, lambda row: 4.0) is None
    assert find_lead([Corner(4.0, 4.0, 0.01)], routed.best, lambda row: None) is None


def test_conventions_differ_by_what_runs_executed(folder: Path) -> None:
    rows = load_runs(folder).rows
    fits = fit_runs(rows)
    corners = trace_frontier(fits, COSTS["executed"])
    dense = sorted({row.executed_flops for row in rows if row.kind == "dense"})
    assert [corner.cost for corner in corners] == dense
    assert [corner.loss for corner in corners] == pytest.approx([4.0, 2.0, 1.0])
    assert all(row.executed_flops != row.flops for row in rows)
    leads = find_leads(fits)
    assert leads.keys() == {(BUDGETS[1], "mod")}
    # every one of these runs took as long, so by the clock the best dense one counts
    assert leads[BUDGETS[1], "mod"].keys() == COSTS.keys()
    assert leads[BUDGETS[1], "mod"]["wall clock"].percent == pytest.approx(100)


def test_a_trend_is_weighted_by_errors() -> None:
    leads = [(1e12, Lead(-1.0, 0.1)), (1e13, Lead(-2.0, 0.1)), (1e14, Lead(-3.0, 0.1))]
    trend = fit_trend(leads)
    assert trend is not None
    # Σ w (x - mean)² = 100 · 2
    assert trend == pytest.approx((-1.0, 1 / math.sqrt(200)))
    # what is known ten times less well hardly counts
    bent = fit_trend([*leads[:2], (1e14, Lead(0.0, 1000.0))])
    assert bent is not None
    assert bent.slope == pytest.approx(-1.0, abs=1e-3)
    assert fit_trend(leads[:2]) is None
    assert fit_trend([*leads[:2], (1e14, Lead(0.0, None))]) is None
    found = fit_trends({(budget, "mod"): {"full": lead} for budget, lead in leads})
    assert found == {("mod", "full"): trend}
