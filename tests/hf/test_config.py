"""The configuration in transformers' clothes: nothing is lost, and nothing wrong gets in."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from depthmix.config import ModelConfig
from depthmix.hf import DepthmixConfig
from variants import NAMES, make_config


@pytest.mark.parametrize("name", NAMES)
def test_comes_back_from_a_file(name: str, tmp_path: Path) -> None:
    model = make_config(name)
    config = DepthmixConfig.from_model_config(model)
    config.save_pretrained(tmp_path)
    back = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(back, DepthmixConfig)
    assert back.to_model_config() == config.to_model_config()
    # fields that were empty are numbers now, the same ones
    assert back.to_model_config().override({"num_kv_heads": model.num_kv_heads}) == model.override(
        {"head_width": model.shape.head_width, "mlp_width": model.shape.mlp_width}
    )


def test_a_file_holds_every_field_also_where_it_is_the_default(tmp_path: Path) -> None:
    DepthmixConfig().save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig().to_dict().keys() <= tree.keys()
    assert tree["routing"].keys() == ModelConfig().to_dict()["routing"].keys()
    assert tree["auto_map"]["AutoConfig"] == "modeling_depthmix.DepthmixConfig"


def test_has_transformers_names_too() -> None:
    config = DepthmixConfig(num_layers=2, width=64, num_heads=4, max_seq_len=32, tied_head=False)
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 64, 4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (32, False)
    assert config.layer_types == ["depthmix", "depthmix"]
    assert DepthmixConfig(num_hidden_layers=3).num_layers == 3


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"width": 30, "num_heads": 8}, "width"),
        ({"routing": {"strategy": "best"}}, "routing.strategy"),
        ({"selector": "oracle"}, "unknown selector 'oracle'"),
        ({"selector": "predictor", "routing": {"strategy": "token_choice"}}, "predictor"),
    ],
)
def test_refuses_what_is_no_model(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DepthmixConfig(**fields)


def test_refuses_it_at_saving_too(tmp_path: Path) -> None:
    config = DepthmixConfig()
    config.num_heads = 7
    with pytest.raises(ValueError, match="num_heads"):
        config.save_pretrained(tmp_path)
