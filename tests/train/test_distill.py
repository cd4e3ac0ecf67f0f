"""The divergence from a teacher equals torch's own, and a run learns from one across a stop."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from depthmix.config import RunConfig, load_preset
from depthmix.models import StoredModel, open_model
from depthmix.nn import Transformer
from depthmix.nn.losses import IGNORE
from depthmix.runs.folder import RunDir
from depthmix.train import distill
from depthmix.train.distill import (
    Distillation,
    mean_distance,
    mean_divergence,
    open_distillation,
)
from depthmix.train.launch import Launch, launch
from depthmix.train.step import TrainStep, compute_loss
from tiny_runs import FIELDS, write_data
from variants import enlarge_updates, make_config


@pytest.mark.parametrize("chunk", [3, 100])
def test_divergence_equals_torchs(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(distill, "CHUNK_TOKENS", chunk)
    hidden, known = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 6)
    head, known_head = torch.randn(11, 8, requires_grad=True), torch.randn(11, 6)
    targets = torch.randint(11, (2, 5))
    targets[1, 2:] = IGNORE
    found = mean_divergence(hidden, head, known, known_head, targets)
    logs, wanted = ((x @ w.T).log_softmax(-1) for x, w in ((hidden, head), (known, known_head)))
    each = F.kl_div(logs, wanted, reduction="none", log_target=True).sum(-1)
    expected = each[targets != IGNORE].mean()
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found, (hidden, head))
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (hidden, head)))


def test_distance_is_relative_to_each_tokens_own() -> None:
    streams = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(3)]
    known = [torch.randn(2, 5, 8) * 10.0**block for block in range(3)]
    targets = torch.randint(11, (2, 5))
    targets[1, 2:] = IGNORE
    parts = []
    for own, wanted in zip(streams, known, strict=True):
        ratio = ((own - wanted).norm(dim=-1) / wanted.norm(dim=-1)) ** 2
        parts.append(ratio[targets != IGNORE].mean())
    found, expected = mean_distance(streams, known, targets), torch.stack(parts).mean()
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found, streams)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, streams))
    # a token whose stream is zero asks for nothing
    nothing = mean_distance([torch.zeros(1, 2, 4)], [torch.zeros(1, 2, 4)], targets[:1, :2])
    assert nothing.item() == 0


def test_streams_are_those_after_each_block() -> None:
    torch.manual_seed(0)
    model = enlarge_updates(Transformer(make_config("mod")))
    tokens = torch.randint(64, (2, 16))
    hidden = model.compute_hidden(tokens, keeps_streams=True)
    assert len(hidden.streams) == model.config.num_layers
    torch.testing.assert_close(model.norm(hidden.streams[-1]), hidden.hidden)
    assert not model.compute_hidden(tokens).streams
    # a block that keeps no token hands on what came before it
    found: list[torch.Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model.layers[1].register_forward_pre_hook(lambda _, args: found.append(args[0]))
    hidden = model.compute_hidden(tokens, keeps_streams=True)
    assert torch.equal(found[1], hidden.streams[0])


def test_streams_are_learned_too() -> None:
    torch.manual_seed(0)
    model, teacher = (enlarge_updates(Transformer(make_config(name))) for name in ("mod", "dense"))
    tokens = torch.randint(64, (4, 17))
    batch = (tokens[:, :-1], tokens[:, 1:], None)
    itself = compute_loss(teacher, *batch, Distillation(teacher, 1.0, 2.0))
    assert itself.hidden is not None
    assert itself.hidden.item() == 0
    alone = compute_loss(model, *batch, Distillation(teacher, 1.0))
    assert alone.hidden is None
    once, twice = (compute_loss(model, *batch, Distillation(teacher, 1.0, w)) for w in (1.0, 2.0))
    assert once.hidden is not None
    torch.testing.assert_close(2 * once.hidden, twice.hidden)
    torch.testing.assert_close(once.total, alone.total + once.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = TrainStep(
        model, optimizer, num_micro_batches=2, distillation=Distillation(teacher, 0.0, 5.0)
    )
    found = [step(tokens[:, :-1], tokens[:, 1:]).hidden for _ in range(12)]
    losses = [float(value) for value in found if value is not None]
    assert len(losses) == 12
    assert losses[-1] < 0.7 * losses[0]


def test_a_model_does_not_diverge_from_itself_and_the_parts_add_up() -> None:
    torch.manual_seed(0)
    model, teacher = (enlarge_updates(Transformer(make_config(name))) for name in ("mod", "dense"))
    tokens = torch.randint(64, (2, 17))
    batch = (tokens[:, :-1], tokens[:, 1:], None)
    alone = compute_loss(model, *batch)
    same = compute_loss(teacher, *batch, Distillation(teacher, 1.0)).distilled
    assert same is not None
    assert abs(same.item()) < 1e-6
    once, twice = (compute_loss(model, *batch, Distillation(teacher, w)) for w in (1.0, 2.0))
    assert once.distilled is not None
    assert twice.distilled is not None
    torch.testing.assert_close(2 * once.distilled, twice.distilled)
    assert once.distilled.item() > 0.01
    torch.testing.assert_close(once.total, alone.total + once.distilled)
    torch.testing.assert_close(once.language_model, alone.language_model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_approach_the_teacher_and_leave_it_alone(accumulate: int) -> None:
    torch.manual_seed(0)
    model, teacher = (enlarge_updates(Transformer(make_config(name))) for name in ("mod", "dense"))
    # one that is sure of what it says
    teacher.norm.weight.data.mul_(20)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = TrainStep(
        model, optimizer, num_micro_batches=accumulate, distillation=Distillation(teacher, 5.0)
    )
    tokens = torch.randint(64, (4, 17))
    found = [step(tokens[:, :-1], tokens[:, 1:]).distilled for _ in range(12)]
    losses = [float(value) for value in found if value is not None]
    assert len(losses) == 12
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


@pytest.mark.compile
def test_a_compiled_step_has_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    # traced whole, as for inductor, which takes minutes for this
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tokens = torch.randint(64, (2, 17))
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, teacher = (
            enlarge_updates(Transformer(make_config(name))) for name in ("mod", "dense")
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainStep(
            model, optimizer, compile=compiled, distillation=Distillation(teacher, 1.0, 1.0)
        )
        found = [step(tokens[:, :-1], tokens[:, 1:]) for _ in range(2)]
        parts = [value for r in found for value in (r.total, r.distilled, r.hidden)]
        losses.append(torch.stack(parts))  # pyrefly: ignore
    torch.testing.assert_close(losses[1], losses[0])


def make_source(**changes: Any) -> StoredModel:
    model = Transformer(make_config("dense", **changes))
    return StoredModel(Path("teacher"), model.config, "depthmix", lambda: dict(model.state_dict()))


def test_teachers_that_know_other_tokens_are_refused() -> None:
    run = RunConfig.from_overrides(make_config("mod"), {"train.teacher": "teacher"})
    cpu = torch.device("cpu")
    assert open_distillation(make_source(), run, cpu).weight == 1.0
    with pytest.raises(ValueError, match="teacher has 65 ids, but this model has 64"):
        open_distillation(make_source(vocab_size=65), run, cpu)
    with pytest.raises(ValueError, match=r"has 8 positions: use train.seq_len=8"):
        open_distillation(make_source(max_seq_len=8), run, cpu)


def test_streams_need_a_teacher_of_the_same_shape() -> None:
    cpu, hidden = torch.device("cpu"), {"train.hidden_loss_weight": 0.5}
    with pytest.raises(ValueError, match=r"hidden_loss_weight needs train\.teacher"):
        RunConfig.from_overrides(make_config("mod"), hidden)
    run = RunConfig.from_overrides(make_config("mod"), {"train.teacher": "teacher", **hidden})
    assert open_distillation(make_source(), run, cpu).hidden_weight == 0.5
    depth, width = run.model.num_layers, run.model.width
    said = f"has {depth + 1} blocks of width {width}, but this model has {depth}"
    with pytest.raises(ValueError, match=said):
        open_distillation(make_source(num_layers=depth + 1), run, cpu)


def test_a_run_learns_from_a_teacher_and_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, quiet = write_data(tmp_path / "data"), Console(quiet=True)
    fixed = {**FIELDS, "train.tensorboard": False, "train.steps": 6, "train.checkpoint_every": 3}
    dense = RunConfig.from_overrides(
        load_preset("tiny"), {**fixed, "routing.strategy": "none", "train.steps": 2}
    )
    launch(Launch(run=dense, data=data, out=tmp_path / "teacher", device="cpu"), quiet)
    fields = {**fixed, "train.teacher": str(tmp_path / "teacher"), "train.hidden_loss_weight": 0.5}
    run = RunConfig.from_overrides(load_preset("tiny"), fields)
    plan = Launch(run=run, data=data, out=tmp_path / "run", device="cpu")
    launch(plan, quiet)
    lines = RunDir.open(tmp_path / "run").read_metrics("train")
    assert all(line["distill_loss"] > 0 for line in lines)
    parts = [line["loss"] + line["distill_loss"] + line["hidden_loss"] for line in lines]
    assert all(line["total_loss"] > part for line, part in zip(lines, parts, strict=True))
    assert all(line["hidden_loss"] > 0 for line in lines)
    seen = []

    def open_and_tell(path: str) -> StoredModel:
        seen.append(path)
        return open_model(path)

    monkeypatch.setattr("depthmix.train.launch.open_model", open_and_tell)

    # the end is gone, as after a kill
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    RunDir.open(tmp_path / "run").write_status("running", step=3, num_steps=6, loss=None)
    launch(Launch(resume=tmp_path / "run", device="cpu"), quiet)
    assert seen == [str(tmp_path / "teacher")]
    again = RunDir.open(tmp_path / "run").read_metrics("train")
    assert [line["distill_loss"] for line in again] == [line["distill_loss"] for line in lines]
