"""A capacity falls in stages that depend on the step alone, and a stop does not change it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from depthmix import flops
from depthmix.budget import list_stages
from depthmix.checkpoint import folder as disk
from depthmix.config import RunConfig, load_preset
from depthmix.models import open_model
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.runs.folder import RunDir
from depthmix.train.anneal import Annealer
from depthmix.train.launch import Launch, launch
from depthmix.train.meter import Meter
from depthmix.train.step import TrainStep
from depthmix.world import World
from tiny_runs import FIELDS, read_result, stop_at_step, write_data
from variants import make_config

FALLING = {
    "train.start_capacity": 1.0,
    "train.capacity_fall_share": 0.6,
    "train.num_capacity_stages": 3,
}
WORLD = World(0, 1, torch.device("cpu"))


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


def list_capacities(run: RunConfig, num_steps: int) -> dict[int, tuple[float, ...]]:
    stages = list_stages(run, num_steps)
    return {first: model.capacities for first, model in stages.items()}


def test_stages_by_hand() -> None:
    assert list_capacities(make_run(), 10) == {0: (1.0,), 2: (0.75,), 4: (0.5,), 6: (0.25,)}
    run = make_run(num_layers=4, routing__capacity=(0.5, 0.25), train__capacity_stages=2)
    assert list_capacities(run, 10) == {0: (1.0, 1.0), 3: (0.75, 0.625), 6: (0.5, 0.25)}
    # in a short run, stages fall together, and the last step still has the model's own
    assert list_capacities(make_run(), 2) == {0: (1.0,), 1: (0.25,)}
    assert list_capacities(make_run(), 1) == {0: (0.25,)}
    run = make_run(train__capacity_from=None)
    assert list_stages(run, 10) == {0: run.model}


@given(
    st.integers(1, 200), st.floats(0, 1), st.integers(1, 12), st.floats(0.3, 1), st.integers(1, 3)
)
def test_stages_fall_from_the_first_to_the_models_own(
    num_steps: int, share: float, count: int, first: float, every: int
) -> None:
    changes = {"train__capacity_share": share, "train__capacity_stages": count}
    run = make_run(train__capacity_from=first, routing__every=1, num_layers=every, **changes)
    stages = list_stages(run, num_steps)
    starts, shares = list(stages), [model.capacities for model in stages.values()]
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    assert starts[-1] <= max(0, num_steps - 1)
    assert stages[starts[-1]] is run.model
    assert shares == sorted(shares, reverse=True)
    assert max(shares[0]) <= first


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"routing.strategy": "none"}, "needs blocks that route"),
        ({"train.start_capacity": 0.1}, "is less than the model's capacity 0.25"),
        ({"routing.kv_capacity": 0.5}, r"is more than routing.kv_capacity = 0.5"),
    ],
    ids=str,
)
def test_what_cannot_fall_is_refused(changes: dict[str, Any], told: str) -> None:
    run = make_run(**changes)
    with pytest.raises(ValueError, match=told):
        list_stages(run, 10)


def test_recipes_that_cannot_fall_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train.start_capacity = 1.5 must lie in"):
        make_run(train__capacity_from=1.5)
    with pytest.raises(ValueError, match=r"train.num_capacity_stages = 0 must be greater than 0"):
        make_run(train__capacity_stages=0)


def test_the_model_is_told() -> None:
    run = make_run()
    model = Transformer(run.model)
    annealer = Annealer(run, model)
    tokens = torch.randint(64, (2, 16))
    kept, changed = [], []
    for step in range(8):
        changed.append(annealer.enter(step))
        kept.append(model(tokens).routings[0].index.shape[1])
        assert annealer.is_final == (step >= 6)
        assert annealer.describe() == {"capacity": annealer.config.capacities[0]}
    assert kept == [16, 16, 12, 12, 8, 8, 4, 4]
    assert changed == [True, False, True, False, True, False, True, False]
    assert annealer.config is run.model


def test_compute_is_counted_at_the_capacity_that_each_step_had() -> None:
    run = make_run()
    sizes = {"seq_len": run.seq_len, "batch_size": run.train.batch_size}
    each = [
        flops.training_flops(run.model.override({"routing.capacity": c}), **sizes)
        for c in (1.0, 0.75, 0.5, 0.25)
    ]
    meter = Meter(run, WORLD)
    assert meter.count_flops(0) == 0
    assert meter.count_flops(3) == 2 * each[0] + each[1]
    assert meter.count_flops(10) == 2 * sum(each[:3]) + 4 * each[3]
    still = Meter(make_run(train__capacity_from=None), WORLD)
    assert still.count_flops(10) == 10 * each[3]


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
    assert lines[-1]["flops"] == Meter(make_run(), WORLD).count_flops(10)
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
        annealer = Annealer(make_run(num_layers=4), model)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=compiled)
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
        found = []
        for number in (0, 2, 6):
            if annealer.enter(number):
                step.forget()
            found.append(step(tokens[:, :-1], tokens[:, 1:]).total)
        losses.append(torch.stack(found))
    torch.testing.assert_close(losses[1], losses[0])
    assert losses[0].unique().numel() == 3
