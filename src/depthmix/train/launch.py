"""From a command to a training and back: data, run folder, world, and what is said at the end.

Owns how a run is started and resumed. Knows nothing of steps.
"""

from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from depthmix import flops
from depthmix.checkpoint.ranks import Ranks
from depthmix.data.default import prepare_default
from depthmix.data.progress import show_progress
from depthmix.data.shards import Corpus
from depthmix.recipe import RunConfig
from depthmix.rundir import RunDir, collect_provenance, name_run
from depthmix.train.loop import Outcome, Trainer
from depthmix.train.parallel import World, open_world

# hashing this much takes a second or two; of more, only the sizes are compared
FULL_CHECK_BYTES = 2**30


class Plan(NamedTuple):
    """What a command asks for: a new run, or one to go on with."""

    run: RunConfig | None = None
    """A new run's configuration."""
    name: str = "run"
    """Names a new run's folder where `out` is empty."""
    data: Path | None = None
    """A prepared folder; empty means the default corpus, or the resumed run's own."""
    out: Path | None = None
    """A new run's folder."""
    resume: Path | None = None
    """The folder of a run to go on with."""
    device: str | None = None
    """cpu or cuda; empty means a GPU where there is one."""


def launch(plan: Plan, console: Console) -> tuple[Outcome, RunDir]:
    """Train, from the beginning or from the last checkpoint, in one process or under torchrun."""
    with open_world(plan.device) as world, ExitStack() as stack:
        ranks = Ranks()
        quiet = console if world.is_first else Console(quiet=True)
        old = None if plan.resume is None else RunDir.open(plan.resume)
        run = plan.run if old is None else RunConfig.from_dict(old.read_config())
        assert run is not None
        data = plan.data or _find_data(old)
        data = data or ranks.do_first(lambda: _prepare_default(quiet))
        corpus = ranks.do_first(lambda: _open_corpus(data, run, old))
        where = {"folder": str(corpus.folder.resolve()), "hash": corpus.manifest_hash}

        def describe_start(step: int) -> dict[str, Any]:
            device = _describe_device(world)
            return collect_provenance(seed=run.train.seed, data=where, device=device, step=step)

        def open_folder() -> Path:
            if old is not None:
                return old.path
            path = plan.out or name_run(plan.name, datetime.now())
            return RunDir.create(path, run.to_toml(), describe_start(0)).path

        folder = RunDir(ranks.do_first(open_folder))
        if world.is_first:
            stack.enter_context(folder.lock())
        try:
            trainer = Trainer(run, corpus, folder, world)
            _say_start(quiet, trainer)
            if old is not None:
                for sentence in trainer.resume():
                    quiet.print(sentence, highlight=False, soft_wrap=True)
            if old is not None and world.is_first:
                folder.truncate_metrics(trainer.start_step)
                folder.add_start(describe_start(trainer.start_step))
            return trainer.train(quiet), folder
        except Exception as error:
            if world.is_first:
                # a full disk must not hide what filled it
                with suppress(OSError):
                    _write_failure(folder, error)
            raise


def _prepare_default(console: Console) -> Path:
    with show_progress(console) as report:
        return prepare_default(progress=report)


def _find_data(old: RunDir | None) -> Path | None:
    """The data folder that a resumed run last used."""
    if old is None:
        return None
    starts = old.read_json("provenance.json").get("starts", [])
    return Path(starts[-1]["data"]["folder"]) if starts else None


def _open_corpus(folder: Path, run: RunConfig, old: RunDir | None) -> Corpus:
    corpus = Corpus.open(folder)
    shards = [s for split in corpus.manifest.splits.values() for s in split.shards]
    if sum((folder / s.file).stat().st_size for s in shards) <= FULL_CHECK_BYTES:
        corpus = Corpus.open(folder, verify="full")
    if corpus.vocab_size > run.model.vocab_size:
        raise ValueError(
            f"{folder} has ids up to {corpus.vocab_size - 1}, and the model's vocab_size is "
            f"{run.model.vocab_size}: add vocab_size={corpus.vocab_size}"
        )
    if old is not None:
        starts = old.read_json("provenance.json").get("starts", [])
        if starts and starts[-1]["data"]["hash"] != corpus.manifest_hash:
            raise ValueError(
                f"the data in {folder} is not what {old.path} was trained on: give the folder as "
                f"it was with --data, or start a new run"
            )
    return corpus


def _describe_device(world: World) -> dict[str, Any]:
    if world.device.type != "cuda":
        return {"kind": "cpu", "processes": world.size, "threads": torch.get_num_threads()}
    name = torch.cuda.get_device_name(world.device)
    return {"kind": "cuda", "processes": world.size, "name": name, "cuda": torch.version.cuda}


def _say_start(console: Console, trainer: Trainer) -> None:
    run, corpus = trainer.run, trainer.corpus
    tokens = trainer.num_steps * run.tokens_per_step
    train_tokens = corpus.split("train").num_tokens
    per_step = flops.training_flops(run.model, seq_len=run.seq_len, batch_size=run.train.batch_size)
    console.print(
        f"{flops.num_parameters(run.model).total / 1e6:.1f} M parameters, "
        f"{trainer.num_steps} steps of {run.train.batch_size} x {run.seq_len} tokens, "
        f"{trainer.num_steps * per_step:.2e} FLOPs; {corpus.folder}, "
        f"{tokens / train_tokens:.2f} epochs; {trainer.folder.path}",
        highlight=False,
        soft_wrap=True,
    )
    if run.model.vocab_size >= 1.5 * corpus.vocab_size:
        console.print(
            f"the model has room for {run.model.vocab_size} ids and the data uses "
            f"{corpus.vocab_size}: vocab_size={corpus.vocab_size} would save compute",
            highlight=False,
            soft_wrap=True,
        )
    if trainer.val_loader is None:
        console.print("the validation split is too short for one sequence: no validation")


def _write_failure(folder: RunDir, error: Exception) -> None:
    status = folder.read_json("status.json")
    step, num_steps = status.get("step", 0), status.get("num_steps", 0)
    reason = f"{type(error).__name__}: {error}"
    folder.write_status("failed", step=step, num_steps=num_steps, loss=None, reason=reason)
