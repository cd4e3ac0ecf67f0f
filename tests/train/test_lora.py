"""Adapters begin as nothing, learn alone, and are in the plain matrices that others read."""

from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console

from depthmix.checkpoint import collect_tensors
from depthmix.checkpoint.weights import build_model
from depthmix.config import Recipe, RunConfig, load_preset
from depthmix.nn import Transformer
from depthmix.nn.layers import Linear
from depthmix.train import parallel
from depthmix.train.lora import (
    LowRank,
    add_adapters,
    collect_parts,
    list_adapters,
    restore_parts,
)
from depthmix.train.optim import group_parameters, make_optimizers
from depthmix.train.start import freeze
from depthmix.train.step import TrainStep, compute_loss
from depthmix.world import World
from tiny_runs import FIELDS
from variants import loss_of, make_config, make_model, make_tokens

LORA = {"train.trainable": "lora", "train.lora_rank": 4, "train.optimizer": "adamw"}
ATTENTION = ("attention.w_qk", "attention.w_value", "attention.w_out")
MLP = ("mlp.w_gate", "mlp.w_up", "mlp.w_out")
QUIET = Console(quiet=True)
WORLD = World(0, 1, torch.device("cpu"))


def adapt(model: Transformer, *, learned: bool = False, **recipe: Any) -> Transformer:
    """The model with adapters; `learned` ones are no longer 0."""
    freeze(model, "lora")
    fields: dict[str, Any] = {"trainable": "lora", "lora_rank": 4, "lora_blocks": "all"}
    fields |= {"optimizer": "adamw", **recipe}
    add_adapters(model, Recipe(**fields))
    generator = torch.Generator().manual_seed(5)
    for adapter in list_adapters(model).values() if learned else ():
        up = torch.randn(adapter.up.shape, generator=generator, dtype=torch.float64)
        adapter.up.data.copy_(0.2 * up)
    return model


@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_by_hand(bias: bool) -> None:
    torch.manual_seed(0)
    frozen = Linear(6, 5, bias=bias).double()
    weight = frozen.weight.detach().clone()
    adapter = LowRank(frozen, 2, 0.5, torch.Generator().manual_seed(1))
    assert adapter.down.shape == (2, 6)
    assert torch.equal(adapter.up, torch.zeros(5, 2, dtype=torch.float64))
    adapter.up.data.normal_()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    up, down = (t.detach().clone().requires_grad_() for t in (adapter.up, adapter.down))
    expected = x @ (weight + 0.5 * up @ down).T
    if frozen.bias is not None:
        expected = expected + frozen.bias
    torch.testing.assert_close(adapter(x), expected)
    torch.testing.assert_close(adapter.weight, weight + 0.5 * up @ down)
    assert torch.equal(adapter.merge(), adapter.weight)
    found = torch.autograd.grad(loss_of(adapter(x)), (adapter.up, adapter.down))
    torch.testing.assert_close(found, torch.autograd.grad(loss_of(expected), (up, down)))


VARIETY = ("dense", "mod", "mod_qkv_bias", "mod_kv", "mod_gelu_mqa_untied", "mode_staged")


@pytest.mark.parametrize("name", VARIETY)
def test_it_begins_as_the_model(name: str) -> None:
    plain, adapted = make_model(name), adapt(make_model(name))
    tokens = make_tokens(plain.config, 2, 16)
    assert torch.equal(adapted(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("name", VARIETY)
def test_merged_weights_equal_adapters(name: str) -> None:
    model, plain = adapt(make_model(name), learned=True), make_model(name)
    tokens = make_tokens(plain.config, 2, 16)
    weights = {n: v.clone() for n, v in collect_parts(model, [])["model"].items()}
    merged = build_model(plain.config, weights, "here")
    # the table of positions is float32 in a model that is read
    merged.phase_table = model.phase_table
    logits = model(tokens).logits
    torch.testing.assert_close(merged(tokens).logits, logits)
    assert (plain(tokens).logits - logits).abs().max() > 0.1
    frozen = collect_tensors(plain, [])["model"]
    adapted = {f"{path}.weight" for path in list_adapters(model)}
    assert adapted
    assert {n for n, v in weights.items() if not torch.equal(v, frozen[n])} == adapted


@pytest.mark.parametrize("name", ["mod", "mod_kv"])
def test_gradients_are_those_of_the_merged_matrices(name: str) -> None:
    """dL/d(up) = scale · dL/dW · downᵀ, and dL/d(down) = scale · upᵀ · dL/dW."""
    model = adapt(make_model(name), learned=True, lora_alpha=12.0)
    weights = collect_parts(model, [])["model"]
    merged = build_model(model.config, weights, "here")
    merged.phase_table = model.phase_table
    tokens = make_tokens(model.config, 2, 16)
    for each in (model, merged):
        loss_of(each(tokens).logits).backward()
    for path, adapter in list_adapters(model).items():
        grad = merged.get_parameter(f"{path}.weight").grad
        assert grad is not None
        torch.testing.assert_close(adapter.up.grad, 3 * grad @ adapter.down.T)
        torch.testing.assert_close(adapter.down.grad, 3 * adapter.up.T @ grad)
        assert adapter.base.grad is None


@pytest.mark.parametrize(
    ("name", "blocks", "expected"),
    [
        ("mod", "routed", [f"layers.{i}.block.{m}" for i in (1, 3) for m in (*ATTENTION, *MLP)]),
        (
            "mod",
            "all",
            [
                f"layers.{i}.{'block.' if i % 2 else ''}{m}"
                for i in range(4)
                for m in (*ATTENTION, *MLP)
            ],
        ),
        # of experts, attention alone
        ("mode_staged", "routed", [f"layers.{i}.block.{m}" for i in (1, 3) for m in ATTENTION]),
    ],
)
def test_adapters_are_on_the_chosen_matrices_and_train(
    name: str, blocks: str, expected: list[str]
) -> None:
    model = adapt(Transformer(make_config(name)), lora_blocks=blocks)
    assert sorted(list_adapters(model)) == sorted(expected)
    own = {f"{path}.{part}" for path in expected for part in ("down", "up")}
    deciders = {n for n, _ in model.named_parameters() if ".router." in n or ".predictor." in n}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == own | deciders
    (adamw,) = make_optimizers(model, Recipe(optimizer="adamw"))
    # state for what learns, and for nothing else
    tokens = make_tokens(model.config, 2, 17)
    compute_loss(model, tokens[:, :-1], tokens[:, 1:]).total.backward()
    adamw.step()
    named = {id(p): n for n, p in model.named_parameters()}
    assert {named[id(p)] for p in adamw.state} == own | deciders


def test_rates_of_adapters() -> None:
    model = adapt(Transformer(make_config("mod")))
    groups = {name: {id(p) for p in params} for name, params in group_parameters(model).items()}
    assert groups["matrices"] == set()
    for adapter in list_adapters(model).values():
        assert id(adapter.down) in groups["heads"]
        assert id(adapter.up) in groups["others"]


def test_scale_and_first_values() -> None:
    scales = []
    for alpha in (None, 4.0, 1.0):
        model = adapt(Transformer(make_config("mod")), lora_alpha=alpha)
        scales.append({adapter.scale for adapter in list_adapters(model).values()})
    assert scales == [{2.0}, {1.0}, {0.25}]
    first, again, other = (
        list_adapters(adapt(Transformer(make_config("mod", width=256)), seed=seed))
        for seed in (0, 0, 1)
    )
    for path, adapter in first.items():
        assert torch.equal(adapter.down, again[path].down)
        assert not torch.equal(adapter.down, other[path].down)
        size = adapter.down.shape[1] ** -0.5
        assert 0.7 * size < float(adapter.down.detach().std()) < 1.4 * size
    untouched = Transformer(make_config("mod"))
    add_adapters(untouched, Recipe(trainable="routers"))
    assert not list_adapters(untouched)


def test_parts_go_back_into_another_model() -> None:
    model, other = adapt(make_model("mod"), learned=True), adapt(make_model("mod", seed=3))
    restore_parts(other, [], collect_parts(model, []))
    ours, theirs = (collect_tensors(each, [])["model"] for each in (model, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.compile
@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "by_block"])
@pytest.mark.parametrize("name", ["mod", "mod_kv"])
def test_compiled_steps_have_the_same_losses(
    name: str, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # traced whole, as for inductor, which takes minutes for this
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    losses = []
    for compiled in (False, True):
        model = make_model(name, dtype=torch.float32)
        if compiled and blocks:
            parallel.compile_layers(model, backend="eager")
        # after that, as a training does
        adapt(model, learned=True)
        learning = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(learning, lr=0.05)
        step = TrainStep(model, optimizer, compile=compiled and not blocks)
        tokens = make_tokens(model.config, 2, 17)
        found = [step(tokens[:, :-1], tokens[:, 1:]).total for _ in range(3)]
        losses.append(torch.stack(found))
    torch.testing.assert_close(losses[1], losses[0])
    assert losses[0].unique().numel() == 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train.optimizer": "muon"}, "train.trainable = lora needs train.optimizer = adamw"),
        ({"train.lora_rank": 17}, "train.lora_rank = 17 is more than the model's width 16"),
        ({"routing.strategy": "none"}, "train.lora_blocks = routed needs routed blocks"),
    ],
    ids=str,
)
def test_models_that_cannot_be_adapted_are_refused(changes: dict[str, Any], told: str) -> None:
    fields = {**FIELDS, **LORA, **changes}
    with pytest.raises(ValueError, match=told):
        RunConfig.from_overrides(load_preset("tiny"), fields)
    # of no concern where nothing is adapted
    RunConfig.from_overrides(load_preset("tiny"), {**fields, "train.trainable": "all"})


def test_several_processes_are_refused() -> None:
    adapted = Recipe(trainable="lora", optimizer="adamw")
    adapted.check_sharing(1)
    Recipe(trainable="routers").check_sharing(2)
    with pytest.raises(
        ValueError, match="merges whole matrices, which cannot be sharded over 2 GPUs"
    ):
        adapted.check_sharing(2, "GPUs")
