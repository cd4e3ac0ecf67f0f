"""A run's record says what its folder says."""

import json
from pathlib import Path

import pytest

from depthmix.config import RunConfig
from depthmix.report.load import load_runs
from depthmix.report.records import append_records, load_records, read_report_runs
from synthetic_runs import DENSE, MOD, write_run


def test_a_record_gives_the_row_of_its_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", MOD, 3.5, causal=3.6, recipe={"seed": 7})
    write_run(tmp_path / "runs/b", DENSE, 3.7)
    rows, file = load_runs(tmp_path / "runs").rows, tmp_path / "kept/some.jsonl"
    assert append_records(rows, file) == 2
    assert append_records(rows, file) == 0, "they are there"
    for source in (file, file.parent):
        again = read_report_runs(source)
        assert again.left_out == []
        for row, kept in zip(rows, again.rows, strict=True):
            shared = row._replace(heads=(), provenance={}, curve=())
            assert kept._replace(heads=(), provenance={}, curve=()) == shared
            assert kept.heads == tuple(
                head._replace(precision=head.precision[-1:], recall=head.recall[-1:])
                for head in row.heads
            )
            assert kept.provenance["data"] == {"hash": "abc"}
            assert len(kept.curve) == len(row.curve)
    # a folder with a run in it is no folder of records, and one with records may have more runs
    assert [row.name for row in read_report_runs(tmp_path / "runs/b").rows] == ["b"]
    append_records(rows[:1], tmp_path / "runs/some.jsonl")
    assert read_report_runs(tmp_path / "runs").rows == rows
    record = json.loads(file.read_text().splitlines()[1])
    assert record["flops"] == {"full": rows[1].flops, "executed": rows[1].executed_flops}
    assert RunConfig.from_dict(record["config"]) == rows[1].config


def test_energy_is_kept_where_it_was_measured(tmp_path: Path) -> None:
    for name in ("cpu", "gpu"):
        write_run(tmp_path / "runs" / name, DENSE, 3.5)
    metrics = tmp_path / "runs/gpu/metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = [line | {"joules": 20.0} if line["kind"] == "train" else line for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in measured))
    rows, file = load_runs(tmp_path / "runs").rows, tmp_path / "some.jsonl"
    append_records(rows, file)
    assert [row.joules for row in rows] == [None, 40.0]
    assert [row.joules for row in load_records([file]).rows] == [None, 40.0]
    without, _ = (json.loads(line) for line in file.read_text().splitlines())
    assert "joules" not in without


def test_another_run_of_the_same_name_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", DENSE, 3.5)
    file = tmp_path / "some.jsonl"
    append_records(load_runs(tmp_path / "runs").rows, file)
    before = file.read_bytes()
    write_run(tmp_path / "others/a", DENSE, 3.6)
    write_run(tmp_path / "others/b", DENSE, 3.6)
    with pytest.raises(ValueError, match="has another run with the name 'a': choose another file"):
        append_records(load_runs(tmp_path / "others").rows, file)
    assert file.read_bytes() == before


def test_unknown_values_of_a_record_stay_unknown(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", MOD, 3.5, causal=3.6)
    file = tmp_path / "some.jsonl"
    append_records(load_runs(tmp_path / "runs").rows, file)
    full = json.loads(file.read_text())
    empty = dict.fromkeys(("loss", "seconds", "heads", "data", "versions", "commit", "curve"))
    seedless = {**full["config"], "train": {**full["config"]["train"], "seed": None}}
    records = [
        {**full, **empty, "run": "b", "seed": None, "config": seedless, "step_ms": 20.0},
        {**full, **empty, "run": "c", "seed": None, "config": seedless, "loss_causal": 3.8},
        {**full, "run": "no config", "config": None},
        {**full, **empty, "run": "no loss", "loss_causal": None},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    runs = load_records([file])
    first, second = runs.rows
    assert (first.loss, first.judged, first.seed) == (None, 3.6, None)
    # 100 steps of 20 ms
    assert (first.seconds, second.seconds) == (2.0, None)
    assert {run.name: run.reason for run in runs.left_out} == {
        "no config": "its configuration was not kept",
        "no loss": "its record is damaged: it has no loss",
    }


def test_a_line_that_is_not_a_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    for line in ('{"step": 1}', "[1]", "{"):
        file.write_text(line + "\n")
        with pytest.raises(ValueError, match=r"is not a file of records: line 1 is not a run"):
            read_report_runs(file)
    with pytest.raises(ValueError, match="cannot read"):
        load_records([tmp_path / "none.jsonl"])
