"""Folders of Hugging Face's become our models with the same logits; the rest is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from depthmix.checkpoint.weights import build_model, fit_weights
from depthmix.models import open_model
from depthmix.models.foreign import (
    INDEX_FILE,
    WEIGHTS_FILE,
    list_entries,
    read_config,
    read_weights,
    to_foreign,
)
from foreign_models import KINDS, make_foreign
from hf_models import make_hf_model

ROUTED = {
    "routing.strategy": "expert_choice",
    "routing.capacity": 1.0,
    "routing.gate": "tanh1",
    "routing.init_std": 0.0,
}


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


@pytest.mark.parametrize(
    ("layers", "width", "heads", "kv_heads", "mlp_width", "positions"),
    # as in Llama 3.2 1B, Qwen3 0.6B (with narrower heads) and Qwen2.5 7B 1M
    [
        (16, 2048, 32, 8, 8192, 131_072),
        (28, 1024, 16, 8, 3072, 40_960),
        (28, 3584, 28, 4, 18944, 1_010_000),
    ],
)
def test_long_texts_of_published_models_are_allowed(
    folders: dict[str, Path],
    tmp_path: Path,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    positions: int,
) -> None:
    tree = json.loads((folders["llama"] / "config.json").read_text())
    tree |= {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    tree |= {"num_key_value_heads": kv_heads, "intermediate_size": mlp_width, "head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(tree | {"max_position_embeddings": positions}))
    assert read_config(tmp_path).max_seq_len == positions


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
            r"rope_factors = -2.0 must be greater than 0",
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
def test_unsupported_features_are_refused_by_name(
    llama: Path, changes: dict[str, Any], told: str
) -> None:
    change_config(llama, **changes)
    with pytest.raises(ValueError, match=told):
        read_config(llama)


def test_sliding_window_without_effect_is_ignored(llama: Path) -> None:
    change_config(llama, model_type="qwen2", sliding_window=16, use_sliding_window=False)
    assert read_config(llama).max_seq_len == 64
    change_config(llama, model_type="mistral", use_sliding_window=True)
    assert read_config(llama, max_seq_len=16).max_seq_len == 16


def test_invalid_configuration_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a JSON object"):
        read_config(llama)
    with pytest.raises(ValueError, match=r"has no config.json"):
        read_config(llama / "nowhere")


def change_weights(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors, dots written as two underscores; None takes one out."""
    weights = load_file(folder / WEIGHTS_FILE)
    for name, value in changes.items():
        weights.pop(name.replace("__", "."), None)
        if value is not None:
            weights[name.replace("__", ".")] = value
    save_file(weights, folder / WEIGHTS_FILE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", [{}, ROUTED], ids=["dense", "routed at capacity 1"])
def test_logits_equal_the_original(
    folders: dict[str, Path], kind: str, routing: dict[str, Any]
) -> None:
    config = read_config(folders[kind])
    weights = read_weights(folders[kind], config)
    config = config.override(routing)
    fitted = fit_weights(config, weights, folders[kind]).weights
    model = build_model(config, fitted, folders[kind]).double()
    tokens = torch.randint(300, (2, 40))
    with torch.no_grad():
        # as it was written, in float32
        wanted = make_foreign(kind).float().double()(tokens).logits
        found = model(tokens).logits
    # their frequencies are float32, ours float64
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert wanted.abs().max() > 0.5
    if routing:
        assert len(model(tokens).routings) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_names_go_both_ways(folders: dict[str, Path], kind: str) -> None:
    config = read_config(folders[kind])
    stored = load_file(folders[kind] / WEIGHTS_FILE)
    back = to_foreign(config, read_weights(folders[kind], config))
    assert back.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(back[name], value), name


def test_sharded_and_half_precision_weights(llama: Path) -> None:
    config = read_config(llama)
    wanted = {n: v.bfloat16().float() for n, v in read_weights(llama, config).items()}
    weights = {n: v.bfloat16() for n, v in load_file(llama / WEIGHTS_FILE).items()}
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, llama / file)
    (llama / WEIGHTS_FILE).unlink()
    index = {name: file for file, part in parts.items() for name in part}
    (llama / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    found = read_weights(llama, config)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) and found[n].dtype == torch.float32 for n in found)
    index[names[0]] = "../elsewhere.safetensors"
    (llama / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=r"elsewhere\.safetensors', which is not there"):
        read_weights(llama, config)
    index[names[0]] = "b.safetensors"
    (llama / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(
        ValueError,
        match=f"does not have '{names[0]}', which model.safetensors.index.json says is there",
    ):
        read_weights(llama, config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model__norm__weight": None}, "'model.norm.weight' is missing"),
        ({"model__layers__9__x": torch.ones(2)}, "'model.layers.9.x' is .2,. and should be absent"),
        ({"model__norm__weight": torch.ones(5)}, r"is \(5,\) and should be \(32,\)"),
        ({"model__norm__weight": torch.ones(32, dtype=torch.int8)}, "is torch.int8: quantised"),
    ],
    ids=["missing", "extra", "mis-shaped", "quantised"],
)
def test_weights_that_do_not_fit_are_refused(
    llama: Path, changes: dict[str, Tensor | None], told: str
) -> None:
    change_weights(llama, **changes)
    with pytest.raises(ValueError, match=told):
        read_weights(llama, read_config(llama))


def test_saved_frequencies_are_ignored(llama: Path) -> None:
    change_weights(llama, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    config = read_config(llama)
    assert len(read_weights(llama, config)) == len(list(list_entries(config)))


def test_tied_head_that_differs_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(folders["llama_tied"] / WEIGHTS_FILE)
    config = read_config(folders["llama_tied"])
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / WEIGHTS_FILE)
    assert "head.weight" not in read_weights(tmp_path, config)
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        read_weights(tmp_path, config)


def test_pickled_and_damaged_weights_are_not_read(llama: Path) -> None:
    config = read_config(llama)
    (llama / WEIGHTS_FILE).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        read_weights(llama, config)
    (llama / WEIGHTS_FILE).rename(llama / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is pickled, and not read"):
        read_weights(llama, config)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    make_hf_model("mod").save_pretrained(tmp_path, max_shard_size="20KB")
    assert open_model(tmp_path).load()
    shard = max(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ValueError, match=f"{shard.name} is not a valid safetensors file"):
        open_model(tmp_path).load()
