"""The loop trains, looks and saves in the right order, and goes on as if it had never stopped."""

import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from depthmix.budget import make_schedule
from depthmix.checkpoint import collect_rng
from depthmix.checkpoint import folder as disk
from depthmix.config import RunConfig, load_preset
from depthmix.data.loader import Loader
from depthmix.data.shards import Corpus
from depthmix.runs.folder import RunDir
from depthmix.train import loop, parallel
from depthmix.train.log import SilentLogger
from depthmix.train.loop import Ending, Trainer, move_batch
from depthmix.train.meter import Meter
from depthmix.train.step import StepLoss
from depthmix.world import World
from tiny_runs import FIELDS, flip_byte, read_metrics, read_result, write_data

WORLD = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("loop") / "data")


def make_run(**recipe: Any) -> RunConfig:
    given = {**FIELDS, "train.tensorboard": False, "train.steps": 10}
    given |= {f"train.{name}": value for name, value in recipe.items()}
    return RunConfig.from_overrides(load_preset("tiny"), given)


def make_trainer(run: RunConfig, data: Path, folder: Path, *, log_later: bool = False) -> Trainer:
    """A trainer in a new folder, or one that goes on in an old one."""
    trainer = Trainer(make_schedule(run), Corpus.open(data), WORLD)
    # as on a GPU
    trainer.log_later = log_later
    if not folder.exists():
        RunDir.create(folder, run.to_toml(), {})
        trainer.open(RunDir.open(folder))
        return trainer
    trainer.open(RunDir.open(folder))
    trainer.resume()
    trainer.folder.truncate_metrics(trainer.num_done)
    return trainer


def train(trainer: Trainer) -> Ending:
    return trainer.train(Console(quiet=True))


def do_at(trainer: Trainer, step: int, action: Callable[[], object]) -> None:
    """Let something happen in the midst of a step, after its update."""
    make_step = trainer.step

    def make_step_and_act(*batch: Any) -> StepLoss:
        result = make_step(*batch)
        if trainer.num_done + 1 == step:
            action()
        return result

    trainer.step = make_step_and_act  # pyrefly: ignore[bad-assignment]


def stop_at(trainer: Trainer, step: int, number: int = signal.SIGTERM) -> Ending:
    do_at(trainer, step, lambda: signal.raise_signal(number))
    return train(trainer)


def spy_order(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps, lines of metrics and saves, as they happen."""
    seen: list[str] = []
    append, save = trainer.folder.append_metrics, trainer.checkpoints.save
    for step in range(1, trainer.schedule.num_steps + 1):
        do_at(trainer, step, partial(seen.append, f"step {step}"))

    def append_and_tell(record: Any) -> None:
        seen.append(f"{record['kind']} {record['step']}")
        append(record)

    def save_and_tell(step: int, *args: Any, **options: Any) -> None:
        seen.append(f"save {step}")
        save(step, *args, **options)

    monkeypatch.setattr(RunDir, "append_metrics", lambda self, record: append_and_tell(record))
    monkeypatch.setattr(trainer.checkpoints, "save", save_and_tell)
    return seen


def test_lines_are_written_while_the_next_step_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = []
    for later in (False, True):
        run = make_run(log_every=2, val_every=4, checkpoint_every=6, num_kept_checkpoints=9)
        trainer = make_trainer(run, data, tmp_path / str(later), log_later=later)
        with monkeypatch.context() as patched:
            seen = spy_order(trainer, patched)
            train(trainer)
        orders.append([what for what in seen if not what.startswith("router")])
    at_once = "step 1, step 2, train 2, step 3, step 4, train 4, val 4, step 5, step 6, train 6, "
    rest = "save 6, step 7, step 8, train 8, val 8, step 9, step 10, train 10, val 10, save 10"
    assert orders[0] == (at_once + rest).split(", ")
    # but before anything is looked at or saved
    later = at_once.replace("train 2, step 3", "step 3, train 2") + rest
    assert orders[1] == later.split(", ")
    # not a number differs
    assert read_result(tmp_path / "True") == read_result(tmp_path / "False")


def fail_by(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_error_does_not_swallow_the_line_before(
    data: Path, tmp_path: Path, error: BaseException
) -> None:
    trainer = make_trainer(make_run(), data, tmp_path / "run", log_later=True)
    do_at(trainer, 4, fail_by(error))
    with pytest.raises(type(error)):
        train(trainer)
    records = read_metrics(tmp_path / "run")
    assert [(r["step"], r["kind"]) for r in records] == [(3, "train")]
    assert trainer.loss == records[0]["loss"]


def test_a_step_that_fails_after_the_training_diverged(data: Path, tmp_path: Path) -> None:
    """What went wrong first is what there is to say."""
    trainer = make_trainer(make_run(), data, tmp_path / "run", log_later=True)
    do_at(trainer, 2, poison(trainer, math.nan))
    do_at(trainer, 4, fail_by(RuntimeError("broken too")))
    with pytest.raises(ValueError, match=r"training diverged: .* by step 3"):
        train(trainer)


BIAS = {"routing.strategy": "token_choice", "routing.bias_rate": 0.5}


@pytest.mark.parametrize(
    ("optimizer", "routing", "log_later"),
    [
        ("adamw", {}, False),
        ("muon", {}, True),
        ("adamw", {"routing.strategy": "stochastic"}, True),
        ("muon", {"routing.strategy": "stochastic"}, False),
        ("muon", BIAS, False),
    ],
)
def test_ten_steps_are_five_and_five(
    data: Path, tmp_path: Path, optimizer: str, routing: dict[str, Any], log_later: bool
) -> None:
    run = make_run(optimizer=optimizer).override(routing)
    outcome = train(make_trainer(run, data, tmp_path / "whole"))
    assert (outcome.state, outcome.step, outcome.signal) == ("finished", 10, None)
    # the fifth step lies between two lines of metrics, and between two validations
    stopped = stop_at(make_trainer(run, data, tmp_path / "parts", log_later=log_later), 5)
    assert (stopped.state, stopped.step, stopped.num_steps) == ("interrupted", 5, 10)
    assert stopped.signal == signal.SIGTERM
    resumed = make_trainer(run, data, tmp_path / "parts", log_later=log_later)
    assert resumed.num_done == 5
    assert train(resumed) == outcome
    assert read_result(tmp_path / "parts") == read_result(tmp_path / "whole")


def test_state_of_another_optimiser_is_refused(data: Path, tmp_path: Path) -> None:
    """Stacks of experts were once trained by AdamW where Muon trains them now."""
    stop_at(make_trainer(make_run(optimizer="adamw"), data, tmp_path / "run"), 5)
    with pytest.raises(ValueError, match=r"AdamW's state .* that Muon trains now"):
        make_trainer(make_run(optimizer="muon"), data, tmp_path / "run")


def spy_rates(trainer: Trainer) -> list[list[float]]:
    """Every group's learning rate over its scale, as each step's update has it."""
    seen: list[list[float]] = []
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for step in range(1, trainer.schedule.num_steps + 1):
        do_at(trainer, step, lambda: seen.append([float(g["lr"]) / g["scale"] for g in groups]))
    return seen


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_step_has_its_own_learning_rate(data: Path, tmp_path: Path, optimizer: str) -> None:
    """The first step the first rate, the last one the last, and no other after a stop."""
    shape = {"schedule": "wsd", "warmup_share": 0.4, "decay_share": 0.3, "final_rate_share": 0.0}
    run = make_run(optimizer=optimizer, log_every=1, learning_rate=0.01, **shape)
    shares = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 2 / 3, 1 / 3, 0]
    expected = [0.01 * share for share in shares]
    trainer = make_trainer(run, data, tmp_path / "run")
    rates = spy_rates(trainer)
    stop_at(trainer, 6)
    resumed = make_trainer(run, data, tmp_path / "run")
    more = spy_rates(resumed)
    train(resumed)
    assert (len(rates), len(more)) == (6, 4)
    for found, rate in zip([*rates, *more], expected, strict=True):
        assert found == pytest.approx([rate] * len(found), rel=1e-6)
    lines = RunDir.open(tmp_path / "run").read_metrics("train")
    assert [line["learning_rate"] for line in lines] == pytest.approx(expected, rel=1e-6)


def script_validations(monkeypatch: pytest.MonkeyPatch, losses: list[dict[str, float]]) -> None:
    """Let the validations of a training find these losses, one after the other."""
    coming = iter(losses)

    def validate(root: Any, config: Any, batches: Any, precision: Any) -> tuple[Any, list[Any]]:
        means = {name: torch.tensor(value).double() for name, value in next(coming).items()}
        return means, [torch.zeros(1) for _ in config.routed_layers]

    monkeypatch.setattr(loop, "validate", validate)


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        # what a model is at when it writes counts, where that is known
        ({"loss_topk": [4.0, 3.0, 2.0, 1.0], "loss_causal": [6.0, 5.0, 7.0, 8.0]}, 4),
        ({"loss_topk": [1.0, 2.0, 3.0, 4.0], "loss_causal": [8.0, 7.0, 5.0, 6.0]}, 6),
        ({"loss_topk": [4.0, 1.0, 2.0, 3.0]}, 4),
        ({"loss": [2.0, 3.0, 1.0, 4.0]}, 6),
    ],
)
def test_the_best_checkpoint_is_by_the_causal_loss(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: dict[str, list[float]],
    best: int,
) -> None:
    records = [
        dict(zip(losses, found, strict=True)) for found in zip(*losses.values(), strict=True)
    ]
    script_validations(monkeypatch, records)
    run = make_run(steps=8, val_every=2, checkpoint_every=2, num_kept_checkpoints=1)
    outcome = train(make_trainer(run, data, tmp_path / "run"))
    assert outcome.val.items() >= records[-1].items()
    folder = tmp_path / "run" / "checkpoints"
    assert disk.find_best(folder) == best
    # of all others only the last is kept
    kept = disk.list_checkpoints(folder)
    assert list(kept) == [best, 8]
    # the last one by the same measure
    measure = "loss_causal" if "loss_causal" in losses else next(iter(losses))
    scores = {step: disk.read_state(path)["score"] for step, path in kept.items()}
    assert scores == {step: losses[measure][step // 2 - 1] for step in (best, 8)}


def make_random_run(**recipe: Any) -> RunConfig:
    """A run in which every step and every validation draws who is kept."""
    run = make_run(**recipe)
    model = run.model.override({"routing.strategy": "stochastic"})
    return RunConfig.from_dict({**run.to_dict(), "model": model.to_dict()})


def collect_drawn() -> dict[str, Any]:
    # checks of types at run time draw from Python's own; the training does not
    return {name: state for name, state in collect_rng().items() if name != "python"}


def test_validation_leaves_random_numbers_as_they_were(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_random_run(), data, tmp_path / "run")
    # not where a seed puts them
    torch.rand(7)
    before = collect_drawn()
    first = trainer._validate(SilentLogger(), 1)
    assert collect_drawn() == before
    # it did draw, and whenever it looks it draws the same
    drawn = torch.rand(3)
    assert collect_drawn() != before
    assert trainer._validate(SilentLogger(), 2) == first
    assert not torch.equal(torch.rand(3), drawn)


def test_looking_often_does_not_change_the_training(data: Path, tmp_path: Path) -> None:
    results = []
    for name, every in (("often", 1), ("once", 99)):
        run = make_random_run(val_every=every, log_every=1)
        train(make_trainer(run, data, tmp_path / name))
        result = read_result(tmp_path / name)
        result["metrics"] = [r for r in result["metrics"] if r["kind"] == "train"]
        results.append(result)
    assert len(results[0]["metrics"]) == 10
    # weights, moments, losses and random numbers; also the last validation
    assert results[0] == results[1]


def test_a_stop_after_the_last_save_is_made_up_for(data: Path, tmp_path: Path) -> None:
    """Killed when all was saved, but before that could be said."""
    run = make_run()
    outcome = train(make_trainer(run, data, tmp_path / "run"))
    before = read_result(tmp_path / "run")
    (tmp_path / "run" / "status.json").unlink()
    assert train(make_trainer(run, data, tmp_path / "run")) == outcome
    assert read_result(tmp_path / "run") == before


def test_records_are_written_at_their_steps(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_run(batch_size=64), data, tmp_path / "run")
    outcome = train(trainer)
    records = read_metrics(tmp_path / "run")
    assert [r["step"] for r in records if r["kind"] == "train"] == [3, 6, 9, 10]
    assert [r["step"] for r in records if r["kind"] == "val"] == [7, 10]
    assert {r["step"] for r in records if r["kind"] == "router"} == {7, 10}
    lines = [r for r in records if r["kind"] == "train"]
    rows = trainer.loader.num_rows_per_epoch
    # batches are read ahead, and must not count before they are trained on
    assert [line["epoch"] for line in lines] == [64 * line["step"] // rows for line in lines]
    assert lines[-1]["epoch"] > 0
    assert lines[0]["perplexity"] == math.exp(lines[0]["loss"])
    last_val = [r for r in records if r["kind"] == "val"][-1]
    assert outcome.val == {n: v for n, v in last_val.items() if n not in ("step", "kind")}
    status = trainer.folder.read_json("status.json")
    assert (status["state"], status["step"], status["loss"]) == ("finished", 10, lines[-1]["loss"])


def test_a_mean_over_steps_survives_a_stop(data: Path, tmp_path: Path) -> None:
    meters = [Meter(make_schedule(make_run()), WORLD) for _ in range(2)]
    trainer = make_trainer(make_run(), data, tmp_path / "run")
    results = [trainer.step(*trainer._move(trainer.loader.next())) for _ in range(3)]
    assert Meter(make_schedule(make_run()), WORLD).state_dict() == {}
    for result in results:
        meters[0].add(result)
    for result in results[:2]:
        meters[1].add(result)
    resumed = Meter(make_schedule(make_run()), WORLD)
    resumed.load_state_dict(meters[1].state_dict())
    assert resumed.peek() == meters[1].peek()
    resumed.add(results[2])
    assert resumed.peek() == meters[0].peek() != meters[1].peek()


def test_checkpoints_by_the_clock(data: Path, tmp_path: Path) -> None:
    run = make_run(steps=3, checkpoint_minutes=0, num_kept_checkpoints=9)
    train(make_trainer(run, data, tmp_path / "often"))
    assert list(disk.list_checkpoints(tmp_path / "often" / "checkpoints")) == [1, 2, 3]
    run = make_run(steps=3, num_kept_checkpoints=9)
    train(make_trainer(run, data, tmp_path / "seldom"))
    assert list(disk.list_checkpoints(tmp_path / "seldom" / "checkpoints")) == [3]


def poison(trainer: Trainer, value: float) -> Callable[[], None]:
    def spoil() -> None:
        with torch.no_grad():
            trainer.model.embedding.weight[0, 0] = value

    return spoil


@pytest.mark.parametrize("log_later", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        # seen in the weights at the step itself, in the losses' mean only later
        ({"checkpoint_every": 2}, "weights not finite by step 4"),
        ({"checkpoint_every": 5, "log_every": 9}, "total_loss and grad_norm .* by step 5"),
        ({"checkpoint_every": 6}, "total_loss and grad_norm .* by step 6"),
        ({}, "total_loss and grad_norm .* by step 6"),
    ],
)
def test_weights_that_are_not_finite_are_never_saved(
    data: Path,
    tmp_path: Path,
    recipe: dict[str, Any],
    sentence: str,
    value: float,
    log_later: bool,
) -> None:
    run = make_run(**recipe, num_kept_checkpoints=9)
    trainer = make_trainer(run, data, tmp_path / "run", log_later=log_later)
    do_at(trainer, 4, poison(trainer, value))
    with pytest.raises(ValueError, match=f"training diverged: {sentence}; .*learning_rate"):
        train(trainer)
    trainer.checkpoints.wait()
    found = disk.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert list(found) == ([2] if recipe.get("checkpoint_every") == 2 else [])
    for path in found.values():
        tensors = [*load_file(path / "model.safetensors").values()]
        tensors += load_file(path / "optimizer.safetensors").values()
        assert all(tensor.isfinite().all() for tensor in tensors)


def test_a_rate_beyond_reason(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_run(learning_rate=1e30), data, tmp_path / "run")
    with pytest.raises(ValueError, match=r"training diverged: .* by step 3"):
        train(trainer)
    assert disk.list_checkpoints(tmp_path / "run" / "checkpoints") == {}


def test_no_validation_without_enough_to_validate_on(data: Path, tmp_path: Path) -> None:
    corpus = Corpus.open(data)
    trainer = Trainer(make_schedule(make_run()), corpus, WORLD)
    assert trainer.val_loader is not None
    num_tokens = corpus.split("val").num_tokens
    long = load_preset("tiny", vocab_size=64, width=16, max_seq_len=num_tokens)
    run = RunConfig.from_overrides(long, {"train.steps": 1, "train.batch_size": 1})
    trainer = make_trainer(run, data, tmp_path / "run")
    assert trainer.val_loader is None
    assert train(trainer).val == {}
    assert {r["kind"] for r in read_metrics(tmp_path / "run")} == {"train"}


def copy_data(data: Path, to: Path) -> Path:
    to.mkdir()
    for path in data.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_shard_that_is_cut_short_in_place(data: Path, tmp_path: Path) -> None:
    mine = copy_data(data, tmp_path / "data")
    trainer = make_trainer(make_run(), mine, tmp_path / "run")
    os.truncate(mine / "train-00000.bin", 100)
    with pytest.raises(ValueError, match=r"train-00000\.bin was cut short while it was in use"):
        train(trainer)


def test_a_shard_that_changes_is_noticed_before_a_save(data: Path, tmp_path: Path) -> None:
    mine = copy_data(data, tmp_path / "data")
    trainer = make_trainer(make_run(checkpoint_every=2), mine, tmp_path / "run")
    shard = mine / "train-00000.bin"
    # touched only, it is still the same
    do_at(trainer, 2, lambda: os.utime(shard))
    do_at(trainer, 5, lambda: flip_byte(shard, 7))
    with pytest.raises(ValueError, match=r"train-00000\.bin has changed"):
        train(trainer)
    trainer.checkpoints.wait()
    assert list(disk.list_checkpoints(tmp_path / "run" / "checkpoints")) == [2, 4]


def test_a_failure_in_the_background_is_raised(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_run(steps=90, checkpoint_every=30), data, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").rmdir()
    with pytest.raises(OSError, match=r"could not be written .*No such file"):
        train(trainer)
    # not as late as the next save
    assert 30 <= trainer.num_done < 60


def test_sizes_that_processes_cannot_share_are_refused(data: Path) -> None:
    several = World(0, 2, torch.device("cpu"))
    adapted = make_schedule(make_run(trainable="lora", optimizer="adamw"))
    with pytest.raises(
        ValueError, match=r"whole matrices, which cannot be sharded over 2 processes"
    ):
        Trainer(adapted, Corpus.open(data), several)
    shared = (
        r"6 cannot be divided among 2 processes x train\.num_micro_batches=2: use a multiple of 4"
    )
    with pytest.raises(ValueError, match=shared):
        Trainer(
            make_schedule(make_run(batch_size=6, num_micro_batches=2)), Corpus.open(data), several
        )
    with pytest.raises(ValueError, match=r"train\.cuda_graph = true needs a GPU"):
        Trainer(make_schedule(make_run(cuda_graph=True)), Corpus.open(data), WORLD)


@pytest.mark.compile
@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
def test_what_is_compiled(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    compiled: list[torch.nn.Module] = []

    def spy(module: torch.nn.Module, **_: Any) -> torch.nn.Module:
        compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", spy)
    monkeypatch.setattr(torch.nn.Module, "compile", spy)
    trainer = make_trainer(make_run(compile=True, compile_blocks=blocks), data, tmp_path / "run")
    assert compiled == (list(trainer.model.layers) if blocks else [trainer.root])


@pytest.mark.compile
def test_compiled_blocks_learn_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all of compiling but the kernels, of which training and a validation by two rules need dozens
    traced = partial(parallel.compile_layers, backend="aot_eager")
    monkeypatch.setattr(parallel, "compile_layers", traced)
    torch._dynamo.reset()
    for name, recipe in (("eager", {}), ("blocks", {"compile": True, "compile_blocks": True})):
        train(make_trainer(make_run(steps=3, log_every=1, **recipe), data, tmp_path / name))
    losses = [
        [record["loss"] for record in RunDir.open(tmp_path / name).read_metrics("train")]
        for name in ("eager", "blocks")
    ]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_documents_are_passed_if_they_are_masked(data: Path) -> None:
    batch = Loader(Corpus.open(data).split("val"), seq_len=16, batch_size=2, seed=0).next()
    tokens, targets, documents = move_batch(batch, torch.device("cpu"), document_mask=True)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert documents is not None
    assert documents.tolist() == batch.documents.tolist()
    assert move_batch(batch, torch.device("cpu"), document_mask=False)[2] is None
