"""What goes together in a launch, and what a new run takes from where."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from depthmix.config import RunConfig, load_preset, make_run_config
from depthmix.config.train import START_RATES, read_length
from depthmix.train.plan import plan_launch
from text_runs import write_text_run


def test_a_new_run_is_of_the_demo_s_preset_and_recipe() -> None:
    plan = plan_launch({"train.steps": 3})
    assert (plan.run, plan.name) == (make_run_config("demo", {"train.steps": 3}), "demo")
    assert plan.fit_vocabulary


def test_a_vocabulary_that_was_set_is_kept(tmp_path: Path) -> None:
    assert plan_launch(preset="tiny").fit_vocabulary
    assert not plan_launch({"vocab_size": 300}, preset="tiny").fit_vocabulary
    model = tmp_path / "mine.toml"
    model.write_text(load_preset("tiny", vocab_size=300).to_toml())
    plan = plan_launch(preset=str(model))
    assert (plan.name, plan.fit_vocabulary) == ("mine", False)


def test_a_file_of_another_run_sets_model_and_recipe(tmp_path: Path) -> None:
    run = RunConfig.from_overrides(load_preset("tiny"), {"train.seed": 5})
    path = tmp_path / "before" / "config.toml"
    path.parent.mkdir()
    path.write_text(run.to_toml())
    plan = plan_launch({"width": 48}, config_file=path)
    assert (plan.run, plan.name) == (run.override({"width": 48}), "before")
    assert not plan.fit_vocabulary


def test_a_start_from_weights_takes_their_model(tmp_path: Path) -> None:
    run = write_text_run(tmp_path)
    plan = plan_launch({"train.steps": 2, "max_seq_len": 16}, start=run)
    assert plan.run is not None
    assert plan.start is not None
    assert plan.run.model == plan.start.config
    assert plan.run.model.max_seq_len == 16
    assert plan.run.train.learning_rate == START_RATES["train.learning_rate"]
    assert (plan.name, plan.fit_vocabulary) == (run.name, False)


def test_a_resumed_run_takes_only_a_larger_budget(tmp_path: Path) -> None:
    plan = plan_launch({"train.steps": 9}, resume=tmp_path)
    assert (plan.run, plan.resume, plan.budget) == (None, tmp_path, {"train.steps": 9})
    refused: list[dict[str, Any]] = [
        {"overrides": {"width": 8}},
        {"overrides": {"train.steps": 9, "train.seed": 1}},
        {"preset": "tiny"},
        {"out": tmp_path},
        {"start": tmp_path},
        {"config_file": tmp_path},
    ]
    for options in refused:
        with pytest.raises(ValueError, match="--resume takes the model, its fields and the folder"):
            plan_launch(**options, resume=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"start": Path("a"), "preset": "tiny"},
            "--from a already sets .* leave out --preset tiny",
        ),
        ({"config_file": Path("a"), "preset": "tiny"}, "--config a .* leave out --preset"),
        ({"config_file": Path("a"), "start": Path("b")}, "--config a .* leave out --from"),
    ],
)
def test_only_one_source_sets_the_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_launch(**options)


def test_planning_a_run_of_a_preset_loads_no_torch() -> None:
    script = (
        "import sys; from depthmix.train.plan import plan_launch; plan_launch();"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_lengths_among_fields() -> None:
    assert read_length({"max_seq_len": "64"}) == read_length({"max_seq_len": 64}) == 64
    assert read_length({"max_seq_len": "long"}) is None
    assert read_length({}) is None
