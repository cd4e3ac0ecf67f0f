"""A run begins with the weights of another model, or with some of it frozen."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from depthmix import flops
from depthmix.checkpoint.weights import load_weights
from depthmix.config import RunConfig, load_preset
from depthmix.data.shards import Corpus
from depthmix.data.tokenizer import train_tokenizer
from depthmix.models import StoredModel, open_model
from depthmix.nn import Transformer
from depthmix.runs.folder import RunDir
from depthmix.train.launch import Launch, launch
from depthmix.train.optim import make_optimizers
from depthmix.train.start import check_memory, check_tokenizer, freeze, load_start
from depthmix.world import World
from text_runs import write_text_run
from tiny_runs import FIELDS, write_data
from variants import make_config


def make_run(**changes: Any) -> RunConfig:
    fixed = {"train.tensorboard": False, "train.steps": 4, **changes}
    return RunConfig.from_overrides(load_preset("tiny"), {**FIELDS, **fixed})


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished dense run; its data is beside it."""
    folder = tmp_path_factory.mktemp("start")
    run = make_run(**{"routing.strategy": "none"})
    plan = Launch(run=run, data=write_data(folder / "data"), out=folder / "run", device="cpu")
    launch(plan, Console(quiet=True))
    return folder / "run"


def start(first: Path, out: Path, **changes: Any) -> Path:
    source = open_model(first)
    run = RunConfig(model=source.config, train=make_run().train)
    recipe = {n: v for n, v in changes.items() if n.startswith("train.")}
    model = run.model.override({n: v for n, v in changes.items() if n not in recipe})
    run = RunConfig.from_overrides(model, {"train.tensorboard": False, **FIELDS_TRAIN, **recipe})
    data = first.with_name("data")
    plan = Launch(run=run, data=data, out=out, device="cpu", start=source)
    launch(plan, Console(quiet=True))
    return out


FIELDS_TRAIN = {n: v for n, v in FIELDS.items() if n.startswith("train.")} | {"train.steps": 4}


def test_a_run_begins_where_another_ended(first: Path, tmp_path: Path) -> None:
    out = start(first, tmp_path / "run", **{"train.learning_rate": 1e-12})
    before, after = load_weights(first), load_weights(out)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)
    (noted,) = RunDir.open(out).read_json("provenance.json")["starts"]
    assert noted["from"] == str(first)
    # not where the other's optimiser was
    assert noted["step"] == 0
    assert RunDir.open(out).read_json("status.json")["step"] == 4


def test_only_routers_learn_where_that_is_asked(first: Path, tmp_path: Path) -> None:
    routing = {"routing.strategy": "expert_choice", "routing.gate": "tanh1"}
    routing |= {"routing.init_std": 0.0, "routing.predictor_width": 8}
    routing |= {"train.trainable": "routers", "train.optimizer": "adamw"}
    out = start(first, tmp_path / "run", **routing)
    before = {name.replace(".block.", "."): v for name, v in load_weights(first).items()}
    changed, same = set(), set()
    for name, value in load_weights(out).items():
        known = before.get(name.replace(".block.", "."))
        if known is None:
            changed.add(name.split("decider.")[1])
            if name.endswith("router.weight"):
                # it began at 0
                assert value.abs().max() > 0
        else:
            assert torch.equal(known, value), name
            same.add(name)
    assert changed == {
        *("router.weight", "predictor.w_in.weight"),
        *("predictor.w_out.weight", "predictor.w_out.bias"),
    }
    assert len(same) == len(before)


def test_freezing_by_hand() -> None:
    model = Transformer(make_config("mod"))
    freeze(model, "all")
    assert all(p.requires_grad for p in model.parameters())
    freeze(model, "routers")
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {name for name, _ in model.named_parameters() if ".decider." in name}
    (adamw,) = make_optimizers(model, make_run(**{"train.optimizer": "adamw"}).train)
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(learning)
    with pytest.raises(ValueError, match="muon has no matrix to train"):
        make_optimizers(model, make_run(**{"train.optimizer": "muon"}).train)
    with pytest.raises(ValueError, match="needs a model that routes"):
        freeze(Transformer(make_config("dense")), "routers")


def test_what_is_frozen_needs_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world, model = World(0, 1, torch.device("cpu")), load_preset("1b")
    # 8 bytes for each parameter: no room for a gradient and a moment beside it
    machine = {"SC_PAGE_SIZE": 8, "SC_PHYS_PAGES": flops.num_parameters(model).total}
    monkeypatch.setattr(os, "sysconf", machine.__getitem__)
    for trainable in ("routers", "lora"):
        fields = {"train.trainable": trainable, "train.optimizer": "adamw"}
        check_memory(RunConfig.from_overrides(model, fields), world)
    with pytest.raises(ValueError, match="this needs more than"):
        check_memory(RunConfig(model=model), world)


def test_what_was_done_is_told() -> None:
    dense, routed = (Transformer(make_config(name)) for name in ("dense", "mod"))
    given = StoredModel(Path("there"), dense.config, "depthmix", lambda: dict(dense.state_dict()))
    assert load_start(dense, given, 0) == "starting from the weights of there"
    assert load_start(routed, given, 0).endswith("8 tensors of routers and predictors are new")
    given = StoredModel(Path("there"), routed.config, "depthmix", lambda: dict(routed.state_dict()))
    assert load_start(dense, given, 0).endswith("8 tensors of routers and predictors are left out")
    ours, theirs = dense.state_dict(), routed.state_dict()
    name = "mlp.w_up.weight"
    assert torch.equal(ours[f"layers.1.{name}"], theirs[f"layers.1.block.{name}"])


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
    with pytest.raises(ValueError, match=r"another tokenizer .* prepare it with --tokenizer"):
        check_tokenizer(run, corpus)
