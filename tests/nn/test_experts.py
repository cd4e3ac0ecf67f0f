"""Experts against plain loops over tokens and experts, written without the package's kernels."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthmix.nn.experts import ExpertRouting, Experts
from variants import make_config

LENGTH = 10
EXPERTS = 4

CASES: dict[str, dict[str, Any]] = {
    "expert_choice": {"strategy": "expert_choice", "capacity": 1.0},
    "expert_choice_overlapping": {"strategy": "expert_choice", "capacity": 2.5},
    "expert_choice_noop": {"strategy": "expert_choice", "capacity": 0.5, "num_noop": 2},
    "expert_choice_no_predictor": {"strategy": "expert_choice", "predictor": False},
    "token_choice": {"strategy": "token_choice"},
    "token_choice_two": {"strategy": "token_choice", "per_token": 2, "capacity": 2.0},
    "token_choice_limited": {"strategy": "token_choice", "per_token": 2, "capacity": 0.75},
    "token_choice_noop": {"strategy": "token_choice", "num_noop": 3, "per_token": 2, "capacity": 2},
    "token_choice_noop_limited": {"strategy": "token_choice", "num_noop": 1, "capacity": 0.3},
}


def make_experts(case: str, mlp: str = "swiglu") -> Experts:
    overrides = {f"experts.{name}": value for name, value in CASES[case].items()}
    config = make_config("dense", **{"width": 8, "mlp": mlp, "experts.width": 6, **overrides})
    torch.manual_seed(0)
    experts = Experts(config).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def make_input(padded: bool) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(3, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    if not padded:
        return x, None
    present = torch.ones(3, LENGTH, dtype=torch.bool)
    present[0, :4] = False
    present[1, 7:] = False
    return x, present


def choose_by_loops(experts: Experts, x: Tensor, present: Tensor | None) -> Tensor:
    """The (token, expert) pairs of the training rule."""
    config = experts.config
    probs = (x @ experts.router.weight.T).softmax(-1).tolist()
    here = torch.ones(x.shape[:2], dtype=torch.bool) if present is None else present
    kept = torch.zeros(*x.shape[:2], EXPERTS, dtype=torch.bool)
    for b in range(x.shape[0]):
        tokens = [t for t in range(LENGTH) if here[b, t]]
        if config.strategy == "expert_choice":
            count = math.ceil(config.capacity / EXPERTS * len(tokens))
            for e in range(EXPERTS):
                ranked = sorted(tokens, key=lambda t: -probs[b][t][e])
                kept[b, ranked[:count], e] = True
            continue
        places = math.ceil(config.capacity * len(tokens))
        for t in tokens:
            ranked = sorted(range(len(probs[b][t])), key=lambda e: -probs[b][t][e])
            for e in ranked[: config.per_token]:
                limited = config.capacity < config.per_token
                if e < EXPERTS and (places > 0 or not limited):
                    kept[b, t, e] = True
                    places -= 1
    return kept


def compute_by_loops(experts: Experts, x: Tensor, kept: Tensor) -> Tensor:
    """Σ_e p_e(x) · mlp_e(x), a token and an expert at a time."""
    probs = (x @ experts.router.weight.T).softmax(-1)
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            total = torch.zeros_like(x[b, t])
            for e in range(EXPERTS):
                if kept[b, t, e]:
                    hidden = x[b, t] @ experts.w_in[e]
                    if experts.kind == "gelu":
                        hidden = F.gelu(hidden)
                    else:
                        hidden = F.silu(hidden[:6]) * hidden[6:]
                    total = total + probs[b, t, e] * (hidden @ experts.w_out[e])
            rows.append(total)
    return torch.stack(rows).view_as(x)


def check_against_loops(experts: Experts, x: Tensor, out: Tensor, kept: Tensor) -> None:
    expected = compute_by_loops(experts, x, kept)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    upstream = torch.randn_like(out)
    free = (x, experts.router.weight, experts.w_in, experts.w_out)
    found = torch.autograd.grad((out * upstream).sum(), free)
    truth = torch.autograd.grad((expected * upstream).sum(), free)
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_training_rule_equals_loops(case: str, padded: bool) -> None:
    experts, (x, present) = make_experts(case), make_input(padded)
    out, routing = experts(x, present)
    kept = choose_by_loops(experts, x, present)
    assert torch.equal(routing.kept, kept)
    assert 0 < kept.sum() < kept.numel()
    check_against_loops(experts, x, out, kept)


def test_gelu_experts_equal_loops() -> None:
    experts, (x, _) = make_experts("expert_choice", "gelu"), make_input(False)
    out, routing = experts(x, None)
    check_against_loops(experts, x, out, routing.kept)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("case", "selector"),
    [
        *product(["expert_choice", "expert_choice_noop"], ["router", "predictor", "all"]),
        *product(["expert_choice_no_predictor"], ["router", "all"]),
    ],
)
def test_causal_decision_of_each_expert(case: str, selector: str, padded: bool) -> None:
    """An expert takes a token if its own head's score is positive, whatever the others are."""
    experts, (x, present) = make_experts(case), make_input(padded)
    out, routing = experts(x, present, selector)
    if selector == "router" or experts.predictor is None:
        scores = routing.logits[..., :EXPERTS]
    else:
        assert routing.predictor_logits is not None
        scores = routing.predictor_logits
    wanted = scores > 0
    if present is not None:
        wanted = wanted & present[:, :, None]
    assert torch.equal(routing.kept, wanted)
    assert 0 < wanted.sum() < wanted.numel()
    check_against_loops(experts, x, out, wanted)
    # what the heads learn from is still top-k
    assert routing.target is not None
    assert torch.equal(routing.target, choose_by_loops(experts, x, present))
    assert experts(x, present, selector, decoding=True)[1].target is None


@pytest.mark.parametrize("selector", ["router", "predictor", "all"])
@pytest.mark.parametrize("case", ["token_choice_two", "token_choice_limited", "token_choice_noop"])
def test_token_choice_has_no_limit_under_a_causal_selector(case: str, selector: str) -> None:
    experts, (x, _) = make_experts(case), make_input(False)
    out, routing = experts(x, None, selector)
    own = experts.router(x).topk(experts.config.per_token, dim=-1).indices
    asked = torch.zeros_like(routing.chosen).scatter(2, own, True)
    assert torch.equal(routing.chosen, asked)
    assert torch.equal(routing.kept, asked[..., :EXPERTS])
    check_against_loops(experts, x, out, routing.kept)


def test_topk_selector_is_the_training_rule() -> None:
    for case in CASES:
        experts, (x, present) = make_experts(case), make_input(True)
        trained, by_topk = experts(x, present), experts(x, present, "topk")
        assert torch.equal(trained[0], by_topk[0]), case
        assert torch.equal(trained[1].kept, by_topk[1].kept), case


def test_a_token_that_only_chose_noop_experts_gets_nothing() -> None:
    experts, (x, _) = make_experts("token_choice_noop"), make_input(False)
    out, routing = experts(x, None)
    nothing = routing.chosen[..., EXPERTS:].sum(-1) == 2
    assert nothing.any()
    assert not nothing.all()
    assert torch.equal(out[nothing], torch.zeros_like(out[nothing]))
    assert not routing.kept[nothing].any()
    assert (out[~nothing].abs().sum(-1) > 0).all()
    # a no-op's probability still counts in the softmax: choosing it lowers the others' weights
    assert routing.logits.shape[-1] == EXPERTS + 3


def test_noop_experts_have_no_weights() -> None:
    with_noop, without = make_experts("expert_choice_noop"), make_experts("expert_choice")
    assert with_noop.w_in.shape == without.w_in.shape
    assert with_noop.router.weight.shape[0] == EXPERTS + 2
    assert with_noop.predictor is not None
    assert with_noop.predictor.w_out.out_features == EXPERTS


@pytest.mark.parametrize("selector", [None, "router"])
@pytest.mark.parametrize("case", ["expert_choice", "token_choice_limited"])
def test_padding_takes_no_place_and_gets_nothing(case: str, selector: str | None) -> None:
    experts, (x, present) = make_experts(case), make_input(True)
    assert present is not None
    out, routing = experts(x, present, selector)
    assert not routing.kept[~present].any()
    assert torch.equal(out[~present], torch.zeros_like(out[~present]))
    noise = x.detach().clone()
    noise[~present] = 100.0
    again, _ = experts(noise, present, selector)
    assert torch.equal(again[present], out[present])
    for row in range(3):
        alone, _ = experts(x[row : row + 1, present[row]], None, selector)
        torch.testing.assert_close(alone[0], out[row, present[row]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_padding_give_finite_results(case: str) -> None:
    experts, (x, present) = make_experts(case), make_input(True)
    assert present is not None
    present[2] = False
    out, routing = experts(x, present)
    out.sum().backward()
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert not routing.kept[2].any()
    for parameter in (x, experts.router.weight, experts.w_in, experts.w_out):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_experts_without_tokens_give_finite_results() -> None:
    experts, (x, _) = make_experts("token_choice"), make_input(False)
    experts.router.weight.data[2] = 0
    x = torch.cat([x[..., :7].detach(), torch.full_like(x[..., 7:], 50.0)], dim=-1)
    # every token's score for expert 0 is far above the others
    experts.router.weight.data[:, 7] = torch.tensor([10.0, -1.0, -1.0, -1.0]).double()
    out, routing = experts(x.requires_grad_(), None)
    assert routing.kept[..., 0].all()
    assert not routing.kept[..., 1:].any()
    check_against_loops(experts, x, out, routing.kept)


def test_predictor_sends_no_gradient_to_its_input() -> None:
    experts, (x, _) = make_experts("expert_choice"), make_input(False)
    routing = experts(x, None)[1]
    assert isinstance(routing, ExpertRouting)
    assert routing.predictor_logits is not None
    routing.predictor_logits.sum().backward()
    assert x.grad is None
    assert experts.predictor is not None
    assert experts.predictor.w_in.weight.grad is not None


def test_bf16_experts_keep_scores_in_float32() -> None:
    experts, (x, _) = make_experts("expert_choice"), make_input(False)
    out, routing = experts.bfloat16()(x.bfloat16(), None)
    assert out.dtype == torch.bfloat16
    assert routing.logits.dtype == torch.float32
    assert routing.predictor_logits is not None
    assert routing.predictor_logits.dtype == torch.float32


def test_autocast_computes_the_products_in_bf16() -> None:
    experts, (x, _) = make_experts("expert_choice"), make_input(False)
    experts, x = experts.float(), x.detach().float()
    plain, routing = experts(x, None)
    with torch.autocast("cpu", torch.bfloat16):
        out, cast_routing = experts(x, None)
    assert torch.equal(cast_routing.logits, routing.logits)
    assert torch.equal(cast_routing.kept, routing.kept)
    assert not torch.equal(out, plain)
    torch.testing.assert_close(out, plain, rtol=0.05, atol=0.3)
