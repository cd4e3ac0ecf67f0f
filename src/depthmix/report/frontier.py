"""The loss that dense training reaches at each cost, and how far a run is ahead of it.

A budget counts FLOPs by one convention; by another, or by the clock, runs of one budget differ in
cost. So a run is compared with what a dense model would reach at the run's own cost: the loss is
interpolated by a power law between the best dense sizes of neighbouring budgets, and extrapolated
by the nearest two.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from depthmix.report.fit import Fit, SizeMean, find_dense
from depthmix.report.load import Row

Cost = Callable[[Row], float | None]
COSTS: dict[str, Cost] = {
    "full": lambda row: row.flops,
    "executed": lambda row: row.executed_flops,
    "wall clock": lambda row: row.seconds,
}
"""The ways to count a run's cost."""
SAME_COST = 0.02
"""Costs this close, as a share, are compared without a slope."""


class Corner(NamedTuple):
    """The best dense size of a budget."""

    cost: float
    loss: float
    error: float | None
    """Standard error of the loss as a share of it."""


class Lead(NamedTuple):
    """A size compared with dense training at the size's own cost."""

    percent: float
    """By how much its loss is higher, in per cent of the dense one; negative is better."""
    error: float | None
    """Standard error of that over seeds; None where one of the models has a single seed."""
    multiplier: float | None = None
    """How many times the cost dense needs to reach its loss; None if no slope is known."""
    multiplier_error: float | None = None
    extrapolated: bool = False
    """Whether the multiplier lies outside the range of the dense models that were trained."""


class Trend(NamedTuple):
    """The change of a lead with the budget, in per cent per factor of ten, with its error."""

    slope: float
    error: float


def trace_frontier(fits: Sequence[Fit], cost: Cost) -> list[Corner]:
    """The best dense size of each budget whose cost is known, from cheap to expensive."""
    corners = []
    for budget in {fit.budget for fit in fits}:
        dense = find_dense(fits, budget)
        if dense is not None and (spent := average_cost(dense.best, cost)) is not None:
            best = dense.best
            corners.append(Corner(spent, best.loss, _divide(best.error, best.loss)))
    # of two at the same cost, the better one counts
    kept: list[Corner] = []
    for corner in sorted(corners, key=lambda corner: corner.loss):
        if all(abs(corner.cost / other.cost - 1) > SAME_COST for other in kept):
            kept.append(corner)
    return sorted(kept, key=lambda corner: corner.cost)


def average_cost(size: SizeMean, cost: Cost) -> float | None:
    """The mean cost of a size's runs."""
    costs = [spent for row in size.rows if (spent := cost(row)) is not None]
    return statistics.fmean(costs) if costs else None


def find_lead(corners: Sequence[Corner], size: SizeMean, cost: Cost) -> Lead | None:
    """How far a size is ahead of dense training; None if that is unknown at its cost."""
    spent = average_cost(size, cost)
    if spent is None or not corners:
        return None
    own = _divide(size.error, size.loss)
    near = min(corners, key=lambda corner: abs(math.log(spent / corner.cost)))
    if len(corners) == 1 and abs(spent / near.cost - 1) > SAME_COST:
        return None
    if len(corners) == 1:
        ratio, error = size.loss / near.loss, add_errors([(1.0, own), (1.0, near.error)])
        return Lead(100 * (ratio - 1), _multiply(error, 100 * ratio))
    low, high = _choose_segment(corners, [spent >= corner.cost for corner in corners])
    share = math.log(spent / low.cost) / math.log(high.cost / low.cost)
    ratio = size.loss / math.exp((1 - share) * math.log(low.loss) + share * math.log(high.loss))
    error = add_errors([(1.0, own), (1 - share, low.error), (share, high.error)])
    lead = Lead(100 * (ratio - 1), _multiply(error, 100 * ratio))
    # the inverse: the cost at which dense has this loss
    low, high = _choose_segment(corners, [size.loss <= corner.loss for corner in corners])
    if high.loss >= low.loss:
        return lead
    slope = math.log(high.loss / low.loss) / math.log(high.cost / low.cost)
    share = math.log(size.loss / low.loss) / math.log(high.loss / low.loss)
    multiplier = low.cost / spent * (high.cost / low.cost) ** share
    error = add_errors([(1.0, own), (1 - share, low.error), (share, high.error)])
    return lead._replace(
        multiplier=multiplier,
        multiplier_error=_multiply(error, multiplier / abs(slope)),
        extrapolated=not 0 <= share <= 1,
    )


def find_leads(fits: Sequence[Fit]) -> dict[tuple[float, str], dict[str, Lead]]:
    """(budget, variant) → cost → the lead of its best size, where known."""
    corners = {name: trace_frontier(fits, cost) for name, cost in COSTS.items()}
    found: dict[tuple[float, str], dict[str, Lead]] = {}
    for fit in fits:
        if fit is find_dense(fits, fit.budget):
            continue
        for name, cost in COSTS.items():
            if (lead := find_lead(corners[name], fit.best, cost)) is not None:
                found.setdefault((fit.budget, fit.variant), {})[name] = lead
    return found


def fit_trends(
    leads: Mapping[tuple[float, str], Mapping[str, Lead]],
) -> dict[tuple[str, str], Trend]:
    """(variant, cost) → the change of its lead, where there are enough budgets."""
    found = {}
    for variant in dict.fromkeys(variant for _, variant in leads):
        for cost in COSTS:
            here = [
                (budget, each[cost])
                for (budget, other), each in leads.items()
                if other == variant and cost in each
            ]
            if (trend := fit_trend(here)) is not None:
                found[variant, cost] = trend
    return found


def fit_trend(leads: Iterable[tuple[float, Lead]]) -> Trend | None:
    """The change of a lead over three budgets or more, each weighted by its standard error."""
    known = [(math.log10(budget), lead.percent, lead.error) for budget, lead in leads]
    points = [(x, y, 1 / error**2) for x, y, error in known if error]
    if len(points) < 3:
        return None
    total = sum(weight for _, _, weight in points)
    middle = sum(weight * x for x, _, weight in points) / total
    square = sum(weight * (x - middle) ** 2 for x, _, weight in points)
    slope = sum(weight * (x - middle) * y for x, y, weight in points) / square
    return Trend(slope, 1 / math.sqrt(square))


def add_errors(parts: Iterable[tuple[float, float | None]]) -> float | None:
    """The standard error of a sum of independent parts, each with its weight."""
    total = 0.0
    for weight, error in parts:
        # a part of little weight may have an unknown error
        if abs(weight) <= SAME_COST:
            continue
        if error is None:
            return None
        total += (weight * error) ** 2
    return math.sqrt(total)


def _choose_segment(corners: Sequence[Corner], passed: Sequence[bool]) -> tuple[Corner, Corner]:
    """The two neighbouring corners around a place; at an end, the nearest two."""
    last = min(max(1, sum(passed)), len(corners) - 1)
    return corners[last - 1], corners[last]


def _divide(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def _multiply(value: float | None, by: float) -> float | None:
    return None if value is None else value * by
