"""Runs as a job array, with a submitit that only notes what it is handed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from depthmix.sweep import execute
from depthmix.sweep.cluster import submit_runs, train_alone
from depthmix.sweep.folders import look_at_runs
from depthmix.sweep.plan import PlannedRun
from toy_sweeps import Fake


class FakeExecutor:
    """Jobs get their ids when the array is handed over, and not before."""

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
    monkeypatch.setattr(execute, "TRAIN", fake.command)
    monkeypatch.setattr(execute, "POLL_SECONDS", 0.01)
    train_alone(runs[1], fake.out)
    standings = look_at_runs(runs, fake.out)
    options: dict[str, Any] = {"timeout_min": 5, "gpus_per_node": 2}
    ids = submit_runs(runs, standings, fake.out, num_jobs=3, parameters=options)
    assert ids == ["7_0", "7_1", "7_2"]
    (executor,) = made
    assert executor.folder == fake.out.resolve() / ".slurm"
    assert executor.parameters == {**options, "name": "toy", "slurm_array_parallelism": 3}
    # a job trains its own run, and no other
    executor.jobs[1].call()
    found = look_at_runs(runs, fake.out)
    assert [found[run.name].todo for run in runs] == ["start", "nothing", "nothing", "start"]


def test_defaults(fake: Fake, runs: list[PlannedRun], made: list[FakeExecutor]) -> None:
    submit_runs(runs, look_at_runs(runs, fake.out), fake.out)
    assert made[0].parameters == {"name": "toy", "gpus_per_node": 1}


def test_a_job_fails_with_its_run(
    fake: Fake, runs: list[PlannedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "TRAIN", fake.command)
    fake.order({runs[0].folder: ["refuse", "refuse"]})
    with pytest.raises(RuntimeError, match="no room on the disk"):
        train_alone(runs[0], fake.out)


def test_parameters_that_nobody_knows(
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
