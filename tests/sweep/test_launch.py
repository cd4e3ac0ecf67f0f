"""A sweep from Python: opened, shown, trained, and opened again."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from depthmix.sweep import execute
from depthmix.sweep.execute import Jobs
from depthmix.sweep.launch import open_sweep
from depthmix.sweep.plan import read_plan
from toy_sweeps import Fake


def test_a_sweep_is_shown_trained_and_resumed(
    fake: Fake, tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "TRAIN", fake.command)
    monkeypatch.setattr(execute, "POLL_SECONDS", 0.01)
    plan, options = read_plan(tree), {"vocab_size": 512, "folder": fake.out}
    sweep = open_sweep(plan, {"num_heads": 2}, **options)
    assert sweep.num_left == len(sweep.runs) == 4
    assert {run.config.model.vocab_size for run in sweep.runs} == {512}
    assert {run.config.model.num_heads for run in sweep.runs} == {2}
    failing = sweep.runs[1]
    fake.order({failing.folder: ["refuse", "refuse"]})
    screen = io.StringIO()
    console = Console(file=screen, width=100)
    sweep.show(console, Jobs(num_jobs=2, tflops=1.0))
    assert "4 runs, 4 to train" in screen.getvalue()
    assert " at 1 TFLOP/s" in screen.getvalue()
    assert not fake.out.exists()
    summary = sweep.train(console, Jobs(num_jobs=2))
    assert summary.failed.keys() == {failing.name}
    assert f"{failing.name} failed; {fake.out / failing.folder}" in screen.getvalue()
    again = open_sweep(plan, {"num_heads": 2}, **options)
    assert again.num_left == 1
    assert not again.train(console, Jobs()).failed
    assert open_sweep(plan, {"num_heads": 2}, **options).num_left == 0


def test_the_default_folder_is_named_after_the_plan(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_sweep(read_plan(tree), vocab_size=512).folder == Path("runs/toy")
    tree["scale"] = {"smoke": {"budgets": [2e9]}}
    assert open_sweep(read_plan(tree), vocab_size=512).folder == Path("runs/toy-smoke")
    with pytest.raises(ValueError, match="its vocab_size is 100, and the data has 512"):
        open_sweep(read_plan(tree), {"vocab_size": 100}, vocab_size=512)
