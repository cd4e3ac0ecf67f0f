"""A run's checkpoints: bitwise, safe at every moment, and never in the training's way."""

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.checkpoint import Checkpoints, collect_rng, restore_rng, restore_tensors
from depthmix.checkpoint import store as store_module

Tensors = dict[str, dict[str, Tensor]]


def tensors_of(value: float) -> Tensors:
    return {"model": {"w": torch.full((3,), value)}, "optimizer": {}}


def load_newest(folder: Path) -> tuple[int, float]:
    """Step and weight of the newest sound checkpoint, by an object of its own."""
    checkpoints = Checkpoints(folder)
    found = checkpoints.find_newest()
    assert found is not None
    tensors = tensors_of(-1)
    assert checkpoints.load(found, tensors)["step"] == found.step
    return found.step, float(tensors["model"]["w"][0])


def assert_same(one: Tensors, other: Tensors) -> None:
    assert {p: set(n) for p, n in one.items()} == {p: set(n) for p, n in other.items()}
    for part, named in one.items():
        for name, value in named.items():
            assert value.dtype == other[part][name].dtype
            assert torch.equal(value, other[part][name]), name


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("adamw", {}),
        ("fused", {"tied_head": False}),
        ("muon", {}),
        # this one draws random numbers at every step
        ("adamw", {"routing.strategy": "stochastic"}),
    ],
)
def test_ten_steps_are_five_and_five_more(
    tmp_path: Path, make_training: Any, kind: str, overrides: dict[str, Any]
) -> None:
    training = make_training(kind, **overrides)
    training.run(5)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, training.collect(), training.state | {"rng": collect_rng(), "seen": 170})
    training.run(5)
    checkpoints.wait()

    torch.manual_seed(99)
    resumed = make_training(kind, **overrides)
    again = Checkpoints(tmp_path)
    found = again.find_newest()
    assert found is not None
    assert (found.step, found.damaged) == (5, ())
    tensors = resumed.collect()
    state = again.load(found, tensors)
    restore_tensors(resumed.model, resumed.optimizers, tensors)
    assert (state["step"], state["seen"], state["num_ranks"]) == (5, 170, 1)
    assert state["config"]["model"]["width"] == 64
    restore_rng(state["rng"][0])
    resumed.step = state["step"]
    resumed.run(5)
    assert_same(training.collect(), resumed.collect())


def test_a_folder_has_the_documented_files(tmp_path: Path, make_training: Any) -> None:
    training = make_training()
    training.run(1)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.find_newest() is None
    checkpoints.save(1000, training.collect(), {}, score=2.5)
    checkpoints.wait()
    path = tmp_path / "run" / "checkpoints" / "step-00001000"
    names = {"model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"}
    assert {p.name for p in path.iterdir()} == names
    assert [p.name for p in path.parent.iterdir()] == ["step-00001000"]
    assert json.loads((path / "state.json").read_text())["score"] == 2.5
    assert set(json.loads((path / "checksums.json").read_text())["files"]) == names - {
        "checksums.json"
    }


def test_changes_after_a_save_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = store_module.write_tensors

    def write_later(*args: Any) -> None:
        assert may_write.wait(60)
        write(*args)

    monkeypatch.setattr(store_module, "write_tensors", write_later)
    checkpoints, tensors, state = Checkpoints(tmp_path), tensors_of(1), {"inner": [1]}
    checkpoints.save(1, tensors, state)
    tensors["model"]["w"].fill_(2)
    state["inner"].append(2)
    checkpoints.poll()
    assert not (tmp_path / "step-00000001").exists()
    may_write.set()
    # a second save waits for the first, whose copies it overwrites
    checkpoints.save(2, tensors, state)
    assert (tmp_path / "step-00000001").exists()
    checkpoints.wait()
    assert load_newest(tmp_path) == (2, 2.0)
    shutil.rmtree(tmp_path / "step-00000002")
    assert load_newest(tmp_path) == (1, 1.0)
    assert json.loads((tmp_path / "step-00000001" / "state.json").read_text())["inner"] == [1]


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, asynchronous=False)
    for step, score in enumerate([4.0, 1.0, 3.0, 2.0, 2.0], start=1):
        checkpoints.save(step, tensors_of(step), {}, score=score)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["2", "4", "5"]
    with pytest.raises(ValueError, match="keep_last = 0"):
        Checkpoints(tmp_path, keep_last=0)


def test_damaged_ones_are_named_and_passed_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=9, asynchronous=False)
    for step in (1, 2, 3, 5):
        checkpoints.save(step, tensors_of(step), {})
    (tmp_path / "step-00000005" / "state.json").write_text("")
    weights = tmp_path / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")

    resumed = Checkpoints(tmp_path, keep_last=2, asynchronous=False)
    found = resumed.find_newest()
    assert found is not None
    assert found.step == 2
    assert len(found.damaged) == 2
    assert "step-00000005 is damaged: state.json has 0 bytes" in found.damaged[0]
    assert "step-00000003 is damaged: the content of model.saf" in found.damaged[1]
    # a sound one is not pruned in favour of a damaged one; that one goes, or is replaced
    resumed.save(4, tensors_of(4), {})
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["2", "4", "5"]
    resumed.save(5, tensors_of(55), {})
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["4", "5"]
    assert load_newest(tmp_path) == (5, 55.0)


def test_when_all_are_damaged_nothing_starts_again_by_itself(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(1, tensors_of(1), {})
    (tmp_path / "step-00000001" / "checksums.json").write_text("{")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be used \(.*checksums.json"):
        checkpoints.find_newest()


@contextmanager
def failing_sync(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """A disk that is full when the `after`-th file or folder is synced."""
    calls, sync = [], os.fsync

    def fail(handle: int) -> None:
        calls.append(handle)
        if len(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield
    assert len(calls) >= after


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_full_disk_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, after: int
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, asynchronous=asynchronous)
    checkpoints.save(1, tensors_of(1), {})
    checkpoints.wait()

    def save_and_wait() -> None:
        checkpoints.save(2, tensors_of(2), {})
        checkpoints.wait()

    sentence = r"step-00000002 could not be written \(No space left"
    with failing_sync(monkeypatch, after), pytest.raises(OSError, match=sentence) as full:
        save_and_wait()
    assert full.value.errno == errno.ENOSPC
    assert "earlier checkpoints are intact" in str(full.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    # told once; with space there again, training goes on
    checkpoints.poll()
    checkpoints.save(3, tensors_of(3), {})
    checkpoints.wait()
    assert load_newest(tmp_path) == (3, 3.0)


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    large = {"model": {"w": torch.zeros(1 << 20)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        checkpoints.save(1, large, {})
        with pytest.raises(OSError, match="could not be written") as refused:
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_poll_raises_the_error_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.poll()
    with failing_sync(monkeypatch, 1):
        checkpoints.save(1, tensors_of(1), {})
        assert checkpoints._writing is not None
        checkpoints._writing.exception(60)
    with pytest.raises(OSError, match="could not be written"):
        checkpoints.poll()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_a_folder_that_has_gone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", asynchronous=False)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OSError, match=r"could not be written \(No such file"):
        checkpoints.save(1, tensors_of(1), {})


def test_state_must_be_json_data(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="must be JSON data"):
        checkpoints.save(1, tensors_of(1), {"bad": object()})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_unpickled(
    tmp_path: Path, make_training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make_training()
    training.run(1)
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(1, training.collect(), training.state)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(AssertionError, match="unpickled"):
        pickle.loads(b"")
    fresh = make_training()
    found = checkpoints.find_newest()
    assert found is not None
    tensors = fresh.collect()
    checkpoints.load(found, tensors)
    restore_tensors(fresh.model, fresh.optimizers, tensors)
    assert_same(fresh.collect(), training.collect())


# Kills a process before its n-th call that changes the disk, for every n, and says what is found.
KILLED = """
import hashlib, json, os, shutil, signal, sys, torch
from pathlib import Path
from depthmix.checkpoint import Checkpoints
from depthmix.checkpoint.folder import find_damage

root, target = Path(sys.argv[1]), int(sys.argv[2])

def tensors_of(value):
    return {"model": {"w": torch.full((3,), value)}, "optimizer": {"w.step": torch.tensor(value)}}

Checkpoints(root / "old", asynchronous=False).save(1, tensors_of(1.0), {})

def kill_before(n):
    calls = []
    def wrap(module, name):
        original = getattr(module, name)
        def counted(*args, **kwargs):
            calls.append(name)
            if len(calls) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(module, name, counted)
    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        wrap(os, name)
    wrap(hashlib, "file_digest")

moment, killed = 0, True
while killed:
    moment += 1
    folder = root / str(moment)
    shutil.copytree(root / "old", folder)
    child = os.fork()
    if child == 0:
        checkpoints = Checkpoints(folder, keep_last=1, asynchronous=False)
        kill_before(moment)
        checkpoints.save(target, tensors_of(2.0), {})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or status == 0, status
    checkpoints = Checkpoints(folder)
    found = checkpoints.find_newest()
    tensors = tensors_of(0.0)
    checkpoints.load(found, tensors)
    values = sorted({*tensors["model"]["w"].tolist(), tensors["optimizer"]["w.step"].item()})
    left = sorted(path.name for path in folder.iterdir())
    damaged = [problem for path in folder.iterdir() if (problem := find_damage(path))]
    print(json.dumps([found.step, damaged, values, left]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [2, 1])
def test_killed_at_any_moment_there_is_a_sound_one(tmp_path: Path, target: int) -> None:
    """Writing step 2 beside step 1, and step 1 again in the place of the old one."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(target)],
        # a process that has used a GPU cannot fork
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) > 15
    old, new = [1, [], [1.0]], [target, [], [2.0]]
    assert found[0][:3] == old
    assert found[-1] == [*new, [f"step-0000000{target}"]]
    for each in found:
        assert each[:3] in (old, new)
        assert not any("tmp" in name for name in each[3])
