"""A run's folder: configuration, provenance, metrics, status and lock.

Defines the names and formats of the files (docs/runs.md), which stay readable if the process is
killed. Does not import torch.
"""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, Literal

from depthmix.config.fields import suggest
from depthmix.files import name_file, parse_json, replace_file, take_lock

State = Literal["running", "finished", "interrupted", "failed"]
# sweeps are four levels below `runs`: isoflop-gpu/1e15/mod/w320-l12-s0
MAX_DEPTH = 6
_MARKS = frozenset({"provenance.json", "status.json", "metrics.jsonl"})


class RunDir:
    """One run's folder, from `create` or `open`; one process at a time writes, under `lock`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.tensorboard = path / "checkpoints", path / "tensorboard"
        self.metrics = path / "metrics.jsonl"
        self._appending: int | None = None

    @staticmethod
    def create(path: str | Path, config_toml: str, provenance: Mapping[str, Any]) -> "RunDir":
        """Start a new run; `provenance` is the result of `collect_provenance`."""
        run, config = RunDir(Path(path)), Path(path, "config.toml")
        run.check_free(can_resume=True)
        run.path.mkdir(parents=True, exist_ok=True)
        try:
            # this claims the folder: if two start at once, one is refused
            with name_file(config), open(config, "x", encoding="utf-8") as file:
                file.write(config_toml)
            run.checkpoints.mkdir(exist_ok=True)
            run.add_start(provenance)
        except FileExistsError:
            run.check_free(can_resume=True)
            raise
        except OSError:
            config.unlink(missing_ok=True)
            raise
        return run

    def check_free(self, *, can_resume: bool = False) -> None:
        """Refuse a file, or a folder that already contains a run.

        With `can_resume`, the error also offers to resume that run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"'{self.path}' is a file: choose another --out for the run's folder")
        if self.metrics.exists() or (self.path / "config.toml").exists():
            place = shlex.quote(str(self.path))
            hint = f"resume it with 'depthmix train --resume {place}', or " if can_resume else ""
            raise ValueError(f"'{self.path}' already contains a run: {hint}choose another --out")

    @staticmethod
    def open(path: str | Path) -> "RunDir":
        """Open an existing run; the error says why a path is not one."""
        run = RunDir(Path(path))
        if run.path.is_dir() and (run.path / "config.toml").is_file():
            return run
        raise ValueError(_explain_refusal(run.path))

    def read_config(self) -> dict[str, Any]:
        """The resolved configuration, with the tables `model` and `train`."""
        path = self.path / "config.toml"
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"'{path}' is damaged: {error}") from error

    def add_start(self, provenance: Mapping[str, Any]) -> None:
        """Record another start of this run, with everything that may have changed since."""
        starts = [*self.read_starts(), dict(provenance)]
        replace_file(self.path / "provenance.json", _to_json({"starts": starts}, indent=2))

    def read_starts(self) -> list[dict[str, Any]]:
        """The records of all starts of this run, oldest first."""
        tree = self.read_json("provenance.json")
        if not tree:
            return []
        starts = tree.get("starts") or None
        if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
            path = self.path / "provenance.json"
            raise ValueError(f"'{path}' is damaged: its starts are not a list of objects")
        return starts

    def write_status(
        self, state: State, *, step: int, num_steps: int, loss: float | None, reason: str = ""
    ) -> None:
        """Write the run's status."""
        status = {"state": state, "step": step, "num_steps": num_steps, "loss": loss}
        status |= {"reason": reason, "updated": _now()}
        replace_file(self.path / "status.json", _to_json(status, indent=2))

    def read_json(self, name: str) -> dict[str, Any]:
        """`provenance.json` or `status.json`; empty if there is none yet."""
        try:
            return dict(parse_json((self.path / name).read_bytes()))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError) as error:
            raise ValueError(f"'{self.path / name}' is not a JSON object: {error}") from error

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one record, with null for numbers that are not finite; all of it or nothing."""
        assert {"step", "kind"} <= record.keys(), record
        with name_file(self.metrics):
            if self._appending is None:
                _cut_torn_line(self.metrics)
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                self._appending = os.open(self.metrics, flags, 0o666)
            num_bytes, line = os.fstat(self._appending).st_size, _to_json(record).encode()
            try:
                while line:
                    line = line[os.write(self._appending, line) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._appending, num_bytes)
                raise

    def truncate_metrics(self, step: int) -> None:
        """Drop the records after `step`, which a resumed run writes again."""
        self.close()
        kept = [line for line, record in self._parse_lines() if record["step"] <= step]
        if self.metrics.exists():
            replace_file(self.metrics, b"".join(line + b"\n" for line in kept))

    def read_metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """All records in order, or those of one kind; skips a last line cut off by a kill."""
        return [record for _, record in self._parse_lines() if kind in (None, record.get("kind"))]

    def _parse_lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        lines = self.metrics.read_bytes().split(b"\n") if self.metrics.exists() else [b""]
        # complete lines end in a newline; anything after the last one was cut off by a kill
        for number, line in enumerate(lines[:-1], 1):
            try:
                record = dict(parse_json(line))
                int(record["step"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"'{self.metrics}' is damaged: line {number} is not a record; remove that line"
                ) from error
            yield line, record

    def close(self) -> None:
        """Close the metrics file; the next record opens it again."""
        if self._appending is not None:
            os.close(self._appending)
            self._appending = None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from training here; the lock ends with the process."""
        with open(self.path / ".lock", "a+", encoding="utf-8") as file:
            # listing runs takes the lock for an instant: try again
            if not take_lock(file.fileno()):
                time.sleep(0.2)
                if not take_lock(file.fileno()):
                    file.seek(0)
                    raise ValueError(
                        f"another process ({file.read().strip()}) is training in '{self.path}': "
                        f"wait for it to end, or choose another --out"
                    )
            file.truncate(0)
            print(os.getpid(), "on", platform.node(), file=file, flush=True)
            yield

    def is_locked(self) -> bool:
        """Whether a live process is training in this run."""
        with suppress(OSError), open(self.path / ".lock", "rb") as file:
            return not take_lock(file.fileno(), shared=True)
        return False


def name_run(preset: str, when: datetime, folder: str | Path = "runs") -> Path:
    """A folder for a new run that does not exist yet: `runs/60m-mod-20261115-142233`."""
    name = f"{Path(preset).name.removesuffix('.toml')}-{when:%Y%m%d-%H%M%S}"
    names = (Path(folder, f"{name}-{n}" if n > 1 else name) for n in count(1))
    return next(path for path in names if not path.exists())


def collect_provenance(
    *, seed: int, data: Mapping[str, Any], device: Mapping[str, Any], step: int = 0
) -> dict[str, Any]:
    """The provenance of a start; `data` (folder, hash) and `device` are the caller's."""
    versions = {"python": platform.python_version()}
    for name in ("depthmix", "torch", "numpy", "triton"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "time": _now(),
        "step": step,
        "command": sys.argv,
        "folder": os.getcwd(),
        "versions": versions,
        "platform": platform.platform(),
        "device": dict(device),
        "git": _ask_git(),
        "data": dict(data),
        "seed": seed,
    }


def _ask_git() -> dict[str, Any] | None:
    """Commit of the current folder's repository, and whether tracked files differ from it."""
    command = "git --no-optional-locks describe --always --dirty --abbrev=40 --exclude=*"
    try:
        done = subprocess.run(
            command.split(), capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty)}


def find_runs(folder: str | Path) -> Iterator[Path]:
    """Folders with a run's files: this one, or those at most `MAX_DEPTH` levels below it."""
    for where, below, files in os.walk(folder):
        depth = len(Path(where).relative_to(folder).parts)
        if not _MARKS.isdisjoint(files):
            yield Path(where)
            depth = MAX_DEPTH
        below[:] = [name for name in below if depth < MAX_DEPTH and not name.startswith(".")]


def describe_run_nearby(path: Path) -> str | None:
    """A sentence about the run that a path is part of, or the runs that it contains, if any."""
    for parent in path.parents:
        if (parent / "config.toml").is_file() and (parent / "provenance.json").is_file():
            return f"'{path}' is part of the run '{parent}': give that folder instead"
    inside = [run for run in sorted(find_runs(path)) if run != path]
    if inside:
        return (
            f"'{path}' is not a run, but contains {len(inside)}: choose one, such as '{inside[-1]}'"
        )
    return None


def _explain_refusal(path: Path) -> str:
    """Why a path is not a run."""
    nearby = describe_run_nearby(path)
    if nearby is not None:
        return nearby
    if not path.exists():
        near = suggest(path.name, os.listdir(path.parent) if path.parent.is_dir() else ())
        return f"there is no run '{path}': give a folder made by training.{near}"
    if not path.is_dir():
        return f"'{path}' is a file: give a run's folder"
    return f"'{path}' is not a run: it has no config.toml; give a folder made by training"


def _cut_torn_line(path: Path) -> None:
    if path.is_file():
        with open(path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _to_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON on one line or indented, ending in a newline."""
    return json.dumps(_make_plain(value), indent=indent, allow_nan=False, default=str) + "\n"


def _make_plain(value: Any) -> Any:
    # numpy and torch scalars
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(name): _make_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
