"""Tiny data and tiny runs, for tests that train; and a server that runs `depthmix` in processes.

The server has loaded torch already and forks: a start costs a few tenths of a second, and every run
is a process of its own that can be killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from depthmix.checkpoint import folder as disk
from depthmix.config.fields import parse_override
from depthmix.data.prepare import prepare
from depthmix.files import hash_file
from depthmix.runs.folder import RunDir

SERVER = """
import json, os, resource, sys
import depthmix.cli, depthmix.train.launch, torch.distributed.checkpoint.hf_storage
import torch.utils.tensorboard

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in enumerate((os.devnull, order["out"], order["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        if order["limit_bytes"]:
            limits = (order["limit_bytes"], resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.argv = ["depthmix", *order["args"]]
        code = depthmix.cli.main()
        sys.stdout.flush()
        os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

MODEL = (
    *("--preset", "tiny", "--device", "cpu", "width=16", "num_layers=2", "num_heads=2"),
    *("num_kv_heads=1", "max_seq_len=16", "vocab_size=64", "routing.predictor_width=8"),
)
# nothing falls on the same steps: what is in the middle of a mean must survive too
RECIPE = ("train.batch_size=2", "train.log_every=3", "train.val_every=7", "train.val_tokens=64")

FIELDS: dict[str, Any] = dict(parse_override(arg) for arg in (*MODEL, *RECIPE) if "=" in arg)

# what depends on the clock or the machine
MEASURED = {
    *("tokens_per_second", "flops_per_second", "share_of_peak", "seconds_per_step"),
    *("memory_bytes", "time"),
}


def write_data(folder: Path, seed: int = 0) -> Path:
    """A prepared folder of a few thousand random ids below 64."""
    folder.mkdir(parents=True)
    ids = np.random.default_rng(seed).integers(1, 64, 6000).astype("<u2")
    # documents of 40 tokens and their end
    ids[::41] = 0
    source = folder.with_name(f"{folder.name}.bin")
    ids.tofile(source)
    prepare([str(source)], folder, token_dtype="uint16", end_token=0, vocab_size=64, num_workers=1)
    return folder


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """A run's metrics, as far as they are the same on every machine."""
    return [
        {name: value for name, value in record.items() if name not in MEASURED}
        for record in RunDir.open(run).read_metrics()
    ]


def read_result(run: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on how often it was stopped."""
    status = RunDir.open(run).read_json("status.json")
    assert status["state"] == "finished"
    last = run / "checkpoints" / disk.name_checkpoint(status["num_steps"])
    tensors = {
        f"{part}.{name}": (str(value.dtype), value.shape, value.tobytes())
        for part in ("model", "optimizer")
        for name, value in load_file(last / f"{part}.safetensors").items()
    }
    assert len(tensors) > 20
    # beside the tensors, which say where a difference is
    files = {path.name: hash_file(path) for path in last.glob("*.safetensors")}
    state = {name: value for name, value in disk.read_state(last).items() if name != "config"}
    assert {"rng", "loader", "val", "meter"} <= state.keys()
    for rng in state["rng"]:
        # checks of types at run time draw from Python's own; the training does not
        del rng["python"]
    return {
        **tensors,
        "files": files,
        "state": state,
        "loss": status["loss"],
        "metrics": read_metrics(run),
    }


def flip_byte(path: Path, at: int) -> None:
    """Change one byte of a file, in place."""
    with path.open("rb+") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def read_tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, but for the lock, which names its last holder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): path.read_bytes() for path in files}


class Ended(NamedTuple):
    """A run's process after its end."""

    code: int
    out: str
    err: str


class Server:
    """Runs `depthmix` in forked processes, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process_id = folder, 0
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, *args: object, limit_bytes: int = 0) -> None:
        self.stop()
        files = {name: str(self.folder / name) for name in ("out", "err")}
        order = {**files, "args": [str(arg) for arg in args], "limit_bytes": limit_bytes}
        assert self.server.stdin is not None
        print(json.dumps(order), file=self.server.stdin, flush=True)
        self.process_id = int(self._read_line())

    def send(self, number: int) -> None:
        # a process 0 would be all of this group's
        assert self.process_id
        with suppress(ProcessLookupError):
            os.kill(self.process_id, number)

    def stop(self) -> None:
        """End what a failed test has left."""
        if self.process_id:
            self.send(signal.SIGKILL)
            self.wait()

    def wait(self) -> Ended:
        code, self.process_id = int(self._read_line()), 0
        return Ended(code, *((self.folder / name).read_text() for name in ("out", "err")))

    def run(self, *args: object, limit_bytes: int = 0) -> Ended:
        self.start(*args, limit_bytes=limit_bytes)
        return self.wait()

    def is_alive(self) -> bool:
        # its parent waits for it, so it is no zombie for long
        assert self.process_id
        try:
            os.kill(self.process_id, 0)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        self.stop()
        with self.server:
            assert self.server.stdin is not None
            self.server.stdin.close()

    def _read_line(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline()


def wait_until(server: Server, happened: Callable[[], bool]) -> bool:
    """Whether it happened before the process ended."""
    while server.is_alive():
        if happened():
            return True
        time.sleep(0.001)
    return False


def count_growth(path: Path) -> Callable[[], int]:
    """How often a file has been seen to grow since now; a resumed run also cuts it."""
    sizes = [_measure(path)]

    def look() -> int:
        sizes.append(_measure(path))
        return sum(after > before for before, after in pairwise(sizes))

    return look


def _measure(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def stop_at_step(patch: pytest.MonkeyPatch, step: int) -> None:
    """Let a training in this process be asked to stop while it is at `step`."""
    from depthmix.train.loop import Trainer

    move = Trainer._move

    def move_and_stop(self: Trainer, batch: Any) -> Any:
        if self.num_done + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return move(self, batch)

    patch.setattr(Trainer, "_move", move_and_stop)
