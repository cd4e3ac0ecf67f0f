"""Presets: every size loads with its dense twin, takes overrides, and is suggested by name."""

import dataclasses

import pytest

from depthmix.config import (
    RoutingConfig,
    RunConfig,
    list_recipe,
    load_preset,
    make_run_config,
    preset_names,
    preset_sizes,
)
from depthmix.config.presets import format_preset_values


def test_every_preset_loads_and_has_a_dense_twin() -> None:
    assert preset_sizes() == ["tiny", "demo", "60m", "220m", "1b"]
    assert preset_names()[:2] == ["tiny-dense", "tiny-mod"]
    assert len(preset_names()) == 2 * len(preset_sizes())
    for size in preset_sizes():
        routed, dense = load_preset(size), load_preset(f"{size}-dense")
        assert routed == load_preset(f"{size}-mod")
        assert routed.routed_layers, size
        assert routed.routing.strategy == "expert_choice"
        assert dense == routed.dense_twin()
        assert dense.routed_layers == ()
        assert dataclasses.replace(dense, routing=routed.routing) == routed


def test_presets_take_overrides_after_the_variant() -> None:
    config = load_preset("60m-dense", width=768, **{"routing.strategy": "stochastic"})
    assert config.width == 768
    assert config.routing == RoutingConfig(strategy="stochastic")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("60n", "no preset '60n'. Did you mean '60m'"),
        ("60m-dens", "Did you mean '60m-dense'"),
        ("zzzzzz", "The presets are: tiny-dense, tiny-mod"),
        ("-dense", "no preset '-dense'"),
        ("60m-papr", "Did you mean '60m-paper'"),
        ("60m-paper-paper", "no preset '60m-paper-paper'"),
        ("60m-dense-paper", "no preset '60m-dense-paper'"),
    ],
)
def test_unknown_presets_suggest(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_preset(name)


def test_presets_and_new_runs_have_the_best_recipe_that_is_known() -> None:
    for size in preset_sizes():
        for name in (size, f"{size}-dense"):
            run = make_run_config(name, {"train.seed": 3})
            assert run.model == load_preset(name)
            assert run.model.qk_norm, name
            assert run.train.optimizer == "muon", name
            assert run.train.seed == 3
        routing = load_preset(size).routing
        assert (routing.gate, routing.init_std) == ("tanh1", 0.1), size
        assert routing.normalize_input


def test_paper_variants_change_five_fields() -> None:
    for size in preset_sizes():
        ours, papers = (make_run_config(name, {}) for name in (size, f"{size}-paper"))
        assert make_run_config(f"{size}-paper-mod", {}) == papers
        changed = {
            "qk_norm": False,
            "routing.gate": "raw",
            "routing.init_std": 0.02,
            "routing.normalize_input": False,
            "train.optimizer": "adamw",
        }
        assert ours.override(changed) == papers
        dense = make_run_config(f"{size}-paper-dense", {})
        assert dense == RunConfig(model=papers.model.dense_twin(), train=papers.train)
    # what is asked for goes first
    assert make_run_config("60m-paper", {"train.optimizer": "muon"}).train.optimizer == "muon"


def test_model_files_have_no_recipe() -> None:
    assert list_recipe("60m-paper") == {"train.optimizer": "adamw"}
    assert list_recipe("mine-paper.toml") == {}


def test_values_that_all_presets_share() -> None:
    shared = format_preset_values()
    assert shared == {
        "qk_norm": "true",
        "routing.strategy": "expert_choice",
        "routing.gate": "tanh1",
        "routing.init_std": "0.1",
    }
    # the same, read as one would write it
    config = load_preset("220m")
    assert config.override(shared) == config
