"""A run's folder survives kills, full disks and mistaken paths, and says what is wrong."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from depthmix.runs.folder import MAX_DEPTH, RunDir, collect_provenance, find_runs, name_run

CONFIG = '[model]\nwidth = 64\n\n[train]\nnum_steps = 10\ntitle = "größer"\n'


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", CONFIG, {"seed": 1})


def strict_lines(path: Path) -> list[dict]:
    """Lines as a strict reader sees them: NaN and Infinity are not JSON."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_new_run_stores_its_arguments(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "deep" / "run", CONFIG, {"seed": 1})
    assert (run.path / "config.toml").read_text(encoding="utf-8") == CONFIG
    assert run.checkpoints.is_dir()
    found = RunDir.open(run.path)
    assert found.read_config() == {
        "model": {"width": 64},
        "train": {"num_steps": 10, "title": "größer"},
    }
    assert found.read_json("provenance.json") == {"starts": [{"seed": 1}]}
    assert found.read_json("status.json") == {}
    assert found.read_metrics() == []


def test_an_empty_folder_becomes_a_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path, CONFIG, {})
    assert RunDir.open(str(tmp_path)).read_config()["model"] == {"width": 64}


def test_a_run_is_never_overwritten(run: RunDir) -> None:
    with pytest.raises(ValueError, match="already contains a run"):
        RunDir.create(run.path, "other = 1", {"seed": 2})
    assert run.read_config()["model"] == {"width": 64}
    run.append_metrics({"step": 1, "kind": "train"})
    with pytest.raises(
        ValueError, match=r"already contains a run: .*train --resume .*run', or .*another --out"
    ):
        RunDir.create(run.path, "other = 1", {"seed": 2})
    (run.path / "config.toml").unlink()
    # metrics alone are worth keeping too
    with pytest.raises(ValueError, match="already contains a run"):
        RunDir.create(run.path, "other = 1", {"seed": 2})
    assert run.read_metrics() == [{"step": 1, "kind": "train"}]
    assert run.read_json("provenance.json") == {"starts": [{"seed": 1}]}


def test_a_run_is_not_made_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file: choose another --out"):
        RunDir.create(tmp_path / "file", CONFIG, {})
    with pytest.raises(NotADirectoryError) as caught:
        RunDir.create(tmp_path / "file" / "run", CONFIG, {})
    assert caught.value.filename == str(tmp_path / "file" / "run")


def test_a_config_that_cannot_be_written_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        Path(str(args[0])).touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        RunDir.create(tmp_path / "run", CONFIG, {})
    monkeypatch.undo()
    assert caught.value.filename == str(tmp_path / "run" / "config.toml")
    # so the same command works when there is room
    assert RunDir.create(tmp_path / "run", CONFIG, {}).read_config()["model"]["width"] == 64


def test_paths_that_are_not_runs_are_explained(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    for path, told in {
        run.checkpoints: rf"part of the run '{run.path}': give that folder instead",
        run.path / "config.toml": rf"part of the run '{run.path}'",
        run.checkpoints / "step-5": rf"part of the run '{run.path}'",
        tmp_path / "rnu": r"there is no run .*rnu.*\. Did you mean 'run'\?",
        tmp_path / "no" / "where": "there is no run .*where': give a folder made by training",
        tmp_path / "notes.txt": "is a file: give a run's folder",
        tmp_path / "empty": "not a run: it has no config.toml",
        tmp_path: rf"not a run, but contains 1: choose one, such as '{run.path}'",
    }.items():
        with pytest.raises(ValueError, match=told):
            RunDir.open(path)
    (run.path / "config.toml").unlink()
    with pytest.raises(ValueError, match=r"it has no config\.toml"):
        RunDir.open(run.path)


def test_damaged_files_are_named(run: RunDir) -> None:
    for name, text in (("config.toml", "[model"), ("status.json", "[1]"), ("status.json", "{")):
        (run.path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            run.read_config() if name == "config.toml" else run.read_json(name)


def test_metrics_are_strict_json(run: RunDir) -> None:
    record = {
        "step": np.int64(3),
        "kind": "train",
        "loss": math.nan,
        "best": -math.inf,
        "gates": [1.5, math.inf, np.float32("nan")],
        "nested": {"tensor": torch.tensor(2.5), "nan": torch.tensor(math.nan), 7: (1, None)},
        "text": "ü\n",
    }
    run.append_metrics(record)
    run.append_metrics({"step": 4, "kind": "val", "loss": 0.1})
    assert strict_lines(run.metrics) == [
        {
            "step": 3,
            "kind": "train",
            "loss": None,
            "best": None,
            "gates": [1.5, None, None],
            "nested": {"tensor": 2.5, "nan": None, "7": [1, None]},
            "text": "ü\n",
        },
        {"step": 4, "kind": "val", "loss": 0.1},
    ]
    assert run.read_metrics("val") == [{"step": 4, "kind": "val", "loss": 0.1}]
    assert [r["step"] for r in run.read_metrics()] == [3, 4]


def test_each_record_is_on_disk_at_once(run: RunDir) -> None:
    for step in range(3):
        run.append_metrics({"step": step, "kind": "train"})
        assert len(RunDir.open(run.path).read_metrics()) == step + 1


def test_metrics_are_not_executable(run: RunDir) -> None:
    run.append_metrics({"step": 1, "kind": "train"})
    assert run.metrics.stat().st_mode & 0o111 == 0


@pytest.mark.parametrize("torn", ['{"step": 2, "ki', '{"step": 2, "kind": "train"}', "\x00\x00"])
def test_a_torn_last_line_is_read_over_and_cut_off(run: RunDir, torn: str) -> None:
    whole = '{"step": 1, "kind": "train"}\n'
    run.metrics.write_text(whole + torn)
    assert run.read_metrics() == [{"step": 1, "kind": "train"}]
    assert run.metrics.read_text() == whole + torn, "a reader changes nothing"
    run.append_metrics({"step": 2, "kind": "train"})
    assert run.metrics.read_text() == whole + '{"step": 2, "kind": "train"}\n'


def test_a_damaged_line_inside_is_named(run: RunDir) -> None:
    for line in ("oops", "[1]", '{"kind": "train"}', '{"step": null}', ""):
        run.metrics.write_text('{"step": 1, "kind": "a"}\n' + line + '\n{"step": 2, "kind": "a"}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl' is damaged: line 2 .*remove"):
            run.read_metrics()


def test_resuming_leaves_no_record_twice(run: RunDir) -> None:
    for step in range(1, 7):
        run.append_metrics({"step": step, "kind": "train", "first": True})
        run.append_metrics({"step": step, "kind": "val", "first": True})
    run.metrics.write_text(run.metrics.read_text() + '{"step": 7, "ki')
    run.truncate_metrics(4)
    assert [(r["step"], r["kind"]) for r in run.read_metrics()] == [
        (step, kind) for step in range(1, 5) for kind in ("train", "val")
    ]
    # the old file is gone: a record must not go there
    run.append_metrics({"step": 5, "kind": "train", "first": False})
    assert run.read_metrics()[-1] == {"step": 5, "kind": "train", "first": False}
    assert [p.name for p in run.path.iterdir() if p.name.endswith(".part")] == []


def test_truncating_nothing_makes_no_file(run: RunDir) -> None:
    run.truncate_metrics(0)
    assert not run.metrics.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported_with_the_file(run: RunDir) -> None:
    run.metrics.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        run.append_metrics({"step": 1, "kind": "train"})
    assert caught.value.filename == str(run.metrics)
    run.close()
    (run.path / "status.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        run.write_status("running", step=1, num_steps=2, loss=None)
    assert caught.value.filename == str(run.path / "status.json")


def test_a_write_that_fails_half_way_leaves_no_half_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.append_metrics({"step": 1, "kind": "train"})
    write = os.write

    def fill_up(file: int, data: bytes) -> int:
        if len(data) > 5:
            return write(file, data[: len(data) - 5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(OSError, match="No space left"):
        run.append_metrics({"step": 2, "kind": "train"})
    monkeypatch.undo()
    assert run.metrics.read_text() == '{"step": 1, "kind": "train"}\n'
    run.append_metrics({"step": 3, "kind": "train"})
    assert [r["step"] for r in run.read_metrics()] == [1, 3]


def test_status_is_replaced_whole(run: RunDir) -> None:
    run.write_status("running", step=1, num_steps=10, loss=math.nan)
    first = run.read_json("status.json")
    assert first | {"updated": ""} == {
        **{"state": "running", "step": 1, "num_steps": 10, "loss": None, "reason": ""},
        "updated": "",
    }
    assert datetime.fromisoformat(first["updated"]).tzinfo is not None
    before = (run.path / "status.json").stat().st_ino
    run.write_status("failed", step=2, num_steps=10, loss=1.5, reason="the loss is not finite")
    assert run.read_json("status.json")["reason"] == "the loss is not finite"
    # another file took its name, so half of it was never visible
    assert (run.path / "status.json").stat().st_ino != before


def test_every_start_is_kept(run: RunDir) -> None:
    run.add_start({"step": 5, "where": Path("x")})
    assert run.read_starts() == [{"seed": 1}, {"step": 5, "where": "x"}]
    # of a run that was killed while it was made
    (run.path / "provenance.json").unlink()
    run.add_start({"step": 0})
    assert run.read_json("provenance.json") == {"starts": [{"step": 0}]}


def test_two_trainers_cannot_share_a_run(run: RunDir) -> None:
    other = RunDir.open(run.path)
    assert not other.is_locked()
    with run.lock():
        assert other.is_locked()
        told = rf"another process \({os.getpid()} on .*\) is training in .*--out"
        with pytest.raises(ValueError, match=told), other.lock():
            pass
        assert run.is_locked(), "the refused one took nothing"
    assert not other.is_locked()
    with other.lock():
        assert run.is_locked()


def test_listing_runs_does_not_stop_a_start(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    with run.lock():
        pass
    with open(run.path / ".lock", "rb") as lister:
        fcntl.flock(lister, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(lister, fcntl.LOCK_UN))
        with run.lock():
            assert RunDir.open(run.path).is_locked()


def test_a_killed_process_holds_no_lock_and_tears_at_most_its_last_line(run: RunDir) -> None:
    script = f"""
        from depthmix.runs.folder import RunDir
        run = RunDir.open({str(run.path)!r})
        with run.lock():
            for step in range(10**9):
                run.append_metrics({{"step": step, "kind": "train", "loss": 1.0}})
                if step == 100:
                    print("going", flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        assert run.is_locked()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()
    assert not run.is_locked()
    steps = [record["step"] for record in run.read_metrics()]
    assert len(steps) > 100
    assert steps == list(range(len(steps)))
    run.append_metrics({"step": len(steps), "kind": "train"})
    assert strict_lines(run.metrics)[-1]["step"] == len(steps)


def test_names_are_free(tmp_path: Path) -> None:
    when = datetime(2026, 11, 15, 14, 22, 33)
    assert name_run("demo-mod", when) == Path("runs/demo-mod-20261115-142233")
    assert name_run("configs/my.toml", when, "out") == Path("out/my-20261115-142233")
    names = []
    for _ in range(3):
        path = name_run("demo", when, tmp_path)
        path.mkdir()
        names.append(path.name)
    assert names == [f"demo-20261115-142233{end}" for end in ("", "-2", "-3")]


def test_runs_are_found_to_a_depth(tmp_path: Path) -> None:
    expected = set()
    # four levels down: a run of a sweep
    found = ("a", "b/c", "isoflop-gpu/1e15/mod/w320-l12-s0", "b/2/3/4/5/6")
    for path in (*found, "b/2/3/4/5/seven/too-deep", ".hidden/g", "a/checkpoints/h"):
        RunDir.create(tmp_path / path, CONFIG, {})
        if path in found:
            expected.add(tmp_path / path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.toml").write_text(CONFIG)
    assert MAX_DEPTH == 6
    assert set(find_runs(tmp_path)) == expected
    assert list(find_runs(tmp_path / "a")) == [tmp_path / "a"]
    assert list(find_runs(tmp_path / "nowhere")) == []


def git(folder: Path, *command: str) -> str:
    settings = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *settings, *command], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("starts", [None, "none", [], [3], {"time": "now"}])
def test_damaged_starts_are_a_sentence(tmp_path: Path, starts: object) -> None:
    run = RunDir.create(tmp_path / "run", "", {"seed": 1})
    (run.path / "provenance.json").write_text(json.dumps({"starts": starts}))
    with pytest.raises(
        ValueError, match=r"provenance\.json' is damaged: its starts are not a list"
    ):
        run.read_starts()


def test_provenance_describes_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["depthmix", "train", "60m", "seed=3"])
    data = {"folder": "data", "manifest_hash": "ab"}
    found = collect_provenance(seed=3, data=data, device={"gpu": "H100"}, step=7)
    assert found["command"] == ["depthmix", "train", "60m", "seed=3"]
    assert found["data"] == data
    assert found["device"] == {"gpu": "H100"}
    assert (found["seed"], found["step"], found["folder"]) == (3, 7, str(tmp_path))
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert datetime.fromisoformat(found["time"]).tzinfo is not None
    json.dumps(found, allow_nan=False)


def test_provenance_knows_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> dict | None:
        return collect_provenance(seed=0, data={}, device={})["git"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert ask() is None
    git(tmp_path, "init")
    assert ask() is None, "a repository without a commit"
    (tmp_path / "a.txt").write_text("a")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "-a", "v1-rc", "-m", "a tag does not hide the commit")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked.txt").write_text("u")
    assert ask() == {"commit": commit, "dirty": False}
    (tmp_path / "a.txt").write_text("b")
    assert ask() == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert ask() is None, "no git on this machine"
