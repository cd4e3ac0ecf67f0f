"""A capacity falls in stages that depend on the step alone, and a stop does not change it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from depthmix.budget import make_schedule
from depthmix.checkpoint import folder as disk
from depthmix.config import RunConfig, load_preset
from depthmix.models import open_model
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.runs.folder import RunDir
from depthmix.train.launch import Launch, launch
from depthmix.train.step import TrainStep
from tiny_runs import FIELDS, read_result, stop_at_step, write_data
from variants import make_config

FALLING = {
    "train.start_capacity": 1.0,
    "train.capacity_fall_share": 0.6,
    "train.num_capacity_stages": 3,
}


def make_run(**changes: Any) -> RunConfig:
    fixed = {"train.tensorboard": False, "train.steps": 10, "train.checkpoint_every": 2}
    fixed |= {
        "train.num_kept_checkpoints": 9,
        "train.val_every": 3,
        "routing.capacity": 0.25,
        **FALLING,
    }
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return RunConfig.from_overrides(load_preset("tiny"), {**FIELDS, **fixed, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose data is beside it."""
    folder = tmp_path_factory.mktemp("anneal")
    data = write_data(folder / "data")
    plan = Launch(run=make_run(), data=data, out=folder / "run", device="cpu")
    launch(plan, Console(quiet=True))
    return folder / "run"


def test_metrics_and_checkpoints_know_the_capacity(whole: Path) -> None:
    lines = RunDir.open(whole).read_metrics("train")
    assert [(line["step"], line["capacity"]) for line in lines] == [
        (3, 0.75),
        (6, 0.5),
        (9, 0.25),
        (10, 0.25),
    ]
    assert lines[-1]["flops"] == make_schedule(make_run()).flops
    found = disk.list_checkpoints(whole / "checkpoints")
    shares = {step: open_model(path).network.config.capacities for step, path in found.items()}
    assert shares == {2: (1.0,), 4: (0.75,), 6: (0.5,), 8: (0.25,), 10: (0.25,)}
    # what was easier does not count as better; the eighth's validation was at another capacity
    states = {step: disk.read_state(path) for step, path in found.items()}
    assert [step for step, state in states.items() if state["score"] is not None] == [10]
    assert [step for step, state in states.items() if state["val"]] == [4, 6, 10]
    for layer in open_model(found[4]).network.layers:
        if isinstance(layer, MixtureOfDepths):
            assert layer.decider.capacity == 0.75


@pytest.mark.parametrize("step", [3, 5, 6, 8])
def test_a_stop_does_not_change_the_stages(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with monkeypatch.context() as patch:
        stop_at_step(patch, step)
        plan = Launch(run=make_run(), data=whole.with_name("data"), out=tmp_path / "run")
        outcome, _ = launch(plan._replace(device="cpu"), Console(quiet=True))
    assert (outcome.state, outcome.step) == ("interrupted", step)
    launch(Launch(resume=tmp_path / "run", device="cpu"), Console(quiet=True))
    assert read_result(tmp_path / "run") == read_result(whole)
    for number, path in disk.list_checkpoints(whole / "checkpoints").items():
        there = tmp_path / "run" / "checkpoints" / disk.name_checkpoint(number)
        assert disk.read_state(there)["val"] == disk.read_state(path)["val"]


@pytest.mark.compile
def test_compiled_steps_follow_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    # traced whole, and guarded, as for inductor, which takes minutes for this
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Transformer(make_config("mod", max_seq_len=16, **{"routing.capacity": 0.25}))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=compiled)
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
        found = []
        for capacity in (1.0, 0.75, 0.25):
            model.set_capacities([capacity, capacity])
            step.forget()
            found.append(step(tokens[:, :-1], tokens[:, 1:]).total)
        losses.append(torch.stack(found))
    torch.testing.assert_close(losses[1], losses[0])
    assert losses[0].unique().numel() == 3
