"""Runs are listed whatever state they are in."""

import io
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from depthmix import flops
from depthmix.config import ModelConfig
from depthmix.runs import RunSummary, list_runs, print_runs, to_json
from depthmix.runs.folder import RunDir
from depthmix.units import format_number

MODEL = ModelConfig(vocab_size=128, num_layers=2, width=32, num_heads=2, max_seq_len=64)
TABLES = re.sub(r"^\[", "[model.", MODEL.to_toml(), flags=re.MULTILINE)
CONFIG = f"[model]\n{TABLES}\n[train]\nnum_steps = 10\n"


def make_run(path: Path, day: int = 1) -> RunDir:
    return RunDir.create(path, CONFIG, {"time": f"2026-11-{day:02}T10:00:00+00:00"})


def render(runs: list[RunSummary], width: int = 140) -> str:
    file = io.StringIO()
    print_runs(runs, Console(file=file, width=width))
    return file.getvalue()


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in (1, 2):
        run.append_metrics(
            {"step": step, "kind": "train", "loss": 5.0 - step, "flops": 10**15 * step}
            | {"tokens_per_second": 1000 * step}
        )
        run.append_metrics({"step": step, "kind": "router", "loss": 99.0})
    run.append_metrics({"step": 2, "kind": "val", "loss_topk": 3.25, "loss_causal": 3.5})
    run.write_status("finished", step=2, num_steps=10, loss=3.0)
    (found,) = list_runs(tmp_path)
    assert found._replace(updated="") == RunSummary(
        path=str(run.path),
        state="finished",
        started="2026-11-01T10:00:00+00:00",
        step=2,
        num_steps=10,
        num_parameters=flops.num_parameters(MODEL).total,
        flops=2 * 10**15,
        loss=3.0,
        val_loss_topk=3.25,
        val_loss_causal=3.5,
        tokens_per_second=2000,
    )
    assert json.loads(to_json([found])) == [found._asdict()]
    shown = render([found], width=300)
    for cell in (str(run.path), "2/10", "finished", "2e15", "3.000", "3.250", "3.500", "2.00 K"):
        assert cell in shown
    assert format_number(flops.num_parameters(MODEL).total) in shown


def test_a_dense_model_has_one_validation_loss(tmp_path: Path) -> None:
    make_run(tmp_path).append_metrics({"step": 1, "kind": "val", "loss": 2.5})
    (found,) = list_runs(tmp_path)
    assert (found.val_loss_topk, found.val_loss_causal) == (2.5, None)


def test_a_run_without_its_process_has_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert list_runs(tmp_path)[0].state == "stopped"
    run.write_status("running", step=1, num_steps=2, loss=None)
    assert list_runs(tmp_path)[0].state == "stopped"
    with run.lock():
        assert list_runs(tmp_path)[0].state == "running"
    # it may have got further than it came to say
    run.append_metrics({"step": 5, "kind": "train", "loss": 1.0})
    assert list_runs(tmp_path)[0].step == 5
    run.write_status("failed", step=1, num_steps=2, loss=None, reason="the loss is not finite")
    found = list_runs(tmp_path)
    assert found[0].state == "failed"
    assert f"{tmp_path}: the loss is not finite" in render(found, width=300)


def test_runs_are_in_order_of_their_starts(tmp_path: Path) -> None:
    for name, day in (("a", 3), ("b/c", 1), ("d", 2)):
        make_run(tmp_path / name, day)
    assert [Path(run.path).name for run in list_runs(tmp_path)] == ["c", "d", "a"]


def test_broken_folders_are_listed_with_the_reason(tmp_path: Path) -> None:
    damages = {
        "config.toml": ("[model", "width = 1", "[model]\nwidht = 1"),
        "metrics.jsonl": ("oops\n",),
        "status.json": ("{", "[]]"),
        "provenance.json": ('{"starts": []}', '{"starts": {}}', '{"starts": [3]}'),
    }
    told = {}
    for file, texts in damages.items():
        for i, text in enumerate(texts):
            run = make_run(tmp_path / f"{file}-{i}")
            (run.path / file).write_text(text)
            told[str(run.path)] = file
    (make_run(tmp_path / "missing").path / "config.toml").unlink()
    make_run(tmp_path / "whole")
    found = {run.path: run for run in list_runs(tmp_path)}
    assert found.pop(str(tmp_path / "whole")).state == "stopped"
    assert len(found) == len(told) + 1
    for run in found.values():
        assert run.state == "broken", run
        assert run.reason
    reasons = {Path(path).name: run.reason for path, run in found.items()}
    assert "no table [model]" in reasons["config.toml-1"]
    assert "widht" in reasons["config.toml-2"]
    assert "line 1" in reasons["metrics.jsonl-0"]
    assert "no config.toml" in reasons["missing"]
    assert "status.json" in reasons["status.json-0"]
    assert reasons["missing"] in render(list(found.values()), width=400)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            ValueError, match=r"there is no run in .*make one with 'depthmix train'"
        ):
            list_runs(folder)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_table_cuts_no_number(width: int, tmp_path: Path) -> None:
    runs = [
        RunSummary("runs/60m-mod-20261115-142233", num_steps=2, step=1, state="stopped"),
        RunSummary("runs/b", step=12345, num_steps=20000, loss=2.345, flops=1.5e19, state="ended"),
    ]
    lines = render(runs, width=width).splitlines()
    (numbers,) = (line for line in lines if "2.345" in line)
    assert numbers.split()[-9 : None if width == 200 else 9] == [
        *("-", "12345/20000", "ended", "1.5e19", "2.345", "-", "-", "-", "-")
    ]
    # names above the numbers only where they do not fit beside them
    assert ("runs/b" in numbers) == (width == 200)
    titles = next(line for line in lines if "tok/s" in line)
    assert titles.index("loss") + 4 == numbers.index("2.345") + 5


def test_small_models_and_young_runs_have_numbers(tmp_path: Path) -> None:
    started = (datetime.now(UTC) - timedelta(seconds=50)).isoformat()
    young = RunSummary("runs/a", num_parameters=12_345, started=started)
    *_, cells = render([young], width=200).splitlines()
    assert "12.3 K" in cells
    assert re.search(r" 5\d s$", cells)
