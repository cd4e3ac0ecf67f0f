"""Validation against whole logits and counts by hand, under every selector."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from depthmix.data.shards import Corpus
from depthmix.kernels import linear_cross_entropy
from depthmix.nn import Transformer, losses
from depthmix.nn.losses import IGNORE, HeadLoss, RoutingLoss, language_model_loss, routing_loss
from depthmix.train import evaluate
from depthmix.train.evaluate import (
    TokenBatch,
    describe_routing,
    look_at_batch,
    make_val_loader,
    read_val_batches,
    validate,
)
from depthmix.train.step import Root
from tiny_runs import write_data
from variants import (
    NAMES,
    causal_cases,
    make_config,
    make_model,
    make_tokens,
    routes_deterministically,
)

ROUTED = [name for name in NAMES if make_config(name).routed_layers]


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # of three rows of 16 tokens: two at once, then one
    monkeypatch.setattr(evaluate, "CHUNK_TOKENS", 32)


def make_batch(model: Transformer, *, num_rows: int = 3, seed: int = 1) -> TokenBatch:
    """Rows of two documents; what must not be predicted is spread unevenly over them."""
    tokens = make_tokens(model.config, num_rows, 17, seed=seed)
    documents = (torch.arange(16) >= 5 + seed).long().expand(num_rows, 16)
    targets = tokens[:, 1:].clone()
    targets[0, 2:] = IGNORE
    targets[1, 7] = IGNORE
    return tokens[:, :-1], targets, documents


def loss_by_hand(model: Transformer, batch: TokenBatch, selector: str | None) -> Tensor:
    tokens, targets, documents = batch
    logits = model(tokens, selector=selector, document_ids=documents).logits
    return language_model_loss(logits, targets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "selector"), dict.fromkeys([*((name, None) for name in NAMES), *causal_cases()])
)
@torch.no_grad()
def test_losses_are_those_of_the_whole_logits(name: str, selector: str | None) -> None:
    model = make_model(name)
    for batch in (make_batch(model), (*make_batch(model)[:2], None)):
        torch.manual_seed(3)
        found, _ = look_at_batch(model, *batch, selector, None)
        torch.manual_seed(3)
        torch.testing.assert_close(found, loss_by_hand(model, batch, selector))


@pytest.mark.slow
@torch.no_grad()
def test_a_padded_vocabulary_has_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where no logits are kept and none is misaligned."""
    model = make_model(make_config("mod", vocab_size=65), dtype=torch.float32)
    batch = make_batch(model)
    chunked = partial(linear_cross_entropy, chunked=True)
    monkeypatch.setattr(losses, "linear_cross_entropy", chunked)
    found, _ = look_at_batch(model, *batch, None, None)
    torch.testing.assert_close(found, loss_by_hand(model, batch, None))


@torch.no_grad()
def test_rows_without_a_target_count_nothing() -> None:
    model = make_model("mod")
    tokens, targets, documents = make_batch(model)
    targets[2] = IGNORE
    found, _ = look_at_batch(model, tokens, targets, documents, None, None)
    torch.testing.assert_close(found, loss_by_hand(model, (tokens, targets, documents), None))
    nothing = torch.full_like(targets, IGNORE)
    assert look_at_batch(model, tokens, nothing, documents, None, None)[0] == 0


def test_precision_is_autocast() -> None:
    model = make_model("mod", dtype=torch.float32)
    batch = make_batch(model)
    exact, _ = look_at_batch(model, *batch, None, None)
    rounded, _ = look_at_batch(model, *batch, None, torch.bfloat16)
    assert rounded != exact
    assert rounded.item() == pytest.approx(exact.item(), rel=0.05)


@pytest.mark.parametrize("name", [name for name in NAMES if routes_deterministically(name)])
def test_validation_is_the_mean_over_batches(name: str) -> None:
    model = make_model(name)
    config = model.config
    batches = [make_batch(model, num_rows=2 + seed, seed=seed) for seed in range(3)]
    found, gates = validate(Root(model), config, iter(batches), None)
    assert not any(value.requires_grad for value in found.values())
    causal = config.causal_selector
    names = {"loss": None}
    if config.needs_selector_to_decode:
        names = {"loss_topk": None} | ({"loss_causal": causal} if causal else {})
    assert {n for n in found if n.startswith("loss")} == set(names)
    with torch.no_grad():
        for key, selector in names.items():
            losses = [loss_by_hand(model, batch, selector).double() for batch in batches]
            torch.testing.assert_close(found[key], torch.stack(losses).mean())
        outputs = [model(tokens, document_ids=documents) for tokens, _, documents in batches]
    parts = [
        describe_routing(routing_loss(config, out.routings, out.expert_routings)) for out in outputs
    ]
    for key in parts[0]:
        expected = torch.stack([part[key].double() for part in parts]).mean()
        torch.testing.assert_close(found[key], expected)
    assert set(found) == {*names, *parts[0], *(["dead_share"] if config.routed_layers else [])}
    assert len(gates) == len(config.routed_layers)
    for number, gate in enumerate(gates):
        routings = [out.routings[number] for out in outputs]
        torch.testing.assert_close(
            gate, torch.cat([r.weight[r.valid] for r in routings]).float(), rtol=0, atol=0
        )


def spy(model: Transformer) -> tuple[Callable[..., Any], list[str | None]]:
    """A `Root` that also notes who was asked to decide."""
    seen: list[str | None] = []

    def run(function: Callable[..., Any], *args: Any) -> Any:
        assert function is look_at_batch
        # nothing is kept for a backward pass
        assert not torch.is_grad_enabled()
        seen.append(args[3])
        return function(model, *args)

    return run, seen


@pytest.mark.parametrize("name", ROUTED)
def test_the_causal_loss_asks_the_causal_head(name: str) -> None:
    model = make_model(name)
    run, seen = spy(model)
    found, _ = validate(run, model.config, [make_batch(model)], None)
    causal = model.config.causal_selector
    assert seen == [None] + ([] if causal is None else [causal])
    if causal is not None:
        # not the training's rule: the model decides otherwise by itself
        assert found["loss_causal"] != found["loss_topk"]


@pytest.mark.parametrize(
    ("name", "overrides", "selector"),
    [
        ("mod", {}, "predictor"),
        ("mod", {"routing.predictor": False}, None),
        ("mod_aux", {}, "router"),
        ("token_choice", {}, "router"),
        ("stochastic", {}, None),
        ("early_exit", {}, "predictor"),
        ("causal_router", {}, "router"),
        ("moe_expert_choice", {}, "predictor"),
        ("moe_gelu_every_2", {}, "router"),
        # the signs of these untrained routers' scores mean nothing
        ("moe_gelu_every_2", {"experts.aux_loss_weight": 0.0}, None),
        ("mode_staged", {}, "predictor"),
        ("mode_staged", {"experts.predictor": False}, None),
        ("mode_staged", {"routing.predictor": False, "routing.aux_loss_weight": 0.01}, None),
        ("moe_token_choice_limited", {}, "predictor"),
    ],
)
def test_the_causal_selector_is_one_that_was_trained(
    name: str, overrides: dict[str, Any], selector: str | None
) -> None:
    assert make_config(name, **overrides).causal_selector == selector


def test_a_model_without_a_causal_head_has_one_loss() -> None:
    for name in ("stochastic", "mod_unit"):
        model = make_model(make_config(name, **{"routing.predictor": False}))
        found, _ = validate(Root(model), model.config, [make_batch(model)], None)
        assert "loss_topk" in found
        assert not {"loss", "loss_causal"} & set(found)


@pytest.mark.parametrize("name", ROUTED)
def test_dead_tokens_counted_by_hand(name: str) -> None:
    model = make_model(name)
    tokens, targets, documents = make_batch(model)
    torch.manual_seed(3)
    found, _ = validate(Root(model), model.config, [(tokens, targets, documents)], None)
    torch.manual_seed(3)
    routings = model(tokens, document_ids=documents).routings
    alive = {
        (row, int(token))
        for routing in routings
        for row in range(3)
        for token, valid in zip(routing.index[row], routing.valid[row], strict=True)
        if valid
    }
    assert found["dead_share"].item() == pytest.approx(1 - len(alive) / tokens.numel())


def test_padding_is_not_dead() -> None:
    model = make_model("mod")
    tokens, targets, _ = make_batch(model)
    alone, _ = validate(Root(model), model.config, [(tokens[:, :8], targets[:, :8], None)], None)
    documents = (torch.arange(16) >= 8).long().neg().expand(3, 16)
    targets[:, 8:] = IGNORE
    padded, _ = validate(Root(model), model.config, [(tokens, targets, documents)], None)
    assert 0 < alone["dead_share"] < 1
    assert padded.keys() == alone.keys()
    for name, value in padded.items():
        torch.testing.assert_close(value, alone[name], msg=name)


def test_nothing_to_validate_on_is_a_bug() -> None:
    model = make_model("dense")
    with pytest.raises(AssertionError, match="nothing to validate"):
        validate(Root(model), model.config, [], None)


def test_parts_have_the_names_that_docs_use() -> None:
    one = torch.ones(())
    head = HeadLoss(one, one * 2, one * 3, one * 4)
    found = describe_routing(RoutingLoss(one, router=head, balance=one * 5, expert_predictor=head))
    assert {name: value.item() for name, value in found.items()} == {
        "router_loss": 1,
        "router_precision": 2,
        "router_recall": 3,
        "router_routed_fraction": 4,
        "balance_loss": 5,
        "expert_predictor_loss": 1,
        "expert_predictor_precision": 2,
        "expert_predictor_recall": 3,
        "expert_predictor_routed_fraction": 4,
    }
    assert describe_routing(RoutingLoss(one)) == {}


def test_validation_leaves_the_model_alone() -> None:
    model = make_model("mod")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    validate(Root(model), model.config, [make_batch(model)], None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_validations_see_the_same_batches(tmp_path: Path) -> None:
    shape = {"seq_len": 16, "batch_size": 2, "seed": 0}
    corpus = Corpus.open(write_data(tmp_path / "data"))
    loader = make_val_loader(corpus, shape)
    assert loader is not None
    first = list(read_val_batches(loader, 2))
    again = list(read_val_batches(loader, 2))
    assert len(first) == 2
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
    most = loader.num_rows_per_epoch // 2
    assert len(list(read_val_batches(loader, 10**6))) == most
    assert len(list(read_val_batches(loader, 1))) == 1
    assert make_val_loader(corpus, {**shape, "seq_len": 10**6}) is None
