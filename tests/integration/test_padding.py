"""Padding does not count: it is not seen, not routed, takes no place, and may be a whole row."""

import pytest
import torch

from depthmix.config import num_kept
from depthmix.nn import Transformer
from variants import (
    NAMES,
    gradients_of,
    loss_of,
    make_config,
    make_model,
    make_tokens,
    pad_rows,
    routes_deterministically,
)

LENGTHS = [14, 5, 1]
SELECTORS: list[str | None] = [None, "topk", "predictor", "router", "all"]
CASES = [
    (name, selector)
    for name in NAMES
    for selector in SELECTORS
    if make_config(name).find_selector_problem(selector) is None
]
FIXED_CASES = [
    (name, selector)
    for name, selector in CASES
    if routes_deterministically(name) or selector == "all"
]

# each case once with the checks of shapes at run time, and once without
SIDES = ["left", pytest.param("right", marks=pytest.mark.slow)]


def make_rows(model: Transformer) -> list[torch.Tensor]:
    return [make_tokens(model.config, n, seed=n) for n in LENGTHS]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "selector"), FIXED_CASES)
def test_a_padded_row_gives_what_it_gives_alone(name: str, selector: str | None, side: str) -> None:
    model = make_model(name)
    rows = make_rows(model)
    tokens, documents = pad_rows(rows, side)
    output = model(tokens, selector=selector, document_ids=documents)
    for b, row in enumerate(rows):
        here = documents[b] >= 0
        alone = model(row[None], selector=selector)
        torch.testing.assert_close(output.logits[b, here], alone.logits[0], rtol=0, atol=1e-10)
        for ours, theirs in zip(output.routings, alone.routings, strict=True):
            assert torch.equal(ours.slot[b, here], theirs.slot[0])
            if ours.target is not None and theirs.target is not None:
                assert torch.equal(ours.target[b, here], theirs.target[0])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "selector"), CASES)
def test_padding_is_never_routed(name: str, selector: str | None, side: str) -> None:
    model = make_model(name)
    tokens, documents = pad_rows(make_rows(model), side)
    present = documents >= 0
    output = model(tokens, selector=selector, document_ids=documents)
    for routing, capacity in zip(output.routings, model.config.capacities, strict=True):
        assert routing.present is not None
        assert torch.equal(routing.present, present)
        for part in (routing, routing.memory):
            if part is None:
                continue
            assert (part.slot[~present] == -1).all()
            assert present.gather(1, part.index)[part.valid].all()
            assert torch.equal(part.weight[~part.valid], torch.zeros_like(part.weight[~part.valid]))
            assert torch.equal((part.slot >= 0).sum(1), part.valid.sum(1))
            if part.target is not None:
                assert not (part.target & ~present).any()
        strategy = model.config.routing.strategy
        if selector in (None, "topk") and strategy in ("expert_choice", "stochastic"):
            expected = [num_kept(capacity, n) for n in LENGTHS]
            assert routing.valid.sum(1).tolist() == expected
    for index, routing in zip(model.config.expert_layers, output.expert_routings, strict=True):
        # inside a routed block the experts see gathered tokens, present where a place is taken
        here = routing.present
        assert here is not None
        assert not routing.kept[~here].any()
        if index not in model.config.routed_layers:
            assert torch.equal(here, present)


@pytest.mark.parametrize(("name", "selector"), FIXED_CASES)
def test_what_stands_in_the_padding_does_not_matter(name: str, selector: str | None) -> None:
    model = make_model(name)
    tokens, documents = pad_rows(make_rows(model), "left")
    present = documents >= 0
    other = torch.where(present, tokens, (tokens + 11) % model.config.vocab_size)
    first = model(tokens, selector=selector, document_ids=documents).logits
    second = model(other, selector=selector, document_ids=documents - 5 * ~present).logits
    torch.testing.assert_close(first[present], second[present], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("selector", [None, "all"])
def test_an_all_padding_row_is_harmless(name: str, selector: str | None) -> None:
    model = make_model(name)
    tokens, documents = pad_rows(make_rows(model), "right")
    documents[1] = -1
    output = model(tokens, selector=selector, document_ids=documents)
    assert output.logits.isfinite().all()
    loss_of(output.logits[documents >= 0]).backward()
    for parameter, grad in gradients_of(model).items():
        assert grad is None or grad.isfinite().all(), parameter
    for routing in output.routings:
        assert not routing.valid[1].any()
        assert routing.weight.isfinite().all()


@pytest.mark.parametrize("name", ["mod", "token_choice", "moe_expert_choice", "mode_staged"])
def test_gradients_of_a_padded_batch_are_the_sum_over_its_rows(name: str) -> None:
    model = make_model(name)
    rows = make_rows(model)
    tokens, documents = pad_rows(rows, "left")
    model(tokens, document_ids=documents).logits[documents >= 0].square().sum().backward()
    together = {k: g.clone() for k, g in gradients_of(model).items() if g is not None}
    model.zero_grad()
    for row in rows:
        model(row[None]).logits.square().sum().backward()
    for parameter, grad in gradients_of(model).items():
        if grad is not None:
            scale = grad.abs().max().item()
            torch.testing.assert_close(
                together[parameter], grad, rtol=0, atol=1e-11 * scale, msg=parameter
            )
