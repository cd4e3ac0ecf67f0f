"""Start or resume a run: its data, folder and processes, and the closing message.

A start that fails leaves nothing behind.
"""

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from depthmix import flops
from depthmix.budget import make_schedule
from depthmix.config import RunConfig
from depthmix.data.default import find_cache, open_default
from depthmix.data.prepare import DEFAULT_VOCAB_SIZE, show_progress
from depthmix.data.shards import Corpus
from depthmix.data.tokenizer import SMALLEST_VOCABULARY, TOKENIZER_FILE, load_tokenizer
from depthmix.files import replace_file
from depthmix.models import StoredModel, open_model
from depthmix.models.chat import write_chat
from depthmix.progress import READER_GONE, say
from depthmix.runs.folder import RunDir, State, collect_provenance, name_run
from depthmix.train.loop import Ending, Trainer
from depthmix.train.memory import check_memory
from depthmix.train.plan import Launch
from depthmix.units import format_count, format_number, format_power
from depthmix.world import World, open_world


def launch(plan: Launch, console: Console) -> tuple[Ending, RunDir]:
    """Train, from the beginning or from the last checkpoint, in one process or under torchrun.

    Prints how it ended and, if it is not finished, how to resume. A second Ctrl-C stops at once and
    raises `KeyboardInterrupt` after that message.
    """
    with open_world(plan.device) as world:
        quiet = console if world.is_first else Console(quiet=True)
        if plan.resume is None:
            return _start(plan, world, quiet)
        return _resume(plan, plan.resume, world, quiet)


def _start(plan: Launch, world: World, console: Console) -> tuple[Ending, RunDir]:
    run = plan.run
    assert run is not None
    # check first, before data is prepared and a model is built
    if plan.out is not None:
        RunDir(plan.out).check_free(can_resume=True)
    corpus = None if plan.data is None else _open_data(plan.data, world)
    if plan.fit_vocabulary:
        vocab_size = DEFAULT_VOCAB_SIZE if corpus is None else corpus.vocab_size
        run = run.override({"vocab_size": vocab_size})
    check_memory(run, world)
    schedule = make_schedule(run)
    teacher = _open_teacher(run)
    corpus = corpus or world.do_first(lambda: _open_default(console, run))
    _check_vocabulary(corpus, run)
    if plan.start is not None:
        check_tokenizer(plan.start.home, corpus)
    trainer = Trainer(schedule, corpus, world, start=plan.start, teacher=teacher)
    made = world.do_first(lambda: _create_folder(plan, trainer))
    folder = RunDir(made.path)
    with _lock(folder, world):
        try:
            trainer.open(folder)
            _say_start(console, trainer)
            return _train(trainer, console), folder
        except BaseException:
            if world.is_first and trainer.num_done == 0:
                made.undo()
            raise


def _resume(plan: Launch, path: Path, world: World, console: Console) -> tuple[Ending, RunDir]:
    folder = RunDir.open(path)
    starts = folder.read_starts()
    if not starts:
        raise ValueError(f"'{path}' was stopped before it began: remove it, and start it again")
    if starts[-1]["data"].get("hash") is None:
        # upcycled or imported
        raise ValueError(f"'{path}' has not been trained yet: start with --from {path}")
    config = folder.read_config()
    if not config.keys() >= {"model", "train"}:
        raise ValueError(f"'{path / 'config.toml'}' is damaged: restore a copy of it")
    run = RunConfig.from_dict(config).override(plan.budget)
    status, schedule = {}, make_schedule(run)
    num_steps = schedule.num_steps
    if plan.budget and run.train.start_capacity is not None:
        raise ValueError(
            f"the capacities of '{path}' fall over its whole length, so it cannot be extended: "
            f"start a new run with --from {path}"
        )
    # already finished
    with suppress(ValueError):
        status = folder.read_json("status.json")
    if status.get("state") == "finished" and status["step"] >= num_steps:
        _check_longer(plan, status["step"], num_steps)
        say(
            console,
            f"{path} is already finished ({format_count(num_steps, 'step')}); "
            f"a larger --steps extends it",
        )
        return Ending("finished", status["step"], num_steps, {}, None), folder
    with _lock(folder, world):
        check_memory(run, world)
        teacher = _open_teacher(run)
        where = plan.data or _find_data(starts[-1]["data"])
        corpus = (
            world.do_first(lambda: _open_default(console, run))
            if where is None
            else _open_data(where, world)
        )
        _check_vocabulary(corpus, run)
        if corpus.manifest_hash != starts[-1]["data"]["hash"]:
            raise ValueError(
                f"the data in {corpus.folder} is not the data that {path} was trained on: give the "
                f"original folder with --data, or start a new run"
            )
        trainer = Trainer(schedule, corpus, world, teacher=teacher)
        trainer.open(folder)
        _say_start(console, trainer)
        for sentence in trainer.resume():
            say(console, sentence)
        _check_longer(plan, trainer.num_done, num_steps)
        if world.is_first:
            if plan.budget:
                replace_file(folder.path / "config.toml", run.to_toml())
            folder.truncate_metrics(trainer.num_done)
            folder.add_start(_describe_start(trainer))
            corpus.copy_tokenizer(folder.path)
        return _train(trainer, console), folder


def _check_longer(plan: Launch, num_done: int, num_steps: int) -> None:
    """Refuse a new budget that a run has already used up."""
    if plan.budget and num_steps <= num_done:
        raise ValueError(
            f"'{plan.resume}' has already done {format_count(num_done, 'step')}, but this budget "
            f"allows {num_steps}: give a larger one to extend it"
        )


def _open_teacher(run: RunConfig) -> StoredModel | None:
    return None if run.train.teacher is None else open_model(run.train.teacher)


def _train(trainer: Trainer, console: Console) -> Ending:
    """Train; record how it ended in the run's folder, and print how to resume."""
    path = trainer.folder.path
    resume = f"resume with: depthmix train --resume {shlex.quote(str(path))}"
    try:
        outcome = trainer.train(console)
    except KeyboardInterrupt as stopped:
        _write_end(trainer, "interrupted", "stopped at once by a second Ctrl-C")
        message = (
            f"stopped at once; to continue from the last checkpoint, {resume}"
            if trainer.num_done
            else ""
        )
        raise KeyboardInterrupt(message) from stopped
    except OSError as error:
        reason = error.strerror or str(error)
        _write_end(trainer, "failed", f"{error.filename}: {reason}" if error.filename else reason)
        if trainer.num_done == 0:
            raise
        reason += f"; once that is fixed, {resume}"
        raise OSError(error.errno, reason, error.filename) from error
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        _write_end(trainer, "failed", f"{kind}{error}")
        raise
    if outcome.state == "finished":
        say(console, f"finished{outcome.describe_val()}: {path}")
    elif trainer.world.is_first:
        with suppress(*READER_GONE):
            message = f"stopped at step {outcome.step} of {outcome.num_steps}, saved; {resume}"
            print(message, file=sys.stderr, flush=True)
    return outcome


class _Made(NamedTuple):
    """A new run's folder, and what was there before it."""

    path: Path
    entries: frozenset[Path]
    """The earlier contents of the folder."""
    missing: tuple[Path, ...]
    """The parts of the path that did not exist, the folder itself first."""

    def undo(self) -> None:
        for entry in set(self.path.glob("*")) - self.entries:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for folder in self.missing:
            # another process may have created something there
            with suppress(OSError):
                folder.rmdir()


def _create_folder(plan: Launch, trainer: Trainer) -> _Made:
    config, start = trainer.run.to_toml(), _describe_start(trainer, plan.start)
    chat = None if plan.start is None else plan.start.chat
    while True:
        path = plan.out or name_run(plan.name, datetime.now())
        missing = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        made = _Made(path, frozenset(path.glob("*")), missing)
        try:
            # if two runs start in the same second, one takes another name
            if plan.out is None:
                path.mkdir(parents=True)
            RunDir.create(path, config, start)
            trainer.corpus.copy_tokenizer(path)
            if chat is not None:
                write_chat(path, chat)
            return made
        except FileExistsError:
            continue
        except OSError:
            made.undo()
            raise


@contextmanager
def _lock(folder: RunDir, world: World) -> Iterator[None]:
    with ExitStack() as stack:
        world.do_first(lambda: stack.enter_context(folder.lock()))
        yield


def _open_data(folder: Path, world: World) -> Corpus:
    return world.do_first(lambda: Corpus.open(folder, verify="auto"))


def _check_vocabulary(corpus: Corpus, run: RunConfig) -> None:
    if corpus.vocab_size > run.model.vocab_size:
        raise ValueError(
            f"{corpus.folder} has ids up to {corpus.vocab_size - 1}, but the model's vocab_size is "
            f"{run.model.vocab_size}: add vocab_size={corpus.vocab_size}"
        )


def check_tokenizer(source: Path, corpus: Corpus) -> None:
    """Refuse data made with another tokenizer than that of the initial weights."""
    name = corpus.manifest.tokenizer
    if name is None or not (source / TOKENIZER_FILE).is_file():
        return
    if (source / TOKENIZER_FILE).read_bytes() == (corpus.folder / name).read_bytes():
        return
    ours, theirs = (load_tokenizer(p).get_vocab() for p in (corpus.folder / name, source))
    if ours != theirs:
        raise ValueError(
            f"the data in {corpus.folder} was prepared with another tokenizer than {source}'s: "
            f"prepare it again with --tokenizer {source}"
        )


def _open_default(console: Console, run: RunConfig) -> Corpus:
    """The default corpus, with a vocabulary that fits a small model."""
    room = run.model.vocab_size
    small = SMALLEST_VOCABULARY <= room < DEFAULT_VOCAB_SIZE
    with show_progress(console) as report:
        return open_default(room if small else DEFAULT_VOCAB_SIZE, progress=report)


def _find_data(used: dict[str, Any]) -> Path | None:
    """The data folder that a resumed run last used; None for the default corpus."""
    folder = Path(used["folder"])
    if folder.exists():
        return folder
    if folder.parent == find_cache().resolve():
        return None
    raise ValueError(
        f"the run's data in {folder} is no longer there: restore it, or name its new folder "
        f"with --data"
    )


def _describe_start(trainer: Trainer, source: StoredModel | None = None) -> dict[str, Any]:
    world, data = trainer.world, trainer.corpus.describe_origin()
    device: dict[str, Any] = {"kind": world.device.type, "processes": world.size}
    if world.device.type == "cuda":
        device |= {"name": torch.cuda.get_device_name(world.device), "cuda": torch.version.cuda}
    else:
        device["threads"] = torch.get_num_threads()
    seed = trainer.run.train.seed
    known = collect_provenance(seed=seed, data=data, device=device, step=trainer.num_done)
    return known if source is None else {**known, "from": str(source.path.resolve())}


def _say_start(console: Console, trainer: Trainer) -> None:
    run, corpus = trainer.run, trainer.corpus
    learning = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    # with frozen parts, also print how many are trained
    note = "" if run.train.trainable == "all" else f" ({format_number(learning)} trained)"
    num_steps = trainer.schedule.num_steps
    num_epochs = num_steps * run.tokens_per_step / trainer.loader.split.num_tokens
    cost = f"{format_power(trainer.schedule.flops)} {run.train.flops_convention} FLOPs"
    say(
        console,
        f"{format_number(flops.num_parameters(run.model).total)} parameters{note}, "
        f"{format_count(num_steps, 'step')} of {run.train.batch_size} x {run.seq_len} tokens, "
        f"{cost}; {corpus.folder}, {num_epochs:.2f} epochs; {trainer.folder.path}",
    )
    if trainer.started:
        say(console, trainer.started)
    elif run.model.vocab_size >= 1.5 * corpus.vocab_size:
        say(
            console,
            f"the model has {run.model.vocab_size} ids and the data uses "
            f"{corpus.vocab_size}: vocab_size={corpus.vocab_size} would save compute",
        )
    if trainer.val_loader is None:
        say(console, "the validation split is too short for one sequence: no validation")


def _write_end(trainer: Trainer, state: State, reason: str) -> None:
    # on a full disk, keep the original error
    with suppress(OSError):
        trainer.write_status(state, reason)
