"""IsoFLOP fits: a parabola in log(parameters) for each budget and variant, and minima compared.

Pure functions of numbers. A minimum that was not bracketed is never presented as one.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from depthmix.report.load import Row, rank_kind

MIN_SIZES = 3
"""This many points determine a parabola exactly, and leave nothing to test it with."""
NOISE = 2
"""A difference of this many standard errors is more than noise."""


class Parabola(NamedTuple):
    """loss = bottom + bend · (log(parameters) - center)²; `bend` is not 0, but may be negative."""

    bend: float
    center: float
    bottom: float
    error: float | None = None
    """Standard error of the bottom, from the residuals; None if the parabola fits exactly."""

    def at(self, parameters: int | float) -> float:
        """The loss of a size."""
        return self.bottom + self.bend * (math.log(parameters) - self.center) ** 2


class SizeMean(NamedTuple):
    """One model of a variant at one budget: the mean over its seeds."""

    parameters: int
    flops_per_token: float
    loss: float
    spread: float | None
    """Standard deviation over seeds; None for a single one."""
    num_seeds: int
    rows: tuple[Row, ...]
    num_recipes: int = 1
    """Number of recipes tried; `rows` are of the best one."""

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        return None if self.spread is None else self.spread / math.sqrt(self.num_seeds)


class Fit(NamedTuple):
    """A variant at a budget: its sizes, the curve through them and its minimum."""

    budget: float
    variant: str
    kind: str
    sizes: tuple[SizeMean, ...]
    """In order of their parameters."""
    curve: Parabola | None
    bracketed: bool
    """Whether the curve's minimum lies between the sizes tried, by more than seeds differ."""
    note: str
    """Why only the sizes tried are known to be minimal; empty if the minimum is bracketed."""

    @property
    def best(self) -> SizeMean:
        """The size with the lowest mean loss.

        A size with several seeds is preferred to one with a single seed if they are equal within
        noise: the lowest of many single draws is mostly luck.
        """
        lowest = min(self.sizes, key=lambda size: size.loss)
        seen = [size for size in self.sizes if size.num_seeds > 1]
        if lowest in seen or not seen:
            return lowest
        again = min(seen, key=lambda size: size.loss)
        return lowest if is_worse(again, lowest, find_spread(self.sizes)) else again

    @property
    def parameters(self) -> int | float:
        """Parameters at the minimum: the curve's if bracketed, else the best size's."""
        if self.curve is not None and self.bracketed:
            return math.exp(self.curve.center)
        return self.best.parameters

    @property
    def loss(self) -> float:
        """The lowest loss: the curve's if bracketed, else that of the best size tried."""
        if self.curve is not None and self.bracketed:
            return self.curve.bottom
        return self.best.loss

    @property
    def error(self) -> float | None:
        """Standard error of the minimum; None with a single seed or no spare size."""
        return self.curve.error if self.curve is not None and self.bracketed else self.best.error

    @property
    def flops_per_token(self) -> float:
        """Forward FLOPs at the minimum."""
        return self._flops_at(math.log(self.parameters))

    @property
    def convention(self) -> str:
        """The convention of its budget's FLOPs: full or executed."""
        return self.best.rows[0].config.train.flops_convention

    def find_parity(self, loss: float) -> float | None:
        """The least forward FLOPs that reach this loss, or None.

        If the minimum is bracketed, where the curve falls to this loss between the sizes tried;
        else of the cheapest size that reaches it.
        """
        if self.curve is not None and self.bracketed and self.curve.bottom <= loss:
            reach = math.sqrt((loss - self.curve.bottom) / self.curve.bend)
            return self._flops_at(self.curve.center - reach)
        good = [size.flops_per_token for size in self.sizes if size.loss <= loss]
        return min(good) if good else None

    def _flops_at(self, place: float) -> float:
        """Forward FLOPs at log(parameters), interpolated between sizes in logarithms."""
        xs = [math.log(size.parameters) for size in self.sizes]
        ys = [math.log(size.flops_per_token) for size in self.sizes]
        return math.exp(float(np.interp(place, xs, ys)))


class Comparison(NamedTuple):
    """A variant's minimum compared with the dense one of its budget, see `find_dense`."""

    fit: Fit
    dense: Fit
    percent: float
    """By how much its loss is higher, in per cent of the dense one; negative is better."""
    error: float | None
    """Standard error of that."""
    relative_flops: float
    """Its forward FLOPs at the minimum over those of the dense minimum."""
    parity_flops: float | None
    """The same, at the least FLOPs where its loss equals the dense minimum; None if it never
    does."""

    @property
    def is_sound(self) -> bool:
        """Whether both minima are bracketed."""
        return self.fit.bracketed and self.dense.bracketed


def fit_parabola(parameters: Sequence[int | float], losses: Sequence[float]) -> Parabola | None:
    """Least squares in log(parameters) over at least `MIN_SIZES` sizes; None for a line."""
    if len(set(parameters)) < MIN_SIZES:
        raise ValueError(
            f"{len(set(parameters))} sizes do not determine a parabola: give at least {MIN_SIZES}"
        )
    xs = np.log(np.asarray(parameters, dtype=np.float64))
    # centred and scaled: log(parameters) is large and varies little
    middle, width = xs.mean(), xs.max() - xs.min()
    square, slope, level = np.polyfit((xs - middle) / width, np.asarray(losses, np.float64), 2)
    # if only rounding bends the curve, its minimum means nothing
    if abs(square) <= 1e-9 * max(abs(level), abs(slope)):
        return None
    center = -slope / (2 * square)
    bottom = level - square * center**2
    places = (xs - middle) / width
    terms = np.stack([places**2, places, np.ones_like(places)], axis=1)
    num_free, error = len(xs) - MIN_SIZES, None
    if num_free:
        off = np.asarray(losses, np.float64) - terms @ (square, slope, level)
        covariance = (off @ off) / num_free * np.linalg.inv(terms.T @ terms)
        # the bottom's derivative by each coefficient
        moves = np.array([center**2, center, 1.0])
        error = math.sqrt(max(0.0, float(moves @ covariance @ moves)))
    return Parabola(float(square / width**2), float(middle + width * center), float(bottom), error)


def fit_runs(
    rows: Iterable[Row], measure: Callable[[Row], float | None] | None = None
) -> list[Fit]:
    """A fit for each budget and variant, in order, of the loss that `measure` returns.

    The default is `Row.judged`. Runs without that loss are left out.
    """
    measure = measure or (lambda row: row.judged)
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        if measure(row) is not None:
            groups.setdefault((row.budget, row.variant), []).append(row)
    fits = [_fit_group(group, measure) for group in groups.values()]
    return sorted(fits, key=lambda fit: (fit.budget, rank_kind(fit.kind), fit.variant))


def _fit_group(rows: list[Row], measure: Callable[[Row], float | None]) -> Fit:
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row.model, []).append(row)
    sizes = [average_seeds(alike, measure) for alike in models.values()]
    sizes.sort(key=lambda size: (size.parameters, size.loss))
    xs, ys = [size.parameters for size in sizes], [size.loss for size in sizes]
    curve, note = None, ""
    if len(set(xs)) < MIN_SIZES:
        note = f"{len(set(xs))} of the {MIN_SIZES} sizes that a fit needs"
    else:
        curve = fit_parabola(xs, ys)
        if curve is None or curve.bend <= 0:
            note = "the curve does not bend upwards"
        elif curve.center <= math.log(xs[0]):
            note = "the minimum lies below the smallest size"
        elif curve.center >= math.log(xs[-1]):
            note = "the minimum lies beyond the largest size"
        elif curve.error is None:
            note = "three sizes fit any parabola: one more would test it"
        else:
            note = _find_open_end(sizes)
    first = rows[0]
    return Fit(first.budget, first.variant, first.kind, tuple(sizes), curve, not note, note)


def find_spread(sizes: Iterable[SizeMean]) -> float | None:
    """The usual standard deviation over the seeds of one size."""
    spreads = [size.spread for size in sizes if size.spread is not None]
    return statistics.median(spreads) if spreads else None


def is_worse(size: SizeMean, other: SizeMean, spread: float | None) -> bool:
    """Whether a size is worse than another by more than this spread of seeds explains."""
    noise = math.sqrt(1 / size.num_seeds + 1 / other.num_seeds) * (spread or 0.0)
    return size.loss - other.loss > NOISE * noise


def _find_open_end(sizes: Sequence[SizeMean]) -> str:
    """In words, the side on which no size is worse than the best one beyond noise, if any."""
    best, spread = min(range(len(sizes)), key=lambda i: sizes[i].loss), find_spread(sizes)
    for side, name in ((sizes[:best], "smaller"), (sizes[best + 1 :], "larger")):
        if not any(is_worse(size, sizes[best], spread) for size in side):
            return f"no {name} size is worse than the best one beyond noise"
    return ""


def average_seeds(rows: Sequence[Row], measure: Callable[[Row], float | None]) -> SizeMean:
    """Runs of one model as one point; of several recipes, that with the lowest mean counts."""
    recipes: dict[str, list[Row]] = {}
    for row in rows:
        recipes.setdefault(row.recipe, []).append(row)

    def list_losses(alike: Sequence[Row]) -> list[float]:
        # a run repeated with the same seed is not a second draw
        seeds: dict[int | str, list[float]] = {}
        for row in alike:
            if (loss := measure(row)) is not None:
                seeds.setdefault(row.name if row.seed is None else row.seed, []).append(loss)
        return [statistics.fmean(same) for same in seeds.values()]

    best = min(recipes.values(), key=lambda alike: statistics.fmean(list_losses(alike)))
    losses = list_losses(best)
    return SizeMean(
        parameters=best[0].parameters.total,
        flops_per_token=best[0].flops_per_token,
        loss=statistics.fmean(losses),
        spread=statistics.stdev(losses) if len(losses) > 1 else None,
        num_seeds=len(losses),
        rows=tuple(sorted(best, key=lambda row: (row.seed is None, row.seed, row.name))),
        num_recipes=len(recipes),
    )


def average_test(fit: Fit) -> SizeMean | None:
    """A fit's best size with its test losses, if all its runs have one."""
    rows = fit.best.rows
    if any(row.judged_test is None for row in rows):
        return None
    return average_seeds(rows, lambda row: row.judged_test)


def compare_sizes(size: SizeMean, other: SizeMean) -> tuple[float, float | None]:
    """By how many per cent a size's mean exceeds another's, and the standard error."""
    ratio = size.loss / other.loss
    if size.error is None or other.error is None:
        return 100 * (ratio - 1), None
    return 100 * (ratio - 1), 100 * ratio * math.hypot(
        size.error / size.loss, other.error / other.loss
    )


def find_dense(fits: Iterable[Fit], budget: float) -> Fit | None:
    """The best dense fit of a budget; if there is none, that of plain experts.

    Plain experts process every token: they are the baseline of a MoDE.
    """
    plain = [fit for fit in fits if fit.kind in ("dense", "moe") and fit.budget == budget]
    dense = [fit for fit in plain if fit.kind == "dense"] or plain
    return min(dense, key=lambda fit: fit.loss) if dense else None


def compare_minima(fits: Sequence[Fit]) -> list[Comparison]:
    """Every variant's minimum compared with the dense one of its budget, if there is one."""
    found = []
    for fit in fits:
        dense = find_dense(fits, fit.budget)
        if dense is None or fit is dense:
            continue
        parity, ratio = fit.find_parity(dense.loss), fit.loss / dense.loss
        error = None
        if fit.error is not None and dense.error is not None:
            error = 100 * ratio * math.hypot(fit.error / fit.loss, dense.error / dense.loss)
        found.append(
            Comparison(
                fit=fit,
                dense=dense,
                percent=100 * (ratio - 1),
                error=error,
                relative_flops=fit.flops_per_token / dense.flops_per_token,
                parity_flops=None if parity is None else parity / dense.flops_per_token,
            )
        )
    return found
