"""Train planned runs, each `depthmix train` in its own folder: in processes here, or on SLURM.

A run that fails is retried once. A signal is passed on, so that every run saves. On SLURM, through
`submitit`, each run is a job of one array.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from depthmix.config.fields import Count, Positive, check_bounds
from depthmix.files import replace_file
from depthmix.interrupt import Interrupt
from depthmix.progress import say, show_bar
from depthmix.sweep.folders import (
    LOG,
    PLANNED,
    Standing,
    is_finished,
    look_at_runs,
    read_flops,
    read_log_end,
)
from depthmix.sweep.plan import PlannedRun
from depthmix.units import format_flops

if TYPE_CHECKING:
    from rich.console import Console

MAX_TRIES = 2
POLL_SECONDS = 0.5

# exit code of `depthmix` for a user's mistake
MISTAKE = 2

# time for runs to save when the sweep has to end
GRACE_SECONDS = 60.0

# the command that trains; arguments of a run follow
TRAIN = (sys.executable, "-m", "depthmix", "train")

# where submitit keeps its own files, hidden from the search for runs
SLURM_FOLDER = ".slurm"


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """What the runs of a sweep are trained with."""

    num_jobs: Count | None = None
    """Runs in parallel; None means one on this machine, and all of them on SLURM."""
    data: Path | None = None
    """A folder made by `prepare`; None means the default corpus."""
    device: str | None = None
    """As for `depthmix train`."""
    tflops: Positive[float] | None = None
    """TFLOP/s of all jobs together, to estimate the time; None means as measured or guessed."""

    def __post_init__(self) -> None:
        check_bounds(self)


class SweepProgress(NamedTuple):
    """The progress of a sweep."""

    done_flops: int | float
    running: tuple[str, ...]
    finished: tuple[str, ...]
    """Runs that this sweep finished."""
    failed: tuple[str, ...]
    stopping: bool


class Summary(NamedTuple):
    """How a sweep ended."""

    finished: tuple[str, ...]
    """Runs that this sweep finished."""
    failed: dict[str, list[str]]
    """Name → the last lines of its log."""
    signal: int | None
    """The signal that stopped it."""


class _Job(NamedTuple):
    run: PlannedRun
    process: subprocess.Popen[bytes]
    log: IO[bytes]


def list_arguments(path: Path, jobs: Jobs, *, resume: bool) -> list[str]:
    """The arguments of `depthmix train` for the run in a folder."""
    arguments = ["--resume", str(path)]
    if not resume:
        arguments = ["--config", str(path / PLANNED), "--out", str(path)]
    arguments += ["--data", str(jobs.data)] if jobs.data else []
    return arguments + (["--device", jobs.device] if jobs.device else [])


class Executor:
    """Trains runs in order, some of them in parallel."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        standings: Mapping[str, Standing],
        folder: Path,
        jobs: Jobs | None = None,
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        self.folder, self.options = folder, jobs or Jobs()
        self.num_jobs = self.options.num_jobs or 1
        self.command = tuple(command or TRAIN)
        self.waiting = [run for run in runs if standings[run.name].todo != "nothing"]
        self.num_tries = dict.fromkeys((run.name for run in runs), 0)
        self.flops = {name: float(standing.flops) for name, standing in standings.items()}
        self.jobs: list[_Job] = []
        self.finished: list[str] = []
        self.failed: dict[str, list[str]] = {}
        self.interrupt = Interrupt(raises=False)
        self.refusals: dict[str, str] = {}
        """The error of a run that was refused before its first step → the run's name."""
        self._has_passed_on = False

    def run(
        self,
        report: Callable[[SweepProgress], None] | None = None,
        poll_seconds: float | None = None,
    ) -> Summary:
        """Train until nothing is left, or until interrupted."""
        with self.interrupt:
            try:
                while self.jobs or (self.waiting and not self.stopping):
                    self._pass_on_signals()
                    self._collect_ended()
                    while self.waiting and len(self.jobs) < self.num_jobs and not self.stopping:
                        self._start(self.waiting.pop(0))
                    if report is not None:
                        report(self._measure())
                    if self.jobs:
                        time.sleep(POLL_SECONDS if poll_seconds is None else poll_seconds)
            except BaseException:
                self._ask_to_end()
                raise
            finally:
                # nothing is left running after a failure
                self._kill()
        return Summary(tuple(self.finished), self.failed, self.interrupt.signal)

    @property
    def stopping(self) -> bool:
        """Whether it was interrupted."""
        return self.interrupt.signal is not None

    def _start(self, run: PlannedRun) -> None:
        path = self.folder / run.folder
        path.mkdir(parents=True, exist_ok=True)
        config = path / "config.toml"
        if not (path / "provenance.json").exists():
            # killed while its folder was made: there is nothing to resume
            config.unlink(missing_ok=True)
        resume = config.exists()
        if not resume:
            replace_file(path / PLANNED, run.config.to_toml())
        arguments = list_arguments(path, self.options, resume=resume)
        self.num_tries[run.name] += 1
        log = open(path / LOG, "ab")  # noqa: SIM115 (closed when its process has ended)
        try:
            log.write(f"$ depthmix train {shlex.join(arguments)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [*self.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._make_environment(),
                # the sweep passes Ctrl-C on; a run that got it twice would end without saving
                start_new_session=True,
            )
        except BaseException:
            log.close()
            raise
        self.jobs.append(_Job(run, process, log))

    def _make_environment(self) -> dict[str, str]:
        # each process would use all cores
        threads = max(1, (os.cpu_count() or 1) // self.num_jobs)
        shared = {"OMP_NUM_THREADS": str(threads)} if self.num_jobs > 1 else {}
        return {**shared, **os.environ}

    def _collect_ended(self) -> None:
        for job in [job for job in self.jobs if job.process.poll() is not None]:
            self.jobs.remove(job)
            job.log.close()
            run, path = job.run, self.folder / job.run.folder
            if is_finished(path, run.num_steps):
                self.finished.append(run.name)
                self.flops[run.name] = run.flops
            elif self.stopping:
                self.flops[run.name] = read_flops(path)
            elif self.num_tries[run.name] < MAX_TRIES:
                self._check_refusal(job)
                self.waiting.append(run)
            else:
                code = job.process.returncode
                end = f"signal {-code}" if code < 0 else f"exit code {code}"
                # the sweep itself writes the line with the command
                lines = [line for line in read_log_end(path) if not line.startswith("$ depthmix")]
                self.failed[run.name] = lines or [f"it printed nothing, and ended with {end}"]

    def _check_refusal(self, job: _Job) -> None:
        """End the sweep if two runs are refused with the same words and no run has succeeded.

        A missing GPU, or data that is gone, would otherwise be reported for every run, twice.
        """
        path = self.folder / job.run.folder
        if job.process.returncode != MISTAKE or self.finished or read_flops(path):
            return
        words = "".join(read_log_end(path, 1)).removeprefix("depthmix: ")
        other = self.refusals.setdefault(words, job.run.name)
        if other != job.run.name:
            raise ValueError(f"{other} and {job.run.name} cannot be trained: {words}")

    def _measure(self) -> SweepProgress:
        for job in self.jobs:
            self.flops[job.run.name] = read_flops(self.folder / job.run.folder)
        return SweepProgress(
            done_flops=sum(self.flops.values()),
            running=tuple(job.run.name for job in self.jobs),
            finished=tuple(self.finished),
            failed=tuple(self.failed),
            stopping=self.stopping,
        )

    def _pass_on_signals(self) -> None:
        """The first signal goes to every run; an interrupt after it ends them all."""
        first = self.interrupt.signal
        if self.interrupt.at_once:
            self._kill()
        elif first is not None and not self._has_passed_on:
            self._has_passed_on = True
            for job in self.jobs:
                with suppress(ProcessLookupError):
                    job.process.send_signal(first)

    def _ask_to_end(self) -> None:
        """Wait for runs to save."""
        for job in self.jobs:
            job.process.terminate()
        last = time.monotonic() + GRACE_SECONDS
        while any(job.process.poll() is None for job in self.jobs) and time.monotonic() < last:
            if signal.SIGINT in self.interrupt.signals:
                break
            time.sleep(0.05)

    def _kill(self) -> None:
        """Kill what still runs, with its child processes."""
        for job in self.jobs:
            # the number of a process that has ended may belong to another by now
            if job.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
            job.log.close()


@contextmanager
def show_runs(
    console: "Console", total_flops: int | float, num_left: int
) -> Iterator[Callable[[SweepProgress], None]]:
    """A bar for all runs, by FLOPs, and a line for each that ends; yields the report function."""
    shown: set[str] = set()
    # runs differ in speed, so the last minutes predict better than the last seconds
    with show_bar(console, speed_seconds=600) as bar:

        def report(progress: SweepProgress) -> None:
            ended = {name: "finished" for name in progress.finished}
            ended |= {name: "failed" for name in progress.failed}
            for name in [name for name in ended if name not in shown]:
                shown.add(name)
                sentence = f"{ended[name]}: {name} ({len(shown)} of {num_left})"
                say(console, sentence)
            verb, end = ("stopping", "stopped") if progress.stopping else ("training", "done")
            running = f"{verb} {len(progress.running)}" if progress.running else end
            words = f"{progress.done_flops / total_flops:>4.0%} of {format_flops(total_flops)}"
            bar.update(running, progress.done_flops, total_flops, words)

        yield report


def submit_runs(
    runs: Sequence[PlannedRun],
    standings: Mapping[str, Standing],
    folder: Path,
    jobs: Jobs | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> list[str]:
    """Submit all unfinished runs to SLURM; returns their job ids.

    `parameters` are those of submitit's executor.
    """
    try:
        import submitit  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise ValueError("--slurm needs submitit: pip install 'depthmix[slurm]'") from error
    jobs = jobs or Jobs()
    left = [run for run in runs if standings[run.name].todo != "nothing"]
    given = {"name": runs[0].name.partition("/")[0], "gpus_per_node": 1, **(parameters or {})}
    if jobs.num_jobs is not None:
        given["slurm_array_parallelism"] = jobs.num_jobs
    # a node may have another current folder
    where, data = folder.resolve(), jobs.data and jobs.data.resolve()
    try:
        executor = submitit.AutoExecutor(folder=where / SLURM_FOLDER, cluster="slurm")
        executor.update_parameters(**given)
    except (NameError, RuntimeError, TypeError) as error:
        raise ValueError(f"submitit cannot use SLURM here: {error}") from error
    alone = Jobs(data=data, device=jobs.device)
    with executor.batch():
        submitted = [executor.submit(train_alone, run, where, alone) for run in left]
    return [str(job.job_id) for job in submitted]


def train_alone(run: PlannedRun, folder: Path, jobs: Jobs | None = None) -> None:
    """Train or resume one run: the work of a job on SLURM."""
    summary = Executor([run], look_at_runs([run], folder), folder, jobs).run()
    if summary.failed:
        raise RuntimeError("\n".join([f"{run.name} failed:", *summary.failed[run.name]]))
    if summary.signal is not None:
        raise RuntimeError(f"{run.name} was stopped by signal {summary.signal}, and saved")
