"""Dense checkpoints become our models with the same logits, and the rest is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from depthmix.checkpoint.fit import fit_weights
from depthmix.checkpoint.weights import build_model
from depthmix.hf.families import read_config
from depthmix.hf.weights import INDEX_FILE, WEIGHTS_FILE, list_entries, read_weights, to_foreign
from foreign_models import KINDS, make_foreign

ROUTED = {
    "routing.strategy": "expert_choice",
    "routing.capacity": 1.0,
    "routing.gate": "tanh1",
    "routing.init_std": 0.0,
}


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
    with pytest.raises(ValueError, match=f"does not hold '{names[0]}'"):
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


def test_saved_frequencies_are_passed_over(llama: Path) -> None:
    change_weights(llama, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    config = read_config(llama)
    assert len(read_weights(llama, config)) == len(list(list_entries(config)))


def test_a_tied_head_that_is_another_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="not a sound safetensors file"):
        read_weights(llama, config)
    (llama / WEIGHTS_FILE).rename(llama / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is pickled, and not read"):
        read_weights(llama, config)
