"""A plan and a folder for its runs: shown, trained here, or submitted to SLURM.

Knows nothing of data: the vocabulary's size and the corpus are arguments.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from depthmix.progress import say
from depthmix.sweep.execute import Executor, Jobs, Summary, show_runs, submit_runs
from depthmix.sweep.folders import (
    LOG,
    Standing,
    find_mixed_data,
    look_at_runs,
    measure_speed,
    print_plan,
)
from depthmix.sweep.plan import PlannedRun, SweepPlan, check_vocabulary, expand_plan

if TYPE_CHECKING:
    from rich.console import Console


class Sweep(NamedTuple):
    """The runs of a plan in a folder, made by `open_sweep`."""

    plan: SweepPlan
    folder: Path
    runs: list[PlannedRun]
    standings: dict[str, Standing]
    """The state of each run, by name, when the sweep was opened."""

    @property
    def num_left(self) -> int:
        """Runs that are not finished."""
        return sum(standing.todo != "nothing" for standing in self.standings.values())

    def show(self, console: "Console", jobs: Jobs) -> None:
        """Print the runs, with the time that they are expected to take."""
        num_jobs = jobs.num_jobs or 1
        measured = None if jobs.tflops else measure_speed(self.runs, self.folder)
        # the plan's guess counts until a run has finished
        is_guess = not jobs.tflops and not measured
        tflops = self.plan.tflops if is_guess else jobs.tflops
        speed = tflops * 1e12 if tflops else measured and measured * num_jobs
        description, options = self.plan.description, {"num_jobs": num_jobs}
        print_plan(description, self.runs, self.standings, console, speed, is_guess, **options)

    def train(self, console: "Console", jobs: Jobs) -> Summary:
        """Train what is left until it is finished or interrupted, and report failures."""
        executor = Executor(self.runs, self.standings, self.folder, jobs)
        total_flops = sum(run.flops for run in self.runs)
        with show_runs(console, total_flops, self.num_left) as report:
            summary = executor.run(report)
        mixed = find_mixed_data(self.runs, self.folder)
        if mixed:
            say(console, mixed)
        folders = {run.name: run.folder for run in self.runs}
        for name, lines in summary.failed.items():
            say(console, f"{name} failed; {self.folder / folders[name] / LOG} ends with:")
            say(console, "\n".join(f"  {line}" for line in lines))
        return summary

    def submit(self, jobs: Jobs, parameters: Mapping[str, Any] | None = None) -> list[str]:
        """Submit what is left to SLURM; returns the job ids."""
        return submit_runs(self.runs, self.standings, self.folder, jobs, parameters)


def open_sweep(
    plan: SweepPlan,
    overrides: Mapping[str, Any] | None = None,
    *,
    vocab_size: int,
    folder: Path | None = None,
) -> Sweep:
    """Expand a plan for data of `vocab_size` ids, and look at what its folder already has.

    `overrides` are fields of all runs; the default folder is `runs/PLAN-SIZE`.
    """
    runs = expand_plan(plan, overrides, vocab_size=vocab_size)
    check_vocabulary(runs, vocab_size)
    folder = folder or Path("runs", "-".join(filter(None, (plan.name, plan.scale))))
    return Sweep(plan, folder, runs, look_at_runs(runs, folder))
