"""Weights are found from any path, and what cannot be used is told in a sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.checkpoint import Checkpoints, load_weights
from depthmix.checkpoint import folder as disk
from depthmix.checkpoint.weights import (
    Which,
    build_model,
    choose_checkpoint,
    fit_weights,
    read_config,
)
from depthmix.config import ModelConfig
from depthmix.models import open_model
from depthmix.nn import Transformer
from variants import make_config


@pytest.fixture
def run(tmp_path: Path, make_training: Any) -> tuple[Path, Any]:
    """A run with checkpoints of steps 1 (the best), 2 and 3, and its training."""
    training = make_training()
    checkpoints = Checkpoints(tmp_path / "checkpoints", asynchronous=False)
    for step, score in ((1, 1.0), (2, 3.0), (3, 2.0)):
        training.run(1)
        checkpoints.save(step, training.collect(), training.state, score=score)
        if step == 1:
            training.best = training.copy()["model"]
    return tmp_path, training


def same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    assert weights.keys() == expected.keys()
    return all(torch.equal(weights[name], value) for name, value in expected.items())


def load_model(path: Path | str, which: Which = "newest") -> Transformer:
    checkpoint = choose_checkpoint(Path(path), which)
    return build_model(read_config(checkpoint), load_weights(checkpoint), checkpoint)


def test_weights_are_found_from_every_path(run: tuple[Path, Any]) -> None:
    folder, training = run
    newest, step = training.collect()["model"], folder / "checkpoints" / "step-00000003"
    for path in (folder, folder / "checkpoints"):
        assert same(load_weights(path), training.best)
        assert same(load_weights(str(path), which="best"), training.best)
        assert same(load_weights(path, which="newest"), newest)
    assert same(load_weights(step), newest)
    assert same(load_weights(step / "model.safetensors"), newest)
    assert not same(newest, training.best)


def test_without_scores_weights_are_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    for step in (1, 2):
        checkpoints.save(step, {"model": {"w": torch.tensor([step])}}, {})
    assert load_weights(tmp_path)["w"].tolist() == [2]
    with pytest.raises(ValueError, match="has a score: use the newest"):
        load_weights(tmp_path, which="best")


@pytest.mark.parametrize("overrides", [{}, {"tied_head": False}, {"routing.strategy": "none"}])
def test_a_loaded_model_computes_the_same(
    tmp_path: Path, make_training: Any, overrides: dict[str, Any]
) -> None:
    training = make_training(**overrides)
    training.run(2)
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(2, training.collect(), training.state)
    before = torch.get_rng_state()
    model = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert model.config == training.model.config
    assert (model.head.weight is model.embedding.weight) == model.config.tied_head
    tokens = torch.randint(256, (2, 20))
    expected = training.model.eval()(tokens, selector="topk").logits
    assert torch.equal(model(tokens, selector="topk").logits, expected)
    # it can be trained on
    model(tokens).logits.sum().backward()
    assert all(p.grad is not None for p in [model.embedding.weight, model.norm.weight])


def test_a_loaded_model_is_the_one_asked_for(run: tuple[Path, Any]) -> None:
    folder, training = run
    best, newest = load_model(folder, which="best"), load_model(str(folder))
    assert torch.equal(best.norm.weight, training.best["norm.weight"])
    assert torch.equal(newest.norm.weight, training.model.norm.weight)


def test_a_model_saved_in_bf16_is_loaded_in_bf16(tmp_path: Path, make_training: Any) -> None:
    training = make_training()
    training.model.bfloat16()
    Checkpoints(tmp_path, asynchronous=False).save(1, training.collect(), training.state)
    model = load_model(tmp_path)
    assert model.norm.weight.dtype == torch.bfloat16
    # whose positions must not be
    assert torch.equal(model.phase_table, training.model.phase_table)
    assert model.phase_table.dtype == torch.float32


def test_paths_without_a_checkpoint(tmp_path: Path) -> None:
    for load in (load_weights, load_model):
        with pytest.raises(ValueError, match="there is nothing at"):
            load(tmp_path / "nowhere")
        with pytest.raises(ValueError, match="has no checkpoint"):
            load(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ValueError, match="is not a valid safetensors file"):
        load_weights(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="is a file: name the folder of a run"):
        load_model(tmp_path / "model.pt")
    (tmp_path / "model.rank-00000-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="has only one rank's tensors"):
        load_weights(tmp_path / "model.rank-00000-of-00002.safetensors")


def test_a_damaged_checkpoint_is_refused_and_another_named(run: tuple[Path, Any]) -> None:
    folder, _ = run
    broken = folder / "checkpoints" / "step-00000003"
    (broken / "optimizer.safetensors").unlink()
    assert load_model(folder).config.width == 64
    (broken / "model.safetensors").write_bytes(b"short")
    for path in (folder, broken):
        told = f"use {folder} with --checkpoint 2"
        with pytest.raises(ValueError, match=f"has 5 bytes .*{re.escape(told)}$"):
            load_weights(path, which="newest")


def test_a_checkpoint_that_is_proposed_is_sound(run: tuple[Path, Any]) -> None:
    folder, _ = run
    places = disk.list_checkpoints(folder / "checkpoints")
    (places[3] / "state.json").unlink()
    (places[2] / "model.safetensors").write_bytes(b"short")
    told = f"use {folder} with --checkpoint 1"
    with pytest.raises(ValueError, match=f"state.json is missing: {re.escape(told)}$"):
        read_config(places[3])
    # what is proposed works
    assert open_model(folder, checkpoint="1").network.config.width == 64
    (places[1] / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="no other checkpoint of the run is intact, so restore"):
        read_config(places[3])


def rewrite_state(checkpoint: Path, change: dict[str, Any]) -> None:
    """Change the state and make the checksums fit it."""
    state = disk.read_state(checkpoint) | change
    disk.write_json(checkpoint / disk.STATE, state)
    sums = json.loads((checkpoint / disk.CHECKSUMS).read_text())
    sums["files"][disk.STATE] = disk.measure_file(checkpoint / disk.STATE)
    disk.write_json(checkpoint / disk.CHECKSUMS, sums)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"width": 32}, "do not fit its configuration: 'embedding.weight' is (256, 64) and should"),
        ({"num_layers": 6}, "'layers.4.attention.norm_key.weight' is missing and should be (16,)"),
        ({"num_layers": 2}, "is (16,) and should be absent"),
        ({"wide": 3}, "is not valid: there is no configuration field 'wide'"),
        (None, "has no configuration of a model"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    run: tuple[Path, Any], change: dict[str, Any] | None, sentence: str
) -> None:
    folder, training = run
    model = None if change is None else training.model.config.to_dict() | change
    checkpoint = folder / "checkpoints" / "step-00000003"
    rewrite_state(checkpoint, {"config": {"model": model}})
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_model(checkpoint)


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    tensors = {"model": {}, "optimizer": {"w.step": torch.ones(())}}
    Checkpoints(tmp_path, asynchronous=False).save(1, tensors, {})
    with pytest.raises(ValueError, match="has no weights"):
        load_weights(tmp_path)


@pytest.mark.gpu
def test_a_model_is_loaded_onto_the_gpu(run: tuple[Path, Any]) -> None:
    model = load_model(run[0]).to("cuda")
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cuda"}
    assert model.head.weight is model.embedding.weight


def make_weights(config: ModelConfig) -> dict[str, Tensor]:
    weights = dict(Transformer(config).state_dict())
    if config.tied_head:
        del weights["head.weight"]
    return weights


def test_the_same_configuration_keeps_every_tensor() -> None:
    config = make_config("mod_kv")
    weights = make_weights(config)
    fitted = fit_weights(config, weights, "here")
    assert fitted.weights.keys() == weights.keys()
    assert all(fitted.weights[name] is weights[name] for name in weights)
    assert fitted.new == fitted.left == ()


@pytest.mark.parametrize("tied", [True, False])
def test_dense_to_routed_and_back(tied: bool) -> None:
    dense = make_config("dense", tied_head=tied)
    routed = make_config("mod", tied_head=tied)
    weights = make_weights(dense)
    there = fit_weights(routed, weights, "here")
    assert there.new
    assert all(".decider." in name for name in there.new)
    back = fit_weights(dense, there.weights, "there")
    assert set(back.left) == set(there.new)
    assert back.weights.keys() == weights.keys()
    assert all(back.weights[name] is weights[name] for name in weights)


def test_other_blocks_may_route() -> None:
    config = make_config("mod")
    other = make_config("mod", **{"routing.every": 1})
    weights = make_weights(config)
    fitted = fit_weights(other, weights, "here")
    # routers that were there stay, others begin
    assert (
        fitted.weights["layers.1.decider.router.weight"]
        is weights["layers.1.decider.router.weight"]
    )
    assert {name.split(".")[1] for name in fitted.new} == {"0", "2"}
    assert fitted.weights["layers.0.block.mlp.w_up.weight"] is weights["layers.0.mlp.w_up.weight"]


def test_new_predictors_keep_every_token_and_the_model_is_the_dense_one() -> None:
    dense = make_config("dense")
    changes: dict[str, Any] = {"routing.gate": "tanh1", "routing.init_std": 0.0}
    routed = make_config("mod", **changes)
    weights = make_weights(dense)
    fitted = fit_weights(routed, weights, "here").weights
    tokens = torch.randint(64, (2, 16))
    wanted = build_model(dense, weights, "here")(tokens).logits
    found = build_model(routed, fitted, "here")
    torch.testing.assert_close(found(tokens, selector="predictor").logits, wanted)
    assert not torch.allclose(found(tokens).logits, wanted)


def test_a_new_bias_starts_at_the_capacity() -> None:
    fields = {"routing.capacity": (0.5, 0.25), "routing.init_std": 0.02}
    config = make_config("token_choice_bias", **fields)
    names = "layers.1.decider.bias", "layers.3.decider.bias"
    fitted = fit_weights(config, make_weights(make_config("dense")), "here")
    first, second = (fitted.weights[name].item() for name in names)
    # half of the scores are positive, a quarter is above 0.674 of their deviation
    assert first == pytest.approx(0, abs=1e-9)
    assert second == pytest.approx(-0.6745 * 0.02 * 32**0.5, rel=1e-3)
    # a trained router has its share above 0 already
    fitted = fit_weights(config, make_weights(make_config("token_choice")), "here")
    assert fitted.new == names
    assert [fitted.weights[name].item() for name in names] == [0, 0]


def test_new_routers_are_drawn_by_the_seed() -> None:
    dense, routed = make_config("dense"), make_config("mod")
    name = "layers.1.decider.router.weight"
    drawn = [fit_weights(routed, make_weights(dense), "", seed).weights[name] for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert 0 < drawn[0].std() < 0.1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 64, "mlp_width": 64}, "only fields of routing may be changed"),
        ({"num_layers": 2}, "here has 'layers.2"),
        ({"num_layers": 6}, "here has no 'layers.4"),
        ({"mlp": "gelu"}, "here has 'layers.0.mlp.w_gate.weight'"),
        ({"qk_norm": True}, "here has no 'layers.0.attention.norm_query.weight'"),
    ],
    ids=str,
)
def test_another_model_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    weights = make_weights(make_config("dense", num_layers=4))
    with pytest.raises(ValueError, match=told):
        fit_weights(make_config("mod", **{"num_layers": 4, **changes}), weights, "here")


def test_heads_are_tied_only_where_they_are_the_same() -> None:
    tied, untied = make_config("dense"), make_config("dense", tied_head=False)
    weights = make_weights(tied)
    both = fit_weights(untied, weights, "here").weights
    assert torch.equal(both["head.weight"], both["embedding.weight"])
    assert "head.weight" not in fit_weights(tied, both, "here").weights
    both["head.weight"] = both["head.weight"] + 1
    with pytest.raises(ValueError, match="a head of its own"):
        fit_weights(tied, both, "here")
