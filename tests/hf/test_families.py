"""What a configuration of Hugging Face's means to us, and what of it is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.checkpoint.weights import build_model
from depthmix.hf.families import read_config
from depthmix.hf.weights import read_weights
from foreign_models import make_foreign


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_configuration_fields(folders: dict[str, Path]) -> None:
    config = read_config(folders["mistral"])
    assert (config.width, config.num_heads, config.num_kv_heads) == (32, 4, 2)
    assert (config.head_width, config.mlp_width, config.num_layers) == (16, 48, 4)
    assert (config.max_seq_len, config.vocab_size) == (64, 300)
    assert (config.rope_theta, config.norm_eps, config.mlp) == (5000.0, 1e-5, "swiglu")
    assert not config.tied_head
    assert read_config(folders["llama_tied"]).tied_head
    assert read_config(folders["qwen2"]).qkv_bias
    assert read_config(folders["qwen3"]).qk_norm
    assert read_config(folders["qwen3"]).head_width == 12
    assert read_config(folders["llama"], max_seq_len=16).max_seq_len == 16


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("rope", [LLAMA_3, {"rope_type": "linear", "factor": 4.0}], ids=str)
def test_stretched_positions(rope: dict[str, Any], tmp_path: Path) -> None:
    told = {**rope, "rope_theta": 300.0}
    foreign = make_foreign("llama", rope_parameters=told, head_dim=16)
    foreign.float().save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.rope_theta == 300.0
    assert config.rope_factors == tuple(v for k, v in rope.items() if k != "rope_type")
    model = build_model(config, read_weights(tmp_path, config), tmp_path).double()
    tokens = torch.randint(300, (2, 64))
    with torch.no_grad():
        wanted = foreign.double()(tokens).logits
        # their table is of float32 angles
        torch.testing.assert_close(model(tokens).logits, wanted, rtol=1e-4, atol=1e-4)
        plain = build_model(
            config.override({"rope_factors": None}), read_weights(tmp_path, config), tmp_path
        )
        assert not torch.allclose(plain.double()(tokens).logits, wanted, rtol=1e-2, atol=1e-2)
    # the same as releases before 5 wrote it
    change_config(tmp_path, rope_parameters=None, rope_theta=300.0, rope_scaling=rope)
    assert read_config(tmp_path) == config


def test_rope_theta_of_older_releases(llama: Path) -> None:
    change_config(llama, rope_parameters=None, rope_theta=123.0, rope_scaling=None)
    assert read_config(llama).rope_theta == 123.0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt_neox"}, "architecture 'gpt_neox', .* llama, mistral, qwen2, qwen3"),
        ({"model_type": "smollm3"}, "architecture 'smollm3'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"mlp_bias": True}, "mlp_bias = true"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "of type 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "type 'linear' and no number 'fac"),
        (
            {"rope_scaling": {"type": "linear", "factor": -2}},
            r"rope_factors = \[-2.0\] must be pos",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "of type 'yarn', which cannot"),
        ({"rope_scaling": "none of it", "hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"model_type": "mistral", "sliding_window": 16}, "16 tokens.* max_seq_len=16"),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, "window of 16"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"num_key_value_heads": 3}, "num_kv_heads = 3 does not divide"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_we_cannot_be_is_refused_by_name(
    llama: Path, changes: dict[str, Any], told: str
) -> None:
    change_config(llama, **changes)
    with pytest.raises(ValueError, match=told):
        read_config(llama)


def test_a_window_that_is_not_used_or_wide_enough_is_none(llama: Path) -> None:
    change_config(llama, model_type="qwen2", sliding_window=16, use_sliding_window=False)
    assert read_config(llama).max_seq_len == 64
    change_config(llama, model_type="mistral", use_sliding_window=True)
    assert read_config(llama, max_seq_len=16).max_seq_len == 16


def test_what_is_no_configuration_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a JSON object"):
        read_config(llama)
    with pytest.raises(ValueError, match=r"has no config.json"):
        read_config(llama / "nowhere")
