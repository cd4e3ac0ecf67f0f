"""Presets: every size loads with its dense twin, takes overrides, and is suggested by name."""

import dataclasses

import pytest

from depthmix.config import RoutingConfig, load_preset, preset_names, preset_sizes


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
    ],
)
def test_unknown_presets_suggest(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_preset(name)
