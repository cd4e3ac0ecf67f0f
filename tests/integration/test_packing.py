"""Packed documents: nothing crosses a boundary but the competition for a row's places."""

import pytest
import torch
from torch import Tensor

from depthmix.config import num_kept
from variants import NAMES, causal_cases, make_config, make_model, make_tokens

LENGTHS = [5, 1, 8]
IDS = torch.tensor([[4] * 5 + [0] * 1 + [9] * 8] * 2)
TOTAL = sum(LENGTHS)


@pytest.mark.parametrize(("name", "selector"), causal_cases())
def test_a_document_gives_what_it_gives_alone(name: str, selector: str | None) -> None:
    model = make_model(name)
    tokens = make_tokens(model.config, 2, TOTAL)
    packed = model(tokens, selector=selector, document_ids=IDS).logits
    start = 0
    for length in LENGTHS:
        here = slice(start, start + length)
        alone = model(tokens[:, here], selector=selector).logits
        torch.testing.assert_close(packed[:, here], alone, rtol=0, atol=1e-10)
        start += length


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_crosses_a_boundary(name: str) -> None:
    """Also under top-k: other documents may take a place, but are never attended to."""
    model = make_model(name)
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, out: embedded.append(out.requires_grad_()))
    output = model(make_tokens(model.config, 2, TOTAL), document_ids=IDS)
    for document in (4, 0, 9):
        inside = IDS.eq(document)
        (grad,) = torch.autograd.grad(
            output.logits[inside].square().sum(), embedded[0], retain_graph=True
        )
        assert torch.equal(grad[~inside], torch.zeros_like(grad[~inside]))
        assert (grad[inside].abs().sum(-1) > 0).any()


@pytest.mark.parametrize(
    "name", [n for n in NAMES if make_config(n).routing.strategy in ("expert_choice", "stochastic")]
)
def test_capacity_is_the_rows(name: str) -> None:
    model = make_model(name)
    output = model(make_tokens(model.config, 2, TOTAL), document_ids=IDS)
    for routing, capacity in zip(output.routings, model.config.capacities, strict=True):
        assert (routing.slot >= 0).sum(1).tolist() == [num_kept(capacity, TOTAL)] * 2


def test_documents_may_be_packed_next_to_padding() -> None:
    model = make_model("mod")
    tokens = make_tokens(model.config, 1, TOTAL)
    ids = IDS[:1].clone()
    ids[0, :2], ids[0, -3:] = -1, -1
    found = model(tokens, selector="predictor", document_ids=ids).logits
    for here in (slice(2, 5), slice(5, 6), slice(6, 11)):
        alone = model(tokens[:, here], selector="predictor").logits
        torch.testing.assert_close(found[:, here], alone, rtol=0, atol=1e-10)


def test_an_id_that_comes_back_is_another_document() -> None:
    model = make_model("dense")
    tokens = make_tokens(model.config, 1, 6)
    documents = torch.tensor([[0, 0, 1, 1, 0, 0]])
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % model.config.vocab_size
    logits = [model(t, document_ids=documents).logits[0, :5] for t in (tokens, changed)]
    assert torch.equal(*logits)
    distinct = model(tokens, document_ids=torch.tensor([[0, 0, 1, 1, 2, 2]])).logits
    assert torch.equal(model(tokens, document_ids=documents).logits, distinct)
