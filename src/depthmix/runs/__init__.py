"""Runs on disk: a run's folder (`folder`), its losses (`losses`), a table of all runs (`table`)."""

from depthmix.runs.folder import RunDir, find_runs, name_run
from depthmix.runs.table import Record, RunSummary, list_runs, print_runs, read_runs, to_json

__all__ = [
    "Record",
    "RunDir",
    "RunSummary",
    "find_runs",
    "list_runs",
    "name_run",
    "print_runs",
    "read_runs",
    "to_json",
]
