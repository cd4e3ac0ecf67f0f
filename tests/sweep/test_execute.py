"""Runs as processes and as jobs, by a trainer that only pretends: order, retries, signals."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from depthmix.config import RunConfig
from depthmix.runs.folder import RunDir
from depthmix.sweep import execute as execute_module
from depthmix.sweep.execute import (
    Executor,
    Jobs,
    Summary,
    SweepProgress,
    submit_runs,
    train_alone,
)
from depthmix.sweep.folders import LOG, PLANNED, look_at_runs
from depthmix.sweep.plan import PlannedRun, expand_plan, read_plan
from toy_sweeps import Fake


def execute(
    fake: Fake,
    runs: list[PlannedRun],
    report: Callable[[SweepProgress], None] | None = None,
    **options: Any,
) -> Summary:
    standings = look_at_runs(runs, fake.out)
    executor = Executor(runs, standings, fake.out, Jobs(**options), command=fake.command)
    return executor.run(report, poll_seconds=0.01)


def test_all_runs_are_trained_and_then_kept(fake: Fake, runs: list[PlannedRun]) -> None:
    seen: list[SweepProgress] = []
    summary = execute(fake, runs, seen.append, data=Path("d"), device="cpu")
    assert summary == (tuple(run.name for run in runs), {}, None)
    calls = fake.read_calls()
    assert [name for name, _ in calls] == [run.folder for run in runs]
    assert calls[0][1][:8] == [
        *("--config", str(fake.out / runs[0].folder / PLANNED)),
        *("--out", str(fake.out / runs[0].folder)),
        *("--data", "d", "--device", "cpu"),
    ]
    assert fake.count_most_at_once() == 1
    assert 1000 in {progress.done_flops for progress in seen}
    assert seen[-1].done_flops == sum(run.flops for run in runs)
    assert seen[-1].running == ()
    # what the trainer made of the arguments is what was planned
    assert {s.todo for s in look_at_runs(runs, fake.out).values()} == {"nothing"}
    assert execute(fake, runs) == ((), {}, None)
    assert len(fake.read_calls()) == len(runs)


def test_number_of_parallel_jobs(fake: Fake, tree: dict[str, Any]) -> None:
    runs = expand_plan(read_plan({**tree, "seeds": [0, 1]}))
    seen: list[SweepProgress] = []
    summary = execute(fake, runs, seen.append, num_jobs=3)
    assert len(summary.finished) == len(runs) == 8
    assert max(len(progress.running) for progress in seen) == 3
    assert 2 <= fake.count_most_at_once() <= 3


def test_a_failure_is_tried_once_more(fake: Fake, runs: list[PlannedRun]) -> None:
    first, second, third, fourth = (run.folder for run in runs)
    fake.order(
        {first: ["refuse", "refuse"], second: ["break"], third: ["die"], fourth: ["die", "die"]}
    )
    summary = execute(fake, runs)
    assert set(summary.finished) == {runs[1].name, runs[2].name}
    assert summary.failed == {
        runs[0].name: ["first words", "depthmix: no room on the disk"],
        runs[3].name: ["it printed nothing, and ended with signal 9"],
    }
    calls = fake.read_calls()
    # the others come first; what had begun is gone on with
    assert [name for name, _ in calls] == [first, second, third, fourth] * 2
    starts = [args[0] for _, args in calls[4:]]
    assert starts == ["--config", "--resume", "--config", "--config"]
    log = (fake.out / second / LOG).read_text()
    assert log.count("$ depthmix train --") == 2
    assert "ValueError: broken" in log
    # asked again, the failed ones are tried again
    assert execute(fake, runs).finished == (runs[0].name, runs[3].name)


def test_error_common_to_all_runs_ends_the_sweep(fake: Fake, runs: list[PlannedRun]) -> None:
    fake.order({run.folder: ["refuse", "refuse"] for run in runs})
    told = f"{runs[0].name} and {runs[1].name} cannot be trained: no room on the disk"
    with pytest.raises(ValueError, match=re.escape(told)):
        execute(fake, runs)
    assert len(fake.read_calls()) == 2
    # where one has come to its end, the others may, too
    fake.order({run.folder: ["refuse"] * 3 for run in runs[1:]})
    summary = execute(fake, runs)
    assert summary.finished == (runs[0].name,)
    assert set(summary.failed) == {run.name for run in runs[1:]}


def test_folder_of_a_killed_start_is_replaced(fake: Fake, runs: list[PlannedRun]) -> None:
    path = fake.out / runs[0].folder
    path.mkdir(parents=True)
    (path / "config.toml").write_text(runs[0].config.to_toml())
    assert execute(fake, runs[:1]).finished == (runs[0].name,)
    assert fake.read_calls()[0][1][0] == "--config"


def interrupt(fake: Fake, *numbers: int) -> Callable[[SweepProgress], None]:
    """Sends signals to this process, one for each report once a run waits."""
    left = list(numbers)

    def report(progress: SweepProgress) -> None:
        if left and (fake.root / "waiting").exists():
            os.kill(os.getpid(), left.pop(0))

    return report


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_runs_save(
    fake: Fake, runs: list[PlannedRun], number: signal.Signals
) -> None:
    fake.order({runs[0].folder: ["wait"]})
    before = signal.getsignal(number)
    assert execute(fake, runs, interrupt(fake, number)) == ((), {}, number)
    assert signal.getsignal(number) is before
    received = json.loads((fake.out / runs[0].folder / "received").read_text())
    assert received == [number]
    # a terminal's own Ctrl-C must not come beside ours
    assert (fake.out / runs[0].folder / "leads").read_text() == "True"
    assert len(fake.read_calls()) == 1
    summary = execute(fake, runs)
    assert summary.finished == tuple(run.name for run in runs)
    assert fake.read_calls()[1][1] == ["--resume", str(fake.out / runs[0].folder)]


def test_interrupted_run_is_not_a_failure(fake: Fake, runs: list[PlannedRun]) -> None:
    fake.order({runs[0].folder: ["break", "wait"]})
    summary = execute(fake, runs[:1], interrupt(fake, signal.SIGINT))
    assert summary == ((), {}, signal.SIGINT)
    assert len(fake.read_calls()) == 2


def test_a_second_ctrl_c_kills(fake: Fake, runs: list[PlannedRun]) -> None:
    fake.order({run.folder: ["ignore"] for run in runs})
    summary = execute(fake, runs, interrupt(fake, signal.SIGINT, signal.SIGINT), num_jobs=2)
    assert summary == ((), {}, signal.SIGINT)
    names = os.listdir(fake.root / "running")
    assert names
    for name in names:
        with pytest.raises(ProcessLookupError):
            os.kill(int(name), 0)


@pytest.mark.parametrize("order", ["wait", "ignore"])
def test_an_error_of_the_sweep_leaves_nothing_behind(
    fake: Fake, runs: list[PlannedRun], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_module, "GRACE_SECONDS", 0.5 if order == "ignore" else 60)
    fake.order({runs[0].folder: [order]})

    def fail(progress: SweepProgress) -> None:
        if (fake.root / "waiting").exists():
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        execute(fake, runs, fail)
    names = os.listdir(fake.root / "running")
    # it was asked first, and killed where it did not listen
    assert len(names) == (order == "ignore")
    assert (fake.out / runs[0].folder / "received").exists() == (order == "wait")
    for name in names:
        with pytest.raises(ProcessLookupError):
            os.kill(int(name), 0)


def test_every_field_reaches_the_run(fake: Fake, tree: dict[str, Any]) -> None:
    tree["sizes"] = [{"num_layers": 4, "routing": {"capacity": [0.5, 0.25], "predictor": False}}]
    tree["variants"] = {"mod": {"routing": {"gate": "tanh1"}}}
    (run,) = expand_plan(read_plan(tree), {"num_kv_heads": None})
    execute(fake, [run])
    trained = RunConfig.from_dict(RunDir.open(fake.out / run.folder).read_config())
    assert trained == run.config
    assert trained.model.capacities == (0.5, 0.25)
    assert (trained.model.routing.gate, trained.model.routing.predictor) == ("tanh1", False)
    assert (trained.train.flops, trained.train.seed) == (1e9, 0)


def test_threads_are_shared(
    fake: Fake, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    standings = look_at_runs(runs, fake.out)
    alone, three = (Executor(runs, standings, fake.out, Jobs(num_jobs=n)) for n in (1, 3))
    assert "OMP_NUM_THREADS" not in alone._make_environment()
    assert three._make_environment()["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert three._make_environment()["OMP_NUM_THREADS"] == "5"


def test_no_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="num_jobs = 0 must be at least 1"):
        Jobs(num_jobs=0)
    with pytest.raises(ValueError, match=r"tflops = inf must be a finite number"):
        Jobs(tflops=float("inf"))


class FakeExecutor:
    """A submitit that only notes what it is given; jobs get ids when the array is submitted."""

    made: "list[FakeExecutor]"

    def __init__(self, folder: Path, cluster: str) -> None:
        if cluster != "slurm":
            raise RuntimeError("no such cluster")
        self.folder, self.parameters, self.jobs = folder, {}, []
        FakeExecutor.made.append(self)

    def update_parameters(self, **parameters: Any) -> None:
        if "colour" in parameters:
            raise NameError("colour is no parameter")
        self.parameters |= parameters

    @contextmanager
    def batch(self) -> Iterator[None]:
        yield
        for number, job in enumerate(self.jobs):
            job.job_id = f"7_{number}"

    def submit(self, function: Callable[..., None], *args: Any) -> SimpleNamespace:
        self.jobs.append(SimpleNamespace(call=lambda: function(*args)))
        return self.jobs[-1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeExecutor]:
    FakeExecutor.made = []
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(AutoExecutor=FakeExecutor))
    return FakeExecutor.made


def test_a_job_for_each_run_that_is_left(
    fake: Fake,
    runs: list[PlannedRun],
    made: list[FakeExecutor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execute_module, "TRAIN", fake.command)
    monkeypatch.setattr(execute_module, "POLL_SECONDS", 0.01)
    train_alone(runs[1], fake.out)
    standings = look_at_runs(runs, fake.out)
    options: dict[str, Any] = {"timeout_min": 5, "gpus_per_node": 2}
    ids = submit_runs(runs, standings, fake.out, Jobs(num_jobs=3), options)
    assert ids == ["7_0", "7_1", "7_2"]
    (executor,) = made
    assert executor.folder == fake.out.resolve() / ".slurm"
    assert executor.parameters == {**options, "name": "toy", "slurm_array_parallelism": 3}
    # a job trains its own run, and no other
    executor.jobs[1].call()
    found = look_at_runs(runs, fake.out)
    assert [found[run.name].todo for run in runs] == ["start", "nothing", "nothing", "start"]


def test_default_parameters_of_slurm(
    fake: Fake, runs: list[PlannedRun], made: list[FakeExecutor]
) -> None:
    submit_runs(runs, look_at_runs(runs, fake.out), fake.out)
    assert made[0].parameters == {"name": "toy", "gpus_per_node": 1}


def test_a_job_fails_with_its_run(
    fake: Fake, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_module, "TRAIN", fake.command)
    fake.order({runs[0].folder: ["refuse", "refuse"]})
    with pytest.raises(RuntimeError, match="no room on the disk"):
        train_alone(runs[0], fake.out)


def test_unknown_parameters_of_slurm(
    fake: Fake, runs: list[PlannedRun], made: list[FakeExecutor]
) -> None:
    standings = look_at_runs(runs, fake.out)
    with pytest.raises(ValueError, match="submitit cannot use SLURM here: colour is no parameter"):
        submit_runs(runs, standings, fake.out, parameters={"colour": "red"})


def test_without_submitit(
    fake: Fake, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"needs submitit: pip install 'depthmix\[slurm\]'"):
        submit_runs(runs, look_at_runs(runs, fake.out), fake.out)
