"""`depthmix sweep`: what it shows, how it ends, what it refuses; and once for real."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from depthmix.cli import main, sweep
from depthmix.config import load_run_config
from depthmix.runs import list_runs
from depthmix.sweep import execute, launch
from depthmix.sweep.execute import Jobs
from tiny_runs import write_data
from toy_sweeps import Fake

PLAN = """
name = "toy"
description = "A toy."
preset = "tiny"
budgets = [2e8]
sizes = [{ width = 16, num_layers = 2 }]

[common]
num_heads = 2
max_seq_len = 16
train.batch_size = 2
train.val_tokens = 64
train.flops_convention = "full"

[variants]
dense = { routing.strategy = "none" }
mod = { routing.capacity = 0.25 }
"""


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "d")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(PLAN)
    return path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(tmp_path)
    monkeypatch.setattr(execute, "TRAIN", made.command)
    monkeypatch.setattr(execute, "POLL_SECONDS", 0.01)
    return made


def list_options(plan: Path, data: Path, out: Path) -> list[str]:
    return ["sweep", str(plan), "--data", str(data), "--out", str(out)]


def test_a_table_and_nothing_started(
    plan: Path, data: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*list_options(plan, data, fake.out), "--dry-run"]
    assert main([*options, "--tflops", "1e-6"]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert "A toy." in printed
    # 1e-6 TFLOP/s are 200 seconds for each run
    assert re.search(r"toy/2e8/dense/w16-l2-s0 +\S+ K +\d+ +\S+e8 +3 min +new", printed)
    assert re.search(
        r"2 runs, 2 to train, 398 MFLOP \(full\), about 7 min at 1e-06 TFLOP/s", printed
    )
    assert not fake.out.exists()
    # the data's vocabulary is the models', and twice as many jobs share the speed
    assert main([*options, "width=32", "--jobs", "2", "--tflops", "1e-6"]) == 0
    assert re.search(r"mod/w32-l2-s0 .* 7 min +new", capsys.readouterr().out)
    assert main(options) == 0
    assert "the time is known when a run has finished" in capsys.readouterr().out
    # a plan may guess, but who asks knows better
    plan.write_text("tflops = 2e-6\n" + plan.read_text())
    assert main(options) == 0
    assert "about 3 min at 2e-06 TFLOP/s, as the plan guesses\n" in capsys.readouterr().out
    assert main([*options, "--tflops", "1e-6"]) == 0
    assert "about 7 min at 1e-06 TFLOP/s\n" in capsys.readouterr().out


def test_failures_are_named_and_tried_again(
    plan: Path, data: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.order({"2e8/mod/w16-l2-s0": ["refuse", "refuse"]})
    options = [*list_options(plan, data, fake.out), "--device", "cpu"]
    assert main(options) == 1
    printed, errors = capsys.readouterr()
    log = fake.out / "2e8/mod/w16-l2-s0/log.txt"
    assert "finished: toy/2e8/dense/w16-l2-s0 (1 of 2)" in printed
    assert f"mod/w16-l2-s0 failed; {log} ends with:" in printed
    assert "  depthmix: no room on the disk" in printed
    assert "depthmix: 1 of 2 runs failed twice; try them again with: depthmix sweep" in errors
    assert f"--data {data} --device cpu" in errors
    assert "all 2 runs" not in printed
    assert main(options) == 0
    printed, errors = capsys.readouterr()
    assert re.search(r"dense/w16-l2-s0 .* finished", printed)
    assert "(1 of 1)" in printed
    assert f"all runs (2) are finished; compare them with: depthmix report {fake.out}" in printed
    num_calls = len(fake.read_calls())
    assert main(options) == 0
    assert "all runs (2) are already finished" in capsys.readouterr().out
    assert len(fake.read_calls()) == num_calls == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_sweep_says_how_to_resume(
    plan: Path,
    data: Path,
    fake: Fake,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    fake.order({"2e8/mod/w16-l2-s0": ["wait"]})
    measure = execute.Executor._measure

    def interrupt(executor: execute.Executor) -> execute.SweepProgress:
        if (fake.out / "2e8/mod/w16-l2-s0/metrics.jsonl").exists() and not executor.stopping:
            os.kill(os.getpid(), number)
        return measure(executor)

    monkeypatch.setattr(execute.Executor, "_measure", interrupt)
    options = list_options(plan, data, fake.out)
    assert main(options) == code
    told = "stopped with 1 of 2 runs finished; resume with: depthmix sweep"
    printed, errors = capsys.readouterr()
    assert told in errors
    # in a pipe there are lines, and no bar
    assert "finished: toy/2e8/dense/w16-l2-s0 (1 of 2)" in printed
    assert "━" not in printed
    assert main([*options, "--dry-run"]) == 0
    assert re.search(r"mod/w16-l2-s0 .* to resume", capsys.readouterr().out)


def test_mixed_data_is_reported(
    plan: Path, data: Path, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.order({"2e8/mod/w16-l2-s0": ["refuse", "refuse"]})
    assert main(list_options(plan, data, fake.out)) == 1
    # a link is another name, which is all that the pretended trainer looks at
    other = tmp_path / "other"
    other.symlink_to(data)
    assert main(list_options(plan, other, fake.out)) == 0
    assert "were trained on different data" in capsys.readouterr().out


def test_the_default_corpus_is_made_once(
    plan: Path, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = []

    def prepare_once(vocab_size: int, console: Any) -> Path:
        made.append(vocab_size)
        return tmp_path / "corpus"

    monkeypatch.setattr(sweep, "prepare_once", prepare_once)
    assert main(["sweep", str(plan)]) == 0
    assert made == [4096]
    _, args = fake.read_calls()[0]
    assert "--data" not in args
    assert load_run_config(Path(args[args.index("--config") + 1])).model.vocab_size == 4096
    assert (tmp_path / "runs" / "toy" / "2e8" / "mod").is_dir()
    # a plan may want fewer ids, and then the runs are told where they are
    plan.write_text(f"vocab_size = 300\n{PLAN}")
    assert main(["sweep", str(plan), "--out", str(tmp_path / "few")]) == 0
    assert made == [4096, 300]
    _, args = fake.read_calls()[-1]
    assert args[args.index("--data") + 1] == str(tmp_path / "corpus")
    assert load_run_config(Path(args[args.index("--config") + 1])).model.vocab_size == 300


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["sweep"],
            "name one plan: capacity-frequency, controls, experts, isoflop, knobs, memory, "
            "placement, replication, shapes, or a .toml",
        ),
        (["sweep", "isoflop", "controls"], "name one plan"),
        (["sweep", "isoflopp"], "there is no plan 'isoflopp'. Did you mean 'isoflop'?"),
        (["sweep", "isoflop", "--size", "cpu"], "no --size cpu: use smoke or gpu"),
        (["sweep", "isoflop", "--jobs", "0"], "--jobs 0 must be at least 1"),
        (["sweep", "isoflop", "--device", "tpu"], "--device tpu is neither cpu nor cuda"),
        (["sweep", "isoflop", "--tflops", "0"], "--tflops 0.0 must be greater than 0"),
        (["sweep", "isoflop", "--data", "nowhere"], "nowhere"),
        (["sweep", "isoflop", "widht=3"], "no configuration field 'widht'"),
        (["sweep", "isoflop", "vocab_size=100"], "its vocab_size is 100, and the data has 512"),
        (["sweep", "isoflop", "--widht=3"], "there is no option '--widht'"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, refuse: Callable[[list[str], str], None]
) -> None:
    refuse(arguments, sentence)


def test_runs_are_handed_to_slurm(
    plan: Path,
    data: Path,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    handed: list[tuple[Any, ...]] = []

    def submit(*args: Any) -> list[str]:
        handed.append(args[3:])
        return ["7_0", "7_1"]

    monkeypatch.setattr(launch, "submit_runs", submit)
    options = [*list_options(plan, data, fake.out), "--slurm", "timeout_min=600"]
    assert main([*options, "--slurm", "slurm_partition=long", "--device", "cuda"]) == 0
    parameters = {"timeout_min": 600, "slurm_partition": "long"}
    assert handed == [(Jobs(data=data, device="cuda"), parameters)]
    assert "submitted 2 jobs, 7_0 to 7_1" in capsys.readouterr().out
    assert not (fake.root / "calls").exists()


def test_sweep_with_real_training(
    plan: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = [*list_options(plan, data, out), "--device", "cpu", "--jobs", "2"]
    assert main(options) == 0, capsys.readouterr()
    found = {Path(run.path).relative_to(out).as_posix(): run for run in list_runs(out)}
    assert found.keys() == {"2e8/dense/w16-l2-s0", "2e8/mod/w16-l2-s0"}
    for run in found.values():
        assert run.state == "finished"
        assert run.step == run.num_steps
        assert run.step > 10
        assert run.flops is not None
        assert 1.9e8 < run.flops <= 2e8
    assert found["2e8/mod/w16-l2-s0"].val_loss_causal is not None
    assert "finished, validation loss" in (out / "2e8/dense/w16-l2-s0/log.txt").read_text()
    capsys.readouterr()
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "already finished" in printed
