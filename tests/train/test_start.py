"""A run begins with the weights of another model, or with some of it frozen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from depthmix.checkpoint.weights import load_weights
from depthmix.config import RunConfig, load_preset
from depthmix.models import StoredModel, open_model
from depthmix.nn import Transformer
from depthmix.runs.folder import RunDir
from depthmix.train.launch import Launch, launch
from depthmix.train.optim import make_optimizers
from depthmix.train.start import freeze, load_start
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
    with pytest.raises(ValueError, match="needs a model with routed blocks"):
        freeze(Transformer(make_config("dense")), "routers")


def test_initial_weights_are_described() -> None:
    dense, routed = (Transformer(make_config(name)) for name in ("dense", "mod"))
    given = StoredModel(Path("there"), dense.config, "depthmix", lambda: dict(dense.state_dict()))
    assert load_start(dense, given, 0) == "starting from the weights of there"
    assert load_start(routed, given, 0).endswith("8 tensors of routers and predictors are new")
    given = StoredModel(Path("there"), routed.config, "depthmix", lambda: dict(routed.state_dict()))
    assert load_start(dense, given, 0).endswith("8 tensors of routers and predictors are left out")
    ours, theirs = dense.state_dict(), routed.state_dict()
    name = "mlp.w_up.weight"
    assert torch.equal(ours[f"layers.1.{name}"], theirs[f"layers.1.block.{name}"])
