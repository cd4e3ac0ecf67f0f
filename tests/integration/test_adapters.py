"""A run trains adapters, is stopped and resumed, and is opened as any other."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from depthmix.budget import make_schedule
from depthmix.checkpoint import folder as disk
from depthmix.checkpoint import load_weights
from depthmix.checkpoint.tensors import read_part
from depthmix.config import RunConfig, load_preset
from depthmix.data.shards import Corpus
from depthmix.models import open_model
from depthmix.runs.folder import RunDir
from depthmix.train.launch import Launch, launch
from depthmix.train.loop import Trainer
from depthmix.train.lora import PART, list_adapters
from depthmix.world import World
from tiny_runs import FIELDS, read_result, stop_at_step, write_data
from variants import make_tokens

LORA = {"train.trainable": "lora", "train.lora_rank": 4, "train.optimizer": "adamw"}
MATRICES = (
    *("attention.w_qk", "attention.w_value", "attention.w_out"),
    *("mlp.w_gate", "mlp.w_up", "mlp.w_out"),
)
QUIET = Console(quiet=True)
WORLD = World(0, 1, torch.device("cpu"))


def make_run(model: Any, **changes: Any) -> RunConfig:
    """Adapters, while the capacity falls, with a teacher and in micro-batches."""
    recipe = {n: v for n, v in FIELDS.items() if n.startswith("train.")}
    recipe |= {"train.tensorboard": False, "train.steps": 8, "train.checkpoint_every": 4, **LORA}
    recipe |= {
        "train.start_capacity": 1.0,
        "train.num_capacity_stages": 2,
        "train.num_micro_batches": 2,
    }
    return RunConfig.from_overrides(model, {**recipe, **changes})


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished dense run; its data is beside it."""
    folder = tmp_path_factory.mktemp("lora")
    fields = {**FIELDS, "routing.strategy": "none", "train.steps": 4, "train.tensorboard": False}
    run = RunConfig.from_overrides(load_preset("tiny"), {**fields, "num_layers": 4})
    plan = Launch(run=run, data=write_data(folder / "data"), out=folder / "dense", device="cpu")
    launch(plan, QUIET)
    return folder / "dense"


def plan_run(dense: Path, out: Path, **changes: Any) -> Launch:
    source = open_model(dense)
    routing = {"routing.strategy": "expert_choice", "routing.gate": "tanh1"}
    model = source.config.override({**routing, "routing.capacity": 0.25})
    run = make_run(model, **{"train.teacher": str(dense), **changes})
    data = dense.with_name("data")
    return Launch(run=run, data=data, out=out, device="cpu", start=source)


@pytest.fixture(scope="module")
def whole(dense: Path) -> Path:
    """A finished run with adapters."""
    launch(plan_run(dense, dense.with_name("whole")), QUIET)
    return dense.with_name("whole")


def read_adapters(run: Path, step: int = 8) -> dict[str, Tensor]:
    return read_part(run / "checkpoints" / disk.name_checkpoint(step), PART)


def test_only_adapted_matrices_change(dense: Path, whole: Path) -> None:
    before = load_weights(dense)
    changed = set()
    for name, value in load_weights(whole, which="newest").items():
        if ".decider." in name:
            continue
        known = before[name.replace(".block.", ".")]
        if torch.equal(value, known):
            assert ".block." not in name or "norm" in name, name
        else:
            changed.add(name.removesuffix(".weight"))
    assert changed == {f"layers.{i}.block.{m}" for i in (1, 3) for m in MATRICES}
    kept = read_adapters(whole)
    assert kept.keys() == {f"{path}.{part}" for path in changed for part in ("base", "down", "up")}
    weights = load_weights(whole, which="newest")
    for path in changed:
        base, down, up = (kept[f"{path}.{part}"] for part in ("base", "down", "up"))
        assert torch.equal(base, before[f"{path}.weight".replace(".block.", ".")])
        torch.testing.assert_close(weights[f"{path}.weight"], base + 2 * up @ down)
    lines = RunDir.open(whole).read_metrics("train")
    assert [line["capacity"] for line in lines] == [0.625, 0.25, 0.25]
    assert all(line["distill_loss"] > 0 for line in lines)


def test_it_begins_as_its_source(dense: Path, whole: Path) -> None:
    source = open_model(whole)
    run = make_run(source.config, **{"train.start_capacity": None})
    corpus = Corpus.open(dense.with_name("data"))
    trainer, model = Trainer(make_schedule(run), corpus, WORLD, start=source), source.network
    assert len(list_adapters(trainer.model)) == 12
    tokens = make_tokens(model.config, 2, 16)
    with torch.no_grad():
        assert torch.equal(trainer.model(tokens).logits, model(tokens).logits)


def test_readers_see_the_model_that_was_trained(dense: Path, whole: Path) -> None:
    config = RunConfig.from_dict(RunDir.open(whole).read_config())
    trainer = Trainer(make_schedule(config), Corpus.open(dense.with_name("data")), WORLD)
    trainer.open(RunDir.open(whole))
    trainer.resume()
    model = open_model(whole, checkpoint="newest").network
    tokens = make_tokens(model.config, 2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, trainer.model(tokens).logits)
    assert len(list_adapters(trainer.model)) == 12
    assert not list_adapters(model)


@pytest.mark.parametrize("step", [3, 6])
def test_a_stop_changes_nothing(
    dense: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with monkeypatch.context() as patch:
        stop_at_step(patch, step)
        outcome, _ = launch(plan_run(dense, tmp_path / "run"), QUIET)
    assert (outcome.state, outcome.step) == ("interrupted", step)
    launch(Launch(resume=tmp_path / "run", device="cpu"), QUIET)
    assert read_result(tmp_path / "run") == read_result(whole)
    assert_same(read_adapters(tmp_path / "run"), read_adapters(whole))


def test_activations_may_be_computed_twice(dense: Path, whole: Path, tmp_path: Path) -> None:
    launch(plan_run(dense, tmp_path / "run", **{"train.checkpoint_activations": True}), QUIET)
    assert_same(read_adapters(tmp_path / "run"), read_adapters(whole))


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_another_rank_cannot_resume(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / disk.name_checkpoint(8))
    RunDir.open(tmp_path / "run").write_status("running", step=4, num_steps=8, loss=None)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("lora_rank = 4", "lora_rank = 2"))
    with pytest.raises(ValueError, match=r"'layers.* resume with the configuration of the run"):
        launch(Launch(resume=tmp_path / "run", device="cpu"), QUIET)
