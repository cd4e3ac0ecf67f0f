"""The demonstration runs anywhere, trains both models and reports what it measured."""

import io
import re

import pytest
import torch
from rich.console import Console

from depthmix import flops
from depthmix.cli import main
from depthmix.demo import Run, Step, run_demo, train_steps
from depthmix.presets import load_preset


def test_demo_compares_and_trains() -> None:
    file = io.StringIO()
    dense, routed = run_demo(Console(file=file, width=80), preset="tiny", num_steps=2, batch_size=2)
    printed = file.getvalue()
    assert (dense.name, routed.name) == ("tiny-dense", "tiny-mod")
    assert [len(run.steps) for run in (dense, routed)] == [2, 2]
    assert re.search(r"tiny-dense +tiny-mod", printed)
    assert "220m-mod" in printed
    assert re.search(rf"first loss +{dense.steps[0].loss:.3f} +{routed.steps[0].loss:.3f}", printed)
    assert re.search(rf"last loss +{dense.steps[1].loss:.3f} +{routed.steps[1].loss:.3f}", printed)
    config = load_preset("tiny")
    ratio = flops.forward_flops(config.dense_twin()) / flops.forward_flops(config)
    assert re.search(rf"by FLOPs +{ratio:.2f} x", printed)
    assert "…" not in printed


@pytest.mark.parametrize(
    "overrides",
    [
        {"routing.strategy": "none"},
        {},
        {"routing.strategy": "token_choice"},
        {"experts.strategy": "expert_choice", "experts.num_experts": 2},
    ],
)
def test_training_lowers_the_loss(overrides: dict[str, object]) -> None:
    config = load_preset("tiny").override(overrides)
    tokens = torch.randint(config.vocab_size, (4, 33))
    losses = [step.loss for step in train_steps(config, tokens, num_steps=12)]
    # a fresh model knows nothing: ln 256 = 5.545
    assert losses[0] == pytest.approx(5.545, abs=0.2)
    assert losses[-1] < losses[0] - 0.3


def test_step_time_leaves_the_first_out() -> None:
    steps = [Step(1.0, 9.0), Step(1.0, 2.0), Step(1.0, 3.0), Step(1.0, 8.0)]
    assert Run("model", steps).step_seconds == 3.0
    assert Run("model", steps[:1]).step_seconds == 9.0


def test_demo_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1", "--preset", "tiny-mod", "--batch-size", "1"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"tiny-dense +tiny-mod", printed)
    assert "speed-up, measured" in printed


def test_demo_needs_a_routed_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--preset", "tiny-dense"]) == 2
    assert "'tiny-dense' has no routed block" in capsys.readouterr().err
