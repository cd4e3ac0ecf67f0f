"""A run's checkpoints: save in the background, find the newest intact one, load.

Coordinates the ranks through staging, writing, checksums, publishing and pruning.
"""

import errno
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.checkpoint import folder as disk
from depthmix.checkpoint.tensors import (
    Parts,
    copy_to_cpu,
    name_files,
    read_tensors,
    write_tensors,
)
from depthmix.world import join_world


@dataclass(frozen=True)
class Found:
    """A checkpoint whose checksums hold."""

    path: Path
    step: int
    damaged: tuple[str, ...] = ()
    """A message for each newer checkpoint that was skipped."""


class Checkpoints:
    """The checkpoints of one run, for the process that trains it.

    With several ranks, made after the process group, and every call is made on every rank; the
    folder is one that all of them see.
    """

    def __init__(
        self, folder: Path | str, *, keep_last: int = 2, asynchronous: bool = True
    ) -> None:
        """Also creates the folder, and cleans up after a killed process."""
        if keep_last < 1:
            raise ValueError(f"keep_last = {keep_last} would keep no checkpoint: give 1 or more")
        self.folder, self.keep_last, self.asynchronous = Path(folder), keep_last, asynchronous
        # a group of its own: a thread writes while training continues
        self.world = join_world()
        self._damaged: set[int] = set()
        self._staged: Parts = {}
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self.world.do_first(lambda: disk.open_folder(self.folder))

    def save(
        self, step: int, tensors: Parts, state: Mapping[str, Any], *, score: float | None = None
    ) -> None:
        """Write a checkpoint; when this returns, `tensors` and `state` may change.

        `state` is JSON data, rank 0's counts; only its "rng" (see `collect_rng`) is each rank's
        own, and becomes a list by rank. The lowest `score` is the best. Waits for an earlier save
        that is still being written, and raises what went wrong with it.
        """
        self.wait()
        states = self.world.gather(lambda: _copy_json(state))
        known = {"format": disk.STATE_FORMAT, "step": step, "score": score}
        tree = {**states[0], **known, "num_ranks": self.world.size}
        if "rng" in tree:
            tree["rng"] = [of_rank["rng"] for of_rank in states]
        if not self.asynchronous:
            self._write(step, tensors, tree)
            return
        self._staged = copy_to_cpu(tensors, self._staged)
        self._writing = self._background.submit(self._write, step, self._staged, tree)

    def poll(self) -> None:
        """Raise an error of the background thread, if there is one; never waits."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything is on disk; raises errors of the background thread."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def find_newest(self) -> Found | None:
        """The newest checkpoint whose checksums hold; None when there is no checkpoint at all.

        Damaged newer ones are passed over and named. Where all are damaged, that is an error:
        starting again from nothing must be the user's choice.
        """
        self.wait()
        found = self.world.do_first(self._find_newest)
        if found is not None:
            self._damaged |= {
                step for step in disk.list_checkpoints(self.folder) if step > found.step
            }
        return found

    def load(self, found: Found, tensors: Parts) -> dict[str, Any]:
        """Fill `tensors` in place (`collect_tensors` gives them) and return the saved state.

        Optimiser state that does not exist yet is added to `tensors`: give them to
        `restore_tensors` afterwards.
        """
        self.wait()
        state = self.world.do_first(lambda: disk.read_state(found.path))
        read_tensors(found.path, tensors, self.world)
        return state

    def _find_newest(self) -> Found | None:
        damaged: list[str] = []
        for step, path in reversed(disk.list_checkpoints(self.folder).items()):
            problem = disk.find_damage(path)
            if problem is None:
                return Found(path, step, tuple(damaged))
            damaged.append(problem)
        if damaged:
            raise ValueError(
                f"no checkpoint in {self.folder} can be used ({'; '.join(damaged)}): remove them "
                f"to start from the beginning, or restore a copy"
            )
        return None

    def _write(self, step: int, tensors: Parts, tree: dict[str, Any]) -> None:
        final = self.folder / disk.name_checkpoint(step)
        unfinished = final.with_name(final.name + disk.UNFINISHED)
        try:
            self.world.do_first(lambda: disk.start_checkpoint(final))
            write_tensors(unfinished, tensors, self.world)
            measured = self.world.gather(lambda: self._measure(unfinished, list(tensors)))
            self.world.do_first(lambda: _finish(unfinished, final, tree, measured))
        except BaseException as error:
            if self.world.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, OSError):
                raise _explain(error, final) from error
            raise
        self.world.do_first(
            lambda: disk.prune_checkpoints(
                self.folder, step, self.keep_last, self._damaged - {step}
            )
        )

    def _measure(self, unfinished: Path, parts: list[str]) -> dict[str, Any]:
        # each rank its own files: together they read all of a checkpoint
        own = name_files(unfinished, parts, self.world)
        return {path.name: disk.measure_file(path) for path in own}


def _finish(
    unfinished: Path, final: Path, tree: dict[str, Any], measured: list[dict[str, Any]]
) -> None:
    disk.write_json(unfinished / disk.STATE, tree)
    files = {disk.STATE: disk.measure_file(unfinished / disk.STATE)}
    for of_rank in measured:
        files |= of_rank
    disk.write_json(unfinished / disk.CHECKSUMS, {"files": files})
    disk.publish_checkpoint(unfinished, final)


def _copy_json(state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(state)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the state of a checkpoint must be JSON data: {error}") from error


def _explain(error: OSError, final: Path) -> OSError:
    reason = error.strerror or str(error)
    return OSError(
        error.errno or errno.EIO,
        f"the checkpoint {final} could not be written ({reason}); earlier checkpoints are intact",
    )
