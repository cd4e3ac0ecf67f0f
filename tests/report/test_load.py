"""Runs become rows by what they are; what cannot be compared is named."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix import flops
from depthmix.config import ModelConfig, Recipe, RunConfig
from depthmix.config.fields import document_fields
from depthmix.report.load import (
    MIN_VALIDATIONS,
    OTHER_FIELDS,
    SIZE_FIELDS,
    count_seconds,
    group_budgets,
    load_runs,
    name_kind,
    rank_kind,
    thin_curve,
)
from depthmix.runs import RunDir, list_runs
from synthetic_runs import BASE, DENSE, MOD, WIDTHS, Bowl, write_bowl, write_run

MOE: dict[str, Any] = {"experts.strategy": "expert_choice", "experts.num_experts": 2}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mod": MOD,
    "mod causal": {"routing.strategy": "causal"},
    "stochastic": {"routing.strategy": "stochastic", "routing.noise_gate": "gaussian"},
    "stochastic learned gate": {"routing.strategy": "stochastic"},
    "stochastic unit gate": {"routing.strategy": "stochastic", "routing.gate": "unit"},
    "token_choice": {"routing.strategy": "token_choice"},
    "token_choice bias": {"routing.strategy": "token_choice", "routing.bias_rate": 0.5},
    "early_exit": {"routing.strategy": "early_exit", "routing.every": 1},
    "moe": MOE,
    "mode staged": {**MOE, **MOD},
    "mode integrated": {**MOE, "experts.num_noop": 1},
    "stochastic learned gate moe": {**MOE, "routing.strategy": "stochastic"},
}


def test_fields_that_are_left_out_exist() -> None:
    assert document_fields(Recipe).keys() >= OTHER_FIELDS
    assert document_fields(ModelConfig).keys() >= SIZE_FIELDS


def test_kinds_have_an_order() -> None:
    shown = [
        "dense",
        "mod",
        "mod causal",
        "token_choice bias",
        "stochastic unit gate",
        "early_exit",
    ]
    shown += ["moe", "mode staged", "mode integrated", "stochastic learned gate moe"]
    assert sorted(shown[::-1], key=rank_kind) == shown


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_follows_from_the_configuration(kind: str) -> None:
    assert name_kind(BASE.override(KINDS[kind])) == kind


def test_a_run_is_read_in_full(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "one", MOD, 3.5, causal=3.6, recipe={"seed": 7})
    runs = load_runs(tmp_path)
    assert runs.left_out == []
    (row,) = runs.rows
    model = BASE.override(MOD)
    assert (row.name, row.kind, row.variant, row.seed) == ("a/one", "mod", "mod", 7)
    assert row.budget == 1e12
    assert row.flops == 100 * flops.training_flops(model, batch_size=16)
    assert row.parameters == flops.num_parameters(model)
    assert row.flops_per_token == flops.flops_per_token(model)
    assert (row.loss, row.loss_causal, row.judged) == (3.5, 3.6, 3.6)
    assert (row.capacity, row.every) == (0.125, 2)
    assert row.executed_flops == 100 * flops.executed_flops(model, "muon", batch_size=16)
    # the first fifty steps have no time of their own
    assert row.seconds == 50.0
    assert row.tokens_per_second == 2 * 16 * 64
    # its router was not taught to decide
    (head,) = row.heads
    assert head.name == "predictor"
    assert head.precision == ((0.5, pytest.approx(0.65)), (1.0, pytest.approx(0.9)))
    assert head.recall == ((0.5, pytest.approx(0.5)), (1.0, pytest.approx(0.7)))


@pytest.mark.parametrize("num_validations", [1, MIN_VALIDATIONS - 1, MIN_VALIDATIONS])
def test_batches_tell_where_validations_are_few(tmp_path: Path, num_validations: int) -> None:
    path = tmp_path / "one" / "metrics.jsonl"
    write_run(path.parent, MOD, 3.5, causal=3.6)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    last = next(record for record in reversed(records) if record["kind"] == "val")
    train = next(record for record in records if record["kind"] == "train")
    batches = [
        {**train, "step": 1 + n, "predictor_precision": n / 100, "predictor_recall": 0.5}
        for n in range(100)
    ]
    told = [*batches, *[last] * num_validations]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in told))
    (row,) = load_runs(tmp_path).rows
    (head,) = row.heads
    if num_validations == MIN_VALIDATIONS:
        assert head.precision == ((1.0, pytest.approx(0.9)),) * MIN_VALIDATIONS
        return
    # each fifth of them
    assert head.precision == tuple(((1 + n) / 100, n / 100) for n in range(0, 100, 5))


def test_a_dense_run_has_one_loss(tmp_path: Path) -> None:
    write_run(tmp_path / "one", DENSE, 3.5)
    (row,) = load_runs(tmp_path).rows
    assert (row.loss, row.loss_causal, row.judged) == (3.5, None, 3.5)
    assert (row.capacity, row.every, row.heads) == (None, None, ())
    # a run that is named itself
    (row,) = load_runs(tmp_path / "one").rows
    assert row.name == "one"


def test_a_taught_router_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "one", {**MOD, "routing.aux_loss_weight": 0.01}, 3.5, causal=3.6)
    (row,) = load_runs(tmp_path).rows
    assert [head.name for head in row.heads] == ["predictor", "router"]


def test_budgets_within_two_per_cent_are_one() -> None:
    groups = group_budgets([1e15, 1.019e15, 1.03e15, 4e15, 1.005e15])
    assert groups[1e15] == groups[1.005e15] == groups[1.019e15] == 1.005e15
    assert groups[1.03e15] == 1.03e15
    assert groups[4e15] == 4e15
    assert group_budgets([]) == {}


def test_without_a_budget_the_spent_flops_count(tmp_path: Path) -> None:
    write_run(tmp_path / "one", DENSE, 3.5, budget=None)
    (row,) = load_runs(tmp_path).rows
    assert row.budget == row.flops == 100 * flops.training_flops(BASE, batch_size=16)
    # what was counted then stands, whatever is counted now
    file = tmp_path / "one/metrics.jsonl"
    before = file.read_text()
    file.write_text(before.replace('"kind": "train"', '"kind": "train", "executed_flops": 7'))
    (then,) = load_runs(tmp_path).rows
    assert then.executed_flops == 7
    file.write_text(before)
    # no line of training metrics: the steps tell
    records = (tmp_path / "one/metrics.jsonl").read_text().splitlines()
    kept = [line for line in records if json.loads(line)["kind"] != "train"]
    (tmp_path / "one/metrics.jsonl").write_text("\n".join(kept) + "\n")
    (again,) = load_runs(tmp_path).rows
    assert again.flops == row.flops
    assert (again.seconds, again.tokens_per_second) == (None, None)


def test_settings_tell_variants_of_one_kind_apart(tmp_path: Path) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(1e5, 3.7), widths=WIDTHS[:2])
    for capacity, every in ((0.125, 2), (0.5, 2), (0.125, 1)):
        fields = {**MOD, "routing.capacity": capacity, "routing.every": every}
        write_run(tmp_path / f"m{capacity}-{every}", fields, 3.5)
    write_run(tmp_path / "gated", {**MOD, "routing.gate": "unit", "width": 32}, 3.5)
    # a dense model's capacity does nothing
    write_run(tmp_path / "left-over", {**DENSE, "routing.capacity": 0.3}, 3.5)
    variants = {row.name: row.variant for row in load_runs(tmp_path).rows}
    assert variants == {
        "dense-32-s0": "dense",
        "dense-48-s0": "dense",
        "left-over": "dense",
        "m0.125-2": "mod 0.125 every 2 routing.gate=raw",
        "m0.5-2": "mod 0.5 every 2 routing.gate=raw",
        "m0.125-1": "mod 0.125 every 1 routing.gate=raw",
        "gated": "mod 0.125 every 2 routing.gate=unit",
    }


def test_runs_left_out_are_named_with_the_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "good", DENSE, 3.5)
    write_run(tmp_path / "stopped", DENSE, 3.5, state="running")
    write_run(tmp_path / "failed", DENSE, 3.5, state="failed", reason="training diverged")
    write_run(tmp_path / "unseen", DENSE, None)
    write_run(tmp_path / "diverged", DENSE, float("nan"))
    write_run(tmp_path / "lost", MOD, 3.5, causal=float("nan"))
    imported = RunDir.create(tmp_path / "imported", RunConfig().to_toml(), {"time": ""})
    imported.write_status(
        "finished", step=0, num_steps=0, loss=None, reason="imported from somewhere"
    )
    write_run(tmp_path / "early", DENSE, 3.5)
    (tmp_path / "early/metrics.jsonl").write_text(
        '{"step": 0, "kind": "train", "loss": 5}\n{"step": 0, "kind": "val", "loss": 5}\n'
    )
    write_run(tmp_path / "torn", DENSE, 3.5)
    (tmp_path / "torn/config.toml").write_text("[model")
    write_run(tmp_path / "odd", DENSE, 3.5)
    text = (tmp_path / "odd/config.toml").read_text()
    (tmp_path / "odd/config.toml").write_text(text.replace("batch_size", "bach_size"))
    runs = load_runs(tmp_path)
    assert [row.name for row in runs.rows] == ["good"]
    told = {run.name: (run.state, run.reason) for run in runs.left_out}
    assert told.keys() == {
        *("stopped", "failed", "unseen", "diverged", "lost", "imported", "early", "torn", "odd")
    }
    assert told["lost"] == ("finished", "its loss under causal decisions is not finite")
    assert told["early"][0] == "broken"
    assert told["stopped"] == ("stopped", "ended at step 100 of 100")
    assert told["failed"] == ("failed", "ended at step 100 of 100: training diverged")
    reason = "it has no validation loss: its data has no validation split of a sequence or more"
    assert told["unseen"] == ("finished", reason)
    assert told["diverged"] == ("finished", "its validation loss is not finite")
    assert told["imported"] == ("finished", "imported from somewhere")
    assert told["torn"][0] == told["odd"][0] == "broken"
    assert "config.toml' is damaged" in told["torn"][1]
    assert "bach_size" in told["odd"][1]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run in .*: make one with 'depthmix train'"):
        load_runs(tmp_path)


def test_seconds_are_those_of_steps() -> None:
    assert count_seconds([]) is None
    records = [{"step": 10, "seconds_per_step": 2.0}, {"step": 40, "seconds_per_step": 1.0}]
    assert count_seconds(records) == 50.0
    assert count_seconds([{"step": 10, "seconds_per_step": None}, *records[1:]]) == 40.0
    assert count_seconds([{"step": 10}]) is None


def test_few_records_stay_as_they_are() -> None:
    train = [{"step": 5, "loss": 7.0}, {"step": 10, "loss": 6.0}, {"step": 12, "loss": 5.5}]
    assert thin_curve(train) == ((5 / 12, 7.0), (10 / 12, 6.0), (1.0, 5.5))
    assert thin_curve([]) == ()


def test_a_stretch_is_a_mean_of_both() -> None:
    train = [{"step": step, "loss": 10.0 - step} for step in range(1, 9)]
    assert thin_curve(train, most=2) == ((2.5 / 8, 7.5), (6.5 / 8, 3.5))


def test_losses_that_are_not_finite_are_left_out() -> None:
    train = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": math.inf}]
    train += [{"step": 4}, {"step": 5, "loss": 1.0}]
    assert thin_curve(train) == ((0.2, 2.0), (1.0, 1.0))


@given(st.lists(st.floats(0.1, 20), min_size=1, max_size=300), st.integers(1, 50))
def test_means_keep_the_mean_and_the_order(losses: list[float], most: int) -> None:
    train = [{"step": 3 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    curve = thin_curve(train, most)
    assert 1 <= len(curve) <= min(most, len(losses))
    shares = [share for share, _ in curve]
    assert shares == sorted(set(shares))
    assert 0 < shares[0] <= shares[-1] <= 1
    assert min(losses) - 1e-9 <= min(y for _, y in curve)
    assert max(losses) + 1e-9 >= max(y for _, y in curve)
    if len(losses) % most == 0:
        mean = sum(y for _, y in curve) / len(curve)
        assert mean == pytest.approx(sum(losses) / len(losses))


def test_metrics_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["one", "two"]
    for name in names:
        write_run(tmp_path / name, MOD, 3.5)
    read, opened = RunDir.read_metrics, []

    def read_and_count(run: RunDir, kind: str | None = None) -> list[dict[str, Any]]:
        opened.append(run.path.name)
        return read(run, kind)

    monkeypatch.setattr(RunDir, "read_metrics", read_and_count)
    assert len(load_runs(tmp_path).rows) == 2
    assert sorted(opened) == names
    opened.clear()
    list_runs(tmp_path)
    assert sorted(opened) == names
