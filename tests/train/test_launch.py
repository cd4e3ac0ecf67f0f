"""Runs are started and resumed, and what cannot be begun says why and leaves nothing."""

import errno
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from depthmix.checkpoint import folder as disk
from depthmix.config import RunConfig, load_preset
from depthmix.data import default as default_data
from depthmix.data import shards
from depthmix.data.manifest import Manifest, read_manifest
from depthmix.data.shards import Corpus
from depthmix.data.tokenizer import train_tokenizer
from depthmix.runs.folder import RunDir
from depthmix.train import launch as launching
from depthmix.train.launch import Launch, check_tokenizer, launch
from depthmix.train.loop import Ending, Trainer
from depthmix.train.memory import check_memory
from depthmix.world import World
from text_runs import write_text_run
from tiny_runs import FIELDS, flip_byte, read_result, read_tree, write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("launch") / "data")


@pytest.fixture(scope="session")
def half(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps that was interrupted at the sixth; it has the checkpoints 4 and 6."""
    folder = tmp_path_factory.mktemp("half") / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 6)
        (outcome, _), _ = say(Launch(run=make_run(checkpoint_every=2), data=data, out=folder))
    assert (outcome.state, outcome.step) == ("interrupted", 6)
    assert list(disk.list_checkpoints(folder / "checkpoints")) == [4, 6]
    return folder


@pytest.fixture
def stopped(half: Path, tmp_path: Path) -> Path:
    return shutil.copytree(half, tmp_path / "stopped")


def make_run(**overrides: Any) -> RunConfig:
    given = {**FIELDS, "train.tensorboard": False, "train.steps": 10}
    for name, value in overrides.items():
        given[name if name == "vocab_size" else f"train.{name}"] = value
    return RunConfig.from_overrides(load_preset("tiny"), given)


def say(plan: Launch) -> tuple[tuple[Ending, RunDir], str]:
    """What a launch gives and prints."""
    printed = io.StringIO()
    console = Console(file=printed, width=80)
    return launch(plan._replace(device="cpu"), console), printed.getvalue()


def act_at(patch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Let something happen at the beginning of a step."""
    move = Trainer._move

    def act_and_move(self: Trainer, batch: Any) -> Any:
        if self.num_done + 1 == step:
            action()
        return move(self, batch)

    patch.setattr(Trainer, "_move", act_and_move)


def interrupt_at(patch: pytest.MonkeyPatch, step: int) -> None:
    act_at(patch, step, lambda: signal.raise_signal(signal.SIGTERM))


def fail_at(patch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    def fail() -> None:
        raise error

    act_at(patch, step, fail)


def test_a_run_from_start_to_end(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run[b]"
    (outcome, folder), printed = say(Launch(run=make_run(), data=data, out=out))
    assert (outcome.state, folder.path) == ("finished", out)
    lines = printed.splitlines()
    assert lines[0].startswith("15.1 K parameters, 10 steps of 2 x 16 tokens, ")
    assert str(data) in lines[0]
    # a name in brackets is no markup
    assert lines[0].endswith(f"; {out}")
    causal = f"{outcome.val['loss_topk']:.3f} (top-k), {outcome.val['loss_causal']:.3f} (causal)"
    assert lines[-1] == f"finished, validation loss {causal}: {out}"
    assert RunConfig.from_dict(folder.read_config()) == make_run()
    (start,) = folder.read_json("provenance.json")["starts"]
    assert (start["step"], start["seed"], start["device"]["kind"]) == (0, 0, "cpu")
    assert start["data"]["folder"] == str(data)


def test_a_name_of_its_own(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taken, free = Path("runs/tiny"), Path("runs/tiny-2")
    names = iter([taken, free])

    def name_run(name: str, when: datetime) -> Path:
        assert name == "tiny"
        # between the choice of a name and its use, another run takes it
        taken.mkdir(parents=True, exist_ok=True)
        return next(names)

    monkeypatch.setattr(launching, "name_run", name_run)
    (_, folder), _ = say(Launch(run=make_run(steps=1), name="tiny", data=data))
    assert folder.path == free
    assert os.listdir(taken) == []


def refuse(plan: Launch, told: str | None, error: type[BaseException] = ValueError) -> None:
    with pytest.raises(error, match=told):
        say(plan)


def test_a_failed_start_leaves_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    fine = Launch(run=make_run(), data=data, out=Path("runs/a/b"))
    refuse(fine._replace(run=make_run(vocab_size=60)), r"ids up to 63, .* add vocab_size=64")
    refuse(fine._replace(run=make_run(steps=None, flops=1)), "less than one step")
    refuse(fine._replace(run=make_run(batch_size=10**10)), r"needs more than .* of memory")
    refuse(fine._replace(run=make_run(wandb=True)), r"pip install 'depthmix\[wandb\]'")
    refuse(fine._replace(data=tmp_path), "is not a data folder")
    refuse(fine._replace(run=make_run(wandb=True), out=None), "W&B is not installed")
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 1, MemoryError())
        refuse(fine, None, MemoryError)
        fail_at(patch, 1, KeyboardInterrupt())
        refuse(fine, "^$", KeyboardInterrupt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDir, "add_start", lambda *_: os.rmdir("not there"))
        refuse(fine, None, OSError)
    assert os.listdir(tmp_path) == []
    assert say(fine)[0][0].state == "finished"


def test_earlier_files_in_the_folder_stay(data: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    before = read_tree(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 1, MemoryError())
        refuse(Launch(run=make_run(), data=data, out=tmp_path), None, MemoryError)
    assert read_tree(tmp_path) == before
    assert os.listdir(tmp_path) == ["notes"]


def test_folders_that_cannot_be_a_new_run(data: Path, tmp_path: Path, stopped: Path) -> None:
    (tmp_path / "file").write_text("mine")
    before = read_tree(tmp_path)
    plan = Launch(run=make_run(), data=data)
    refuse(plan._replace(out=tmp_path / "file"), "is a file: choose another --out")
    refuse(
        plan._replace(out=stopped),
        "already contains a run: resume it with 'depthmix train --resume",
    )
    refuse(plan._replace(out=tmp_path / "file" / "run"), "Not a directory", OSError)
    assert read_tree(tmp_path) == before


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("a defect"), "RuntimeError: a defect"),
        (ValueError("training diverged"), "training diverged"),
        (OSError(errno.ENOSPC, "No space left on device", "f"), "f: No space left on device"),
    ],
)
def test_a_failure_after_the_first_step_is_kept(
    data: Path, tmp_path: Path, error: Exception, reason: str
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 5, error)
        told = r"once that is fixed, resume with: depthmix train --resume .*run"
        told = told if isinstance(error, OSError) else str(error)
        refuse(Launch(run=make_run(), data=data, out=out), told, type(error))
    status = RunDir.open(out).read_json("status.json")
    assert (status["state"], status["reason"], status["step"]) == ("failed", reason, 4)
    say(Launch(resume=out))
    (_, folder), _ = say(Launch(run=make_run(), data=data, out=tmp_path / "whole"))
    assert read_result(out) == read_result(folder.path)


def test_a_second_ctrl_c_says_how_to_resume(data: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 3, KeyboardInterrupt())
        told = "to continue from the last checkpoint, resume with: depthmix train --resume "
        plan = Launch(run=make_run(), data=data, out=tmp_path / "my run")
        refuse(plan, f"{told}'{tmp_path}/my run'", KeyboardInterrupt)
    assert RunDir.open(tmp_path / "my run").read_json("status.json")["state"] == "interrupted"


def test_a_resumed_run_tells_its_starts(stopped: Path) -> None:
    (outcome, folder), printed = say(Launch(resume=stopped))
    assert outcome.state == "finished"
    assert "\nresuming at step 6\n" in printed
    starts = folder.read_json("provenance.json")["starts"]
    assert [start["step"] for start in starts] == [0, 6]
    before = read_tree(stopped)
    (outcome, _), printed = say(Launch(resume=stopped))
    assert (outcome.state, outcome.step) == ("finished", 10)
    assert printed == (f"{stopped} is already finished (10 steps); a larger --steps extends it\n")
    assert read_tree(stopped) == before


def test_a_finished_run_can_be_extended(data: Path, tmp_path: Path) -> None:
    # with these a step does not depend on the length of its run
    same = {"schedule": "constant", "warmup_share": 0.0, "val_every": 4}
    say(Launch(run=make_run(**same, steps=6), data=data, out=tmp_path / "run"))
    say(Launch(run=make_run(**same), data=data, out=tmp_path / "whole"))
    before = read_tree(tmp_path / "run")
    for budget in ({"train.steps": 6}, {"train.steps": 3}, {"train.tokens": 200}):
        refuse(
            Launch(resume=tmp_path / "run", budget=budget),
            r"has already done 6 steps, but .* allows",
        )
    assert read_tree(tmp_path / "run") == before
    (outcome, folder), printed = say(
        Launch(resume=tmp_path / "run", budget={"train.tokens": 10 * 2 * 16})
    )
    assert (outcome.state, outcome.step) == ("finished", 10)
    assert "10 steps of 2 x 16 tokens" in printed
    run = RunConfig.from_dict(folder.read_config())
    assert (run.train.steps, run.train.tokens) == (None, 320)
    found, expected = read_result(tmp_path / "run"), read_result(tmp_path / "whole")
    # its own last step has a line of metrics and a validation more
    found["metrics"] = [line for line in found["metrics"] if line["step"] != 6]
    expected["metrics"] = [line for line in expected["metrics"] if line["step"] != 6]
    assert len(found["metrics"]) == len(expected["metrics"]) > 2
    assert found == expected


def test_the_rate_of_an_extended_run_is_that_of_its_new_length(data: Path, tmp_path: Path) -> None:
    say(Launch(run=make_run(steps=6, log_every=1), data=data, out=tmp_path / "run"))
    say(Launch(resume=tmp_path / "run", budget={"train.steps": 12}))
    rates = [line["learning_rate"] for line in RunDir.open(tmp_path / "run").read_metrics("train")]
    recipe = make_run().train
    assert rates == [
        recipe.learning_rate * recipe.rate_at(i, 6 if i < 6 else 12) for i in range(12)
    ]


def test_capacities_that_fall_cannot_be_stretched(data: Path, tmp_path: Path) -> None:
    say(Launch(run=make_run(steps=4, start_capacity=1.0), data=data, out=tmp_path / "run"))
    plan = Launch(resume=tmp_path / "run", budget={"train.steps": 8})
    refuse(plan, r"fall over its whole length, so it cannot be extended: .* --from")


def test_a_run_and_its_resume_keep_the_tokenizer(data: Path, tmp_path: Path) -> None:
    """A run of an older release has none, and gets it when it goes on."""
    mine, out = shutil.copytree(data, tmp_path / "data"), tmp_path / "run"
    (mine / "tokenizer.json").write_text("{}")
    manifest = mine / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"tokenizer": null', '"tokenizer": "tokenizer.json"', 1)
    )
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 3)
        say(Launch(run=make_run(), data=mine, out=out))
    copy = out / "tokenizer.json"
    assert copy.read_text() == "{}"
    copy.unlink()
    provenance = RunDir.open(out).read_json("provenance.json")
    for name in ("tokenizer_hash", "end_token"):
        assert provenance["starts"][0]["data"].pop(name) is not None
    (out / "provenance.json").write_text(json.dumps(provenance))
    assert say(Launch(resume=out))[0][0].state == "finished"
    assert copy.read_text() == "{}"
    assert not list(out.glob("*.part"))


def test_damaged_files_of_a_run(half: Path, stopped: Path) -> None:
    # all that it says is found out again
    (stopped / "status.json").write_text("{")
    assert say(Launch(resume=stopped))[0][0].state == "finished"
    for text in ("", "[train]", "[model]\nwidth = 16", "[model"):
        (stopped / "config.toml").write_text(text)
        refuse(Launch(resume=stopped), r"config\.toml' is damaged")
    (stopped / "provenance.json").unlink()
    refuse(Launch(resume=stopped), "was stopped before it began: remove it")


def test_without_a_checkpoint_it_begins_again(half: Path, stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints")
    (outcome, _), printed = say(Launch(resume=stopped))
    assert outcome.state == "finished"
    assert "there is no checkpoint yet: starting from the beginning\n" in printed


def test_a_damaged_checkpoint_is_named_and_passed_over(half: Path, stopped: Path) -> None:
    whole = shutil.copytree(half, stopped.with_name("whole"))
    say(Launch(resume=whole))
    newest = stopped / "checkpoints" / disk.name_checkpoint(6)
    flip_byte(newest / "model.safetensors", 3000)
    _, printed = say(Launch(resume=stopped))
    assert f"{newest} is damaged: the content of model.safetensors has changed\n" in printed
    assert "\nresuming at step 4\n" in printed
    assert read_result(stopped) == read_result(whole)


def test_where_all_checkpoints_are_damaged_nothing_is_overwritten(stopped: Path) -> None:
    for path in disk.list_checkpoints(stopped / "checkpoints").values():
        (path / "optimizer.safetensors").unlink()
    before = read_tree(stopped)
    refuse(
        Launch(resume=stopped), r"no checkpoint in .* can be used \(.* is missing; .*remove them"
    )
    assert read_tree(stopped) == before


def test_data_must_not_have_changed(data: Path, stopped: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(data, tmp_path / "data")
    before = read_tree(stopped)
    other = write_data(tmp_path / "other", seed=1)
    refuse(
        Launch(resume=stopped, data=other),
        r"other is not the data that .*stopped was trained on: give",
    )
    flip_byte(mine / "val-00000.bin", 5)
    refuse(Launch(resume=stopped, data=mine), r"val-00000\.bin has changed .*sha256")
    os.truncate(mine / "train-00000.idx", 8)
    refuse(Launch(resume=stopped, data=mine), r"train-00000\.idx has 8 bytes, but the")
    refuse(Launch(resume=stopped, data=tmp_path / "none"), "there is no data folder")
    assert read_tree(stopped) == before
    moved = shutil.copytree(data, tmp_path / "moved")
    say(Launch(resume=stopped, data=moved))
    starts = RunDir.open(stopped).read_json("provenance.json")["starts"]
    assert [start["data"]["folder"] for start in starts] == [str(data), str(moved)]


def test_an_imported_run_is_started_from_and_not_resumed(data: Path, tmp_path: Path) -> None:
    # as `depthmix import` writes it: the folder is that of the model
    start = {"time": "", "data": {"folder": str(tmp_path), "hash": None}}
    folder = RunDir.create(tmp_path / "run", make_run().to_toml(), start)
    folder.write_status("finished", step=0, num_steps=0, loss=None, reason="imported")
    message = r"run' has not been trained yet: start with --from .*run"
    refuse(Launch(resume=folder.path), message)
    refuse(Launch(resume=folder.path, data=data), message)


def test_data_that_is_gone(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = shutil.copytree(data, tmp_path / "cache" / "data")
    run = tmp_path / "run"
    interrupt_at(monkeypatch, 3)
    say(Launch(run=make_run(), data=mine, out=run))
    shutil.rmtree(mine)
    refuse(Launch(resume=run), r"data in .* no longer there: restore it, .* with --data")
    # the default corpus is in a cache, which may be emptied, and is made again
    monkeypatch.setenv("DEPTHMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launching, "open_default", lambda vocab_size, progress: Corpus.open(data))
    assert say(Launch(resume=run))[0][0].state == "finished"


@pytest.mark.parametrize("default", [False, True])
def test_data_are_opened_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: bool
) -> None:
    monkeypatch.setattr(default_data, "find_cache", lambda: data.parent)
    monkeypatch.setattr(default_data, "name_default", lambda vocab_size: data.name)
    opened = []

    def count(folder: Path) -> Manifest:
        opened.append(folder)
        return read_manifest(folder)

    monkeypatch.setattr(shards, "read_manifest", count)
    where, run = None if default else data, tmp_path / "run"
    plan = Launch(run=make_run(steps=2), data=where, out=run, fit_vocabulary=not default)
    interrupt_at(monkeypatch, 1)
    assert say(plan)[0][0].state == "interrupted"
    assert opened == [data]
    assert say(Launch(resume=run))[0][0].state == "finished"
    assert opened == [data, data]


def test_advice_at_the_start(data: Path, tmp_path: Path) -> None:
    wide = load_preset("tiny", width=16, vocab_size=96, max_seq_len=1000)
    run = RunConfig.from_overrides(wide, {"train.steps": 1, "train.batch_size": 1})
    _, printed = say(Launch(run=run, data=data, out=tmp_path / "run"))
    assert "model has 96 ids and the data uses 64: vocab_size=64 would save compute\n" in printed
    assert "\nthe validation split is too short for one sequence: no validation\n" in printed


def test_memory_is_looked_at_first() -> None:
    world = World(0, 1, torch.device("cpu"))
    check_memory(make_run(), world)
    wide = load_preset("1b", num_layers=10**4)
    for model in (wide, load_preset("tiny", width=10**300)):
        with pytest.raises(ValueError, match=r"needs more than [0-9.]+ [A-Z]iB of memory and"):
            check_memory(RunConfig(model=model), world)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    run = write_text_run(tmp_path)
    corpus = Corpus.open(tmp_path / "data")
    check_tokenizer(run, corpus)
    check_tokenizer(tmp_path / "nowhere", corpus)
    # written otherwise, it is still the same
    text = (run / "tokenizer.json").read_text()
    (run / "tokenizer.json").write_text(text + "\n")
    check_tokenizer(run, corpus)
    train_tokenizer(["other words entirely"], 280, parallel=False).save(str(run / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"another tokenizer .* prepare it again with --tokenizer"):
        check_tokenizer(run, corpus)
