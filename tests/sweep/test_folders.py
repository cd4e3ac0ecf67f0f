"""What run folders say about a plan: what is left, how far, how fast, on which data."""

from pathlib import Path
from typing import Any

import pytest

from depthmix.runs.folder import RunDir
from depthmix.sweep.folders import (
    LOG,
    find_mixed_data,
    is_finished,
    look_at_runs,
    measure_speed,
    read_flops,
    read_log_end,
)
from depthmix.sweep.plan import PlannedRun


def make(
    run: PlannedRun, folder: Path, *, state: Any = "finished", num_starts: int = 1, data: str = "d"
) -> RunDir:
    start = {"time": "2026-11-15T12:00:00+00:00", "data": {"hash": data}}
    made = RunDir.create(folder / run.folder, run.config.to_toml(), start)
    for _ in range(num_starts - 1):
        made.add_start(start)
    step = run.num_steps if state == "finished" else 1
    made.write_status(state, step=step, num_steps=run.num_steps, loss=None)
    return made


def test_standings_of_runs(runs: list[PlannedRun], tmp_path: Path) -> None:
    make(runs[0], tmp_path)
    stopped = make(runs[1], tmp_path, state="interrupted")
    stopped.append_metrics({"step": 1, "kind": "train", "flops": 123})
    # a log alone is no run
    (tmp_path / runs[2].folder).mkdir(parents=True)
    (tmp_path / runs[2].folder / LOG).touch()
    found = look_at_runs(runs, tmp_path)
    assert [(s.todo, s.flops) for s in found.values()] == [
        ("nothing", runs[0].flops),
        ("resume", 123),
        ("start", 0),
        ("start", 0),
    ]


def test_a_finished_run_of_fewer_steps_is_not_finished(
    runs: list[PlannedRun], tmp_path: Path
) -> None:
    path = make(runs[0], tmp_path).path
    assert is_finished(path, runs[0].num_steps)
    assert not is_finished(path, runs[0].num_steps + 1)
    assert not is_finished(tmp_path, 1)
    (path / "status.json").write_text("{")
    assert not is_finished(path, runs[0].num_steps)


def test_other_fields_are_refused_together(runs: list[PlannedRun], tmp_path: Path) -> None:
    make(runs[0]._replace(config=runs[1].config), tmp_path)
    with pytest.raises(ValueError, match="was trained with other fields") as caught:
        look_at_runs(runs, tmp_path)
    assert "(num_layers = 4, width = 64): choose another --out, or remove it" in str(caught.value)
    broken = make(runs[2], tmp_path).path
    (broken / "config.toml").write_text("model = 3")
    with pytest.raises(ValueError, match="2 folders cannot be resumed") as caught:
        look_at_runs(runs, tmp_path)
    assert f"'{broken}' cannot be read" in str(caught.value)


def test_a_run_of_another_process_is_refused(runs: list[PlannedRun], tmp_path: Path) -> None:
    with (
        make(runs[0], tmp_path, state="running").lock(),
        pytest.raises(ValueError, match="another process is training in"),
    ):
        look_at_runs(runs, tmp_path)


def test_flops_of_the_last_line(tmp_path: Path) -> None:
    assert read_flops(tmp_path) == 0
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"kind": "val", "step": 1}\n')
    assert read_flops(tmp_path) == 0
    # more than is looked at, then a line of training, a validation, and a line that is torn
    lines = ['{"step": 1, "kind": "train", "flops": 1}'] * 3000
    lines += ['{"step": 2, "kind": "train", "flops": 7.5}', '{"kind": "val"}', '{"kind": "train", ']
    metrics.write_text("\n".join(lines))
    assert metrics.stat().st_size > 2**16
    assert read_flops(tmp_path) == 7.5


def test_speed_is_of_finished_runs(runs: list[PlannedRun], tmp_path: Path) -> None:
    assert measure_speed(runs, tmp_path) is None
    first = make(runs[0], tmp_path)
    status = first.read_json("status.json")
    text = (first.path / "status.json").read_text()
    (first.path / "status.json").write_text(
        text.replace(status["updated"], "2026-11-15T12:00:10+00:00")
    )
    # neither what was started twice, nor what is not finished, tells a time
    make(runs[1], tmp_path, num_starts=2)
    make(runs[2], tmp_path, state="interrupted")
    broken = make(runs[3], tmp_path)
    (broken.path / "provenance.json").write_text("{}")
    assert measure_speed(runs, tmp_path) == pytest.approx(runs[0].flops / 10)


def test_mixed_data_is_reported(runs: list[PlannedRun], tmp_path: Path) -> None:
    assert find_mixed_data(runs, tmp_path) is None
    make(runs[0], tmp_path)
    make(runs[1], tmp_path)
    assert find_mixed_data(runs, tmp_path) is None
    make(runs[3], tmp_path, data="other")
    told = find_mixed_data(runs, tmp_path)
    assert told is not None
    assert told.startswith(f"{runs[0].name} and {runs[3].name} were trained on different data")


def test_the_end_of_a_log(tmp_path: Path) -> None:
    assert read_log_end(tmp_path) == []
    (tmp_path / LOG).write_bytes(b"one\n\ntwo  \n\xff\nfour\n\n")
    assert read_log_end(tmp_path) == ["two", "\N{REPLACEMENT CHARACTER}", "four"]
