"""Submit planned runs as one SLURM job array, through `submitit`: one job per run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.sweep.execute import Executor
from depthmix.sweep.folders import Standing, look_at_runs
from depthmix.sweep.plan import PlannedRun

# where submitit keeps its own files, hidden from the search for runs
FOLDER = ".slurm"


def submit_runs(
    runs: Sequence[PlannedRun],
    standings: Mapping[str, Standing],
    folder: Path,
    *,
    num_jobs: int | None = None,
    data: Path | None = None,
    device: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> list[str]:
    """Submit all unfinished runs; returns their job ids.

    At most `num_jobs` run at once; `parameters` are those of submitit's executor.
    """
    try:
        import submitit  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise ValueError("--slurm needs submitit: pip install 'depthmix[slurm]'") from error
    left = [run for run in runs if standings[run.name].todo != "nothing"]
    given = {"name": runs[0].name.partition("/")[0], "gpus_per_node": 1, **(parameters or {})}
    if num_jobs is not None:
        given["slurm_array_parallelism"] = num_jobs
    # a node may have another current folder
    where, data = folder.resolve(), data and data.resolve()
    try:
        executor = submitit.AutoExecutor(folder=where / FOLDER, cluster="slurm")
        executor.update_parameters(**given)
    except (NameError, RuntimeError, TypeError) as error:
        raise ValueError(f"submitit cannot use SLURM here: {error}") from error
    with executor.batch():
        jobs = [executor.submit(train_alone, run, where, data, device) for run in left]
    return [str(job.job_id) for job in jobs]


def train_alone(
    run: PlannedRun, folder: Path, data: Path | None = None, device: str | None = None
) -> None:
    """Train or resume one run: the work of a job."""
    standings = look_at_runs([run], folder)
    summary = Executor([run], standings, folder, data=data, device=device).run()
    if summary.failed:
        raise RuntimeError("\n".join([f"{run.name} failed:", *summary.failed[run.name]]))
    if summary.signal is not None:
        raise RuntimeError(f"{run.name} was stopped by signal {summary.signal}, and saved")
