"""Minima are found where they are, and only there."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix import flops
from depthmix.report.fit import Fit, compare_minima, find_dense, fit_parabola, fit_runs
from depthmix.report.load import load_runs
from depthmix.report.page import describe_comparison
from synthetic_runs import DENSE, MOD, WIDTHS, Bowl, count_parameters, write_bowl, write_run

SIZES = [count_parameters({**DENSE, "width": width}) for width in WIDTHS]
MIDDLE = SIZES[2] * 1.1


def fit_folder(folder: Path) -> dict[str, Fit]:
    return {fit.variant: fit for fit in fit_runs(load_runs(folder).rows)}


@given(
    center=st.floats(1e4, 1e11),
    bottom=st.floats(0.5, 10),
    bend=st.floats(0.01, 1).map(lambda b: round(b, 4)) | st.floats(-1, -0.01),
    ratios=st.lists(st.integers(1, 60), min_size=3, max_size=8, unique=True),
)
def test_a_parabola_is_found_exactly(
    center: float, bottom: float, bend: float, ratios: list[int]
) -> None:
    bowl = Bowl(center, bottom, bend)
    sizes = [center * ratio / 20 for ratio in ratios]
    found = fit_parabola(sizes, [bowl.at(size) for size in sizes])
    # points that lie close together say little about what is far from them
    if max(ratios) < 2 * min(ratios):
        return
    assert found is not None
    assert found.center == pytest.approx(math.log(center), abs=1e-5)
    assert found.bottom == pytest.approx(bottom, abs=1e-5)
    assert found.bend == pytest.approx(bend, rel=1e-5)
    assert found.at(sizes[0]) == pytest.approx(bowl.at(sizes[0]))


def test_a_line_is_not_a_parabola() -> None:
    sizes = [1e6, 2e6, 4e6, 8e6]
    assert fit_parabola(sizes, [3.0] * 4) is None
    assert fit_parabola(sizes, [3.0, 3.1, 3.2, 3.3]) is None
    for few in ([1e6, 2e6], [1e6, 1e6, 2e6]):
        with pytest.raises(ValueError, match="2 sizes do not determine a parabola: give at least"):
            fit_parabola(few, [3.0] * len(few))


def test_the_known_minimum_of_run_folders_is_found(tmp_path: Path) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(MIDDLE, 3.7), seeds=(0, 1, 2), noise=0.01)
    fit = fit_folder(tmp_path)["dense"]
    assert fit.bracketed
    assert fit.note == ""
    assert fit.parameters == pytest.approx(MIDDLE, rel=1e-6)
    assert fit.loss == pytest.approx(3.7, abs=1e-9)
    assert [size.parameters for size in fit.sizes] == SIZES
    # seeds at -0.01, 0 and 0.01 about the mean
    assert fit.best.parameters == SIZES[2]
    assert fit.best.spread == pytest.approx(0.01)
    assert [row.seed for row in fit.best.rows] == [0, 1, 2]
    per_token = [size.flops_per_token for size in fit.sizes]
    assert per_token[2] < fit.flops_per_token < per_token[3]


@pytest.mark.parametrize(
    ("center", "bend", "note"),
    [
        (SIZES[0] * 0.9, 0.2, "the minimum lies below the smallest size"),
        (SIZES[-1] * 1.1, 0.2, "the minimum lies beyond the largest size"),
        (MIDDLE, -0.2, "the curve does not bend upwards"),
    ],
)
def test_minima_that_are_not_bracketed_are_flagged(
    center: float, bend: float, note: str, tmp_path: Path
) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(center, 3.7, bend))
    fit = fit_folder(tmp_path)["dense"]
    assert (fit.bracketed, fit.note) == (False, note)
    # no promise beyond what was tried
    assert fit.loss == min(size.loss for size in fit.sizes)
    assert fit.parameters == fit.best.parameters
    assert fit.flops_per_token == pytest.approx(fit.best.flops_per_token)


def test_three_sizes_leave_nothing_to_judge_by(tmp_path: Path) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(MIDDLE, 3.7), widths=WIDTHS[1:4])
    fit = fit_folder(tmp_path)["dense"]
    assert fit.curve is not None
    assert fit.curve.center == pytest.approx(math.log(MIDDLE))
    assert (fit.bracketed, fit.error) == (False, None)
    assert fit.note == "three sizes fit any parabola: one more would test it"
    assert fit.loss == fit.best.loss


def test_a_minimum_within_noise_of_the_last_size_is_not_bracketed(tmp_path: Path) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(MIDDLE, 3.7), seeds=(0, 1), noise=1.0)
    fit = fit_folder(tmp_path)["dense"]
    assert fit.curve is not None
    note = "no smaller size is worse than the best one beyond noise"
    assert (fit.bracketed, fit.note) == (False, note)


def test_the_error_of_a_minimum_by_hand() -> None:
    # at x = -1, 0, 1 and 2 the parabola 1 + x² and what is off it, which no parabola takes up
    off = [0.1, -0.3, 0.3, -0.1]
    losses = [2.1, 0.7, 2.3, 4.9]
    found = fit_parabola([math.exp(x) for x in (-1, 0, 1, 2)], losses)
    assert found is not None
    assert (found.bend, found.center, found.bottom) == pytest.approx((1, 0, 1))
    # one degree of freedom; the middle's weight in the sums of x⁰ to x⁴ = 4, 2, 6, 8, 18 inverted
    variance = sum(each**2 for each in off)
    assert found.error == pytest.approx(math.sqrt(variance * (6 * 18 - 8 * 8) / 80))


def test_a_lucky_single_seed_is_not_the_best_size(tmp_path: Path) -> None:
    for width, losses in ((32, (3.6, 3.64, 3.68)), (64, (3.58,))):
        for seed, loss in enumerate(losses):
            write_run(
                tmp_path / f"{width}-{seed}", {**DENSE, "width": width}, loss, recipe={"seed": seed}
            )
    best = fit_folder(tmp_path)["dense"].best
    assert (best.num_seeds, best.loss) == (3, pytest.approx(3.64))
    assert best.error == pytest.approx(0.04 / math.sqrt(3))
    # but one that is better by more than seeds differ by is
    write_run(tmp_path / "good", {**DENSE, "width": 96}, 3.5)
    assert fit_folder(tmp_path)["dense"].best.loss == 3.5


def test_two_sizes_are_too_few(tmp_path: Path) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(MIDDLE, 3.7), widths=WIDTHS[:2])
    fit = fit_folder(tmp_path)["dense"]
    assert fit.curve is None
    assert (fit.bracketed, fit.note) == (False, "2 of the 3 sizes that a fit needs")
    assert fit.best.spread is None


def test_minima_are_compared_under_causal_routing(tmp_path: Path) -> None:
    center = count_parameters({**MOD, "width": 64}) * 1.2
    write_bowl(tmp_path, "dense", DENSE, Bowl(MIDDLE, 4.0))
    write_bowl(tmp_path, "mod", MOD, Bowl(center, 3.9), routed=True)
    write_bowl(tmp_path / "large", "mod", MOD, Bowl(center, 3.0), routed=True, budget=1e13)
    rows = load_runs(tmp_path).rows
    fits = fit_runs(rows)
    # without a dense model of its budget there is nothing to compare with
    (found,) = compare_minima(fits)
    assert (found.fit.variant, found.dense.variant) == ("mod", "dense")
    assert found.percent == pytest.approx(-2.5)
    assert found.is_sound
    dense = find_dense(fits, 1e12)
    assert dense is not None
    assert found.relative_flops == pytest.approx(found.fit.flops_per_token / dense.flops_per_token)
    # the curve falls to the dense minimum between two of the sizes
    place = center * math.exp(-math.sqrt(0.1 / 0.2))
    small, large = next(p for p in pairwise(found.fit.sizes) if p[1].parameters > place)
    assert small.loss > 4.0 > large.loss
    share = math.log(place / small.parameters) / math.log(large.parameters / small.parameters)
    wanted = small.flops_per_token * (large.flops_per_token / small.flops_per_token) ** share
    assert found.parity_flops == pytest.approx(wanted / dense.flops_per_token)
    told = f", and as good at {100 * wanted / dense.flops_per_token:.0f} %."
    assert describe_comparison(found).endswith(told)
    # top-k stands a hundredth below
    topk = {fit.variant: fit for fit in fit_runs(rows, lambda row: row.loss) if fit.budget == 1e12}
    assert topk["mod"].loss == pytest.approx(3.89)
    causal = fit_runs(rows, lambda row: row.loss_causal)
    assert {fit.variant for fit in causal} == {"mod"}


def test_without_a_dense_model_plain_experts_take_its_place(tmp_path: Path) -> None:
    moe = {**DENSE, "experts.strategy": "expert_choice"}
    write_run(tmp_path / "moe", moe, 4.0)
    write_run(tmp_path / "low", {**moe, "experts.capacity": 0.5}, 4.1)
    write_run(tmp_path / "mode", {**moe, "experts.num_noop": 2}, 3.9)
    compared = compare_minima(fit_runs(load_runs(tmp_path).rows))
    assert {found.dense.best.rows[0].name for found in compared} == {"moe"}
    told = {found.fit.best.rows[0].name: describe_comparison(found) for found in compared}
    assert told.keys() == {"low", "mode"}
    assert "mode integrated is 2.50 % below moe" in told["mode"]
    # a dense model goes before it
    write_run(tmp_path / "dense", DENSE, 4.2)
    compared = compare_minima(fit_runs(load_runs(tmp_path).rows))
    assert {found.dense.kind for found in compared} == {"dense"}
    assert len(compared) == 3


def test_parity_does_not_go_beyond_the_sizes_tried(tmp_path: Path) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(MIDDLE, 4.0))
    middle = count_parameters({**MOD, "width": 64}) * 1.2
    # better than dense by so much that even the smallest size is, or a minimum that is none
    for name, bowl in (("deep", Bowl(middle, 1.0)), ("far", Bowl(middle / 90, 1.0))):
        write_bowl(tmp_path, name, MOD, bowl, routed=True)
    for found in compare_minima(fit_runs(load_runs(tmp_path).rows)):
        assert found.fit.bracketed == (found.fit.variant == "deep")
        smallest = found.fit.sizes[0]
        assert smallest.loss < 4.0
        wanted = smallest.flops_per_token / found.dense.flops_per_token
        assert found.parity_flops == pytest.approx(wanted)


def test_a_worse_variant_has_no_parity(tmp_path: Path) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(MIDDLE, 3.7))
    write_bowl(tmp_path, "mod", MOD, Bowl(SIZES[0] / 9, 4.0), routed=True)
    (found,) = compare_minima(fit_runs(load_runs(tmp_path).rows))
    assert found.percent > 0
    assert found.parity_flops is None
    assert not found.is_sound


def test_of_several_recipes_the_best_counts(tmp_path: Path) -> None:
    for name, rate, losses in (("low", 1e-3, (3.6, 3.8)), ("high", 4e-3, (3.5, 4.1))):
        for seed, loss in enumerate(losses):
            recipe = {"seed": seed, "learning_rate": rate}
            write_run(tmp_path / f"{name}-{seed}", DENSE, loss, recipe=recipe)
    # how often is logged changes nothing
    write_run(
        tmp_path / "third", DENSE, 3.7, recipe={"seed": 2, "learning_rate": 1e-3, "log_every": 3}
    )
    (size,) = fit_folder(tmp_path)["dense"].sizes
    assert size.loss == pytest.approx(3.7)
    assert size.num_recipes == 2
    assert [row.name for row in size.rows] == ["low-0", "low-1", "third"]


def test_a_repeated_run_is_not_another_seed(tmp_path: Path) -> None:
    for name, seed, loss in (("a", 0, 3.0), ("again", 0, 3.2), ("b", 1, 3.5)):
        write_run(tmp_path / name, DENSE, loss, recipe={"seed": seed})
    (size,) = fit_folder(tmp_path)["dense"].sizes
    assert (size.num_seeds, len(size.rows)) == (2, 3)
    assert size.loss == pytest.approx(3.3)
    assert size.spread == pytest.approx(0.4 / math.sqrt(2))


def test_between_sizes_flops_follow_their_logarithms(tmp_path: Path) -> None:
    middle = math.sqrt(SIZES[2] * SIZES[3])
    write_bowl(tmp_path, "dense", DENSE, Bowl(middle, 3.7))
    fit = fit_folder(tmp_path)["dense"]
    around = [row.flops_per_token for size in fit.sizes[2:4] for row in size.rows]
    assert fit.flops_per_token == pytest.approx(math.sqrt(around[0] * around[1]), rel=1e-6)
    assert isinstance(fit.sizes[0].rows[0].parameters, flops.Parameters)
