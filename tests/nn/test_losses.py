"""Losses by hand: numbers that can be checked with a pencil, and weights that add up."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from depthmix.config import ExpertsConfig, ModelConfig
from depthmix.nn import ExpertRouting, Output, Routing
from depthmix.nn.losses import (
    IGNORE,
    HeadLoss,
    balance_loss,
    expert_shares,
    head_loss,
    language_model_loss,
    routing_loss,
    token_loss,
)
from variants import NAMES, make_config, make_model, make_tokens, pad_rows

CPU = torch.device("cpu")


def test_language_model_loss_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [5.0, 5.0], [9.0, -9.0]]])
    targets = torch.tensor([[1, 0, IGNORE]])
    expected = -(math.log(0.75) + math.log(0.5)) / 2
    assert language_model_loss(logits, targets).item() == pytest.approx(expected, rel=1e-6)


def test_language_model_loss_is_taken_in_float32() -> None:
    logits, targets = torch.randn(2, 3, 50).bfloat16(), torch.randint(50, (2, 3))
    loss = language_model_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, language_model_loss(logits.float(), targets))


@pytest.mark.parametrize("autocast", [False, True])
def test_token_loss_equals_the_loss_of_logits(autocast: bool) -> None:
    hidden = torch.randn(2, 7, 16, requires_grad=True)
    head = torch.randn(30, 16, requires_grad=True)
    targets = torch.randint(30, (2, 7))
    targets[0, 2:5] = IGNORE
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = token_loss(hidden, head, targets)
        expected = language_model_loss(F.linear(hidden, head), targets)
    ours = torch.autograd.grad(found, (hidden, head))
    theirs = torch.autograd.grad(expected, (hidden, head))
    for first, second in zip((found, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(first, second)
    assert not ours[0][0, 2:5].any()


def score(logits: list[list[float]], targets: list[list[int]], present: Any = None) -> HeadLoss:
    here = None if present is None else torch.tensor(present).bool()
    return head_loss([torch.tensor(logits)], [torch.tensor(targets).bool()], [here])


def cross_entropy_by_hand(logit: float, target: int) -> float:
    probability = 1 / (1 + math.exp(-logit))
    return -math.log(probability if target else 1 - probability)


def test_head_loss_by_hand() -> None:
    logits, targets = [[2.0, -1.0, 0.5, -3.0], [1.0, -0.5, -2.0, 0.0]], [[1, 1, 0, 0], [1, 0, 0, 1]]
    found = score(logits, targets)
    each = [
        cross_entropy_by_hand(r, t)
        for row, marks in zip(logits, targets, strict=True)
        for r, t in zip(row, marks, strict=True)
    ]
    assert found.loss.item() == pytest.approx(sum(each) / 8, rel=1e-6)
    # it would route three, of which two are kept; top-k keeps four; 0 is not positive
    assert found.precision.item() == pytest.approx(2 / 3)
    assert found.recall.item() == pytest.approx(2 / 4)
    assert found.routed_fraction.item() == pytest.approx(3 / 8)


def test_head_loss_leaves_padding_out() -> None:
    padded = score([[2.0, -1.0, 9.0, -9.0]], [[1, 1, 0, 1]], [[1, 1, 0, 0]])
    alone = score([[2.0, -1.0]], [[1, 1]])
    for ours, theirs in zip(padded, alone, strict=True):
        assert ours.item() == pytest.approx(theirs.item())
    dirty = score([[2.0, -1.0, math.inf, -math.inf]], [[1, 1, 0, 1]], [[1, 1, 0, 0]])
    assert dirty.loss.item() == pytest.approx(alone.loss.item())


def test_head_loss_counts_blocks_alike() -> None:
    """The loss is the mean of the blocks' means; the rates are over all tokens."""
    logits = [torch.tensor([[1.0, 1.0, 1.0, 1.0]]), torch.tensor([[-1.0]])]
    targets = [torch.tensor([[True, False, False, False]]), torch.tensor([[True]])]
    found = head_loss(logits, targets, [None, None])
    first = (cross_entropy_by_hand(1, 1) + 3 * cross_entropy_by_hand(1, 0)) / 4
    assert found.loss.item() == pytest.approx((first + cross_entropy_by_hand(-1, 1)) / 2, rel=1e-6)
    assert found.precision.item() == pytest.approx(1 / 4)
    assert found.recall.item() == pytest.approx(1 / 2)
    assert found.routed_fraction.item() == pytest.approx(4 / 5)


def test_always_skipping_has_no_recall() -> None:
    targets = [[1] + [0] * 7]
    found = score([[-5.0] * 8], targets)
    assert [found.precision.item(), found.recall.item(), found.routed_fraction.item()] == [0, 0, 0]
    # without any token, nothing is divided by zero
    empty = score([[-5.0] * 8], targets, [[0] * 8])
    assert [value.item() for value in empty] == [0, 0, 0, 0]


def test_balance_loss_is_one_at_balance_and_more_elsewhere() -> None:
    choices = torch.eye(4).bool()[None]
    even = torch.full((1, 4, 4), 0.25)
    shares = torch.full((4,), 0.25)
    assert balance_loss(even, choices, shares, None).item() == pytest.approx(1.0)
    # all four tokens certain of expert 0: the Switch Transformer's N · Σ f·P = 4
    first = torch.zeros(1, 4, 4)
    first[..., 0] = 1
    assert balance_loss(first, first.bool(), shares, None).item() == pytest.approx(4.0)
    skewed = torch.tensor([0.4, 0.3, 0.2, 0.1])
    chosen = torch.zeros(1, 10, 4, dtype=torch.bool)
    for token, expert in enumerate([0, 0, 0, 0, 1, 1, 1, 2, 2, 3]):
        chosen[0, token, expert] = True
    probabilities = skewed.expand(1, 10, 4)
    # f and P follow the shares that are asked for
    assert balance_loss(probabilities, chosen, skewed, None).item() == pytest.approx(1.0)
    by_hand = 4 * (0.16 + 0.09 + 0.04 + 0.01)
    assert balance_loss(probabilities, chosen, shares, None).item() == pytest.approx(by_hand)


def test_balance_loss_leaves_padding_out_and_counts_every_choice() -> None:
    torch.manual_seed(0)
    probabilities = torch.rand(2, 5, 3).softmax(-1)
    chosen = torch.rand(2, 5, 3) < 0.5
    present = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    shares = torch.tensor([0.5, 0.3, 0.2])
    here = present.flatten()
    counts = chosen.flatten(0, 1)[here].double().sum(0)
    mean = probabilities.flatten(0, 1)[here].double().mean(0)
    expected = (counts / counts.sum() * mean / shares).sum().item()
    found = balance_loss(probabilities, chosen, shares, present)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_balance_loss_pushes_probability_from_crowded_choices() -> None:
    logits = torch.zeros(1, 6, 3, requires_grad=True)
    chosen = torch.zeros(1, 6, 3, dtype=torch.bool)
    chosen[..., 0] = True
    balance_loss(logits.softmax(-1), chosen, torch.full((3,), 1 / 3), None).backward()
    assert logits.grad is not None
    # gradient descent lowers the first and raises the others
    assert (logits.grad[..., 0] > 0).all()
    assert (logits.grad[..., 1:] < 0).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_experts": 4}, [0.25] * 4),
        ({"num_experts": 3, "num_noop": 1}, [0.25] * 4),
        ({"num_experts": 2, "num_noop": 2, "capacity": 0.5}, [0.25, 0.25, 0.25, 0.25]),
        ({"num_experts": 2, "num_noop": 1, "capacity": 0.5}, [0.25, 0.25, 0.5]),
        ({"num_experts": 4, "num_noop": 1, "per_token": 2, "capacity": 0.5}, [0.0625] * 4 + [0.75]),
        ({"num_experts": 4, "capacity": 0.5}, [0.25] * 4),
    ],
)
def test_expert_shares(options: dict[str, Any], expected: list[float]) -> None:
    shares = expert_shares(ExpertsConfig(strategy="token_choice", **options), CPU)
    assert shares.tolist() == pytest.approx(expected)
    assert shares.sum().item() == pytest.approx(1.0)


def run(name: str, **overrides: Any) -> tuple[ModelConfig, Output]:
    config = make_config(name, **overrides)
    model = make_model(config, dtype=torch.float32)
    tokens, documents = pad_rows([make_tokens(config, 16), make_tokens(config, 7)], "left")
    return config, model(tokens, document_ids=documents)


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_the_loss_exist_where_they_apply(name: str) -> None:
    config, output = run(name)
    found = routing_loss(config, output.routings, output.expert_routings)
    routing, experts = config.routing, config.experts
    assert (found.router is not None) == routing.has_target
    assert (found.predictor is not None) == routing.has_predictor
    assert (found.balance is not None) == (name in ("token_choice", "token_choice_kv"))
    assert (found.shares is not None) == (name == "token_choice_bias")
    by_experts = experts.strategy == "expert_choice"
    assert (found.expert_router is not None) == by_experts
    assert (found.expert_predictor is not None) == (by_experts and experts.predictor)
    assert (found.expert_balance is not None) == (experts.strategy == "token_choice")
    assert found.loss.isfinite()
    assert found.loss.shape == ()


WEIGHTS = {
    "routing.aux_loss_weight": 0.5,
    "routing.predictor_loss_weight": 0.25,
    "routing.balance_loss_weight": 2.0,
    "experts.aux_loss_weight": 3.0,
    "experts.predictor_loss_weight": 5.0,
    "experts.balance_loss_weight": 7.0,
}


@pytest.mark.parametrize(
    "name", ["mod", "token_choice", "mod_kv", "mode_staged", "mode_staged_token_choice"]
)
def test_loss_is_the_weighted_sum_of_its_parts(name: str) -> None:
    weights = dict(WEIGHTS)
    if name == "token_choice":
        del weights["routing.aux_loss_weight"]
    config, output = run(name, **weights)
    found = routing_loss(config, output.routings, output.expert_routings)
    parts = (
        (config.routing.aux_loss_weight, found.router),
        (config.routing.predictor_loss_weight, found.predictor),
        (config.routing.balance_loss_weight, found.balance),
        (config.experts.aux_loss_weight, found.expert_router),
        (config.experts.predictor_loss_weight, found.expert_predictor),
        (config.experts.balance_loss_weight, found.expert_balance),
    )
    total = 0.0
    for weight, part in parts:
        if part is not None:
            loss = part.loss if isinstance(part, HeadLoss) else part
            assert not loss.requires_grad
            assert loss > 0
            total += weight * loss.item()
    assert found.loss.item() == pytest.approx(total, rel=1e-5)
    assert found.loss.requires_grad


def test_routing_loss_is_zero_without_routing_or_weights() -> None:
    config, output = run("dense")
    found = routing_loss(config, output.routings, output.expert_routings)
    assert found.loss.item() == 0
    assert all(part is None for part in found[1:])
    weightless = {"routing.predictor_loss_weight": 0.0}
    config, output = run("mod", **weightless)
    found = routing_loss(config, output.routings)
    assert found.loss.item() == 0
    # a head that is not trained on is still watched
    assert found.predictor is not None
    assert found.router is not None


def test_heads_are_scored_against_their_own_targets() -> None:
    config, output = run("mod_kv")
    found = routing_loss(config, output.routings)
    deciders = [*output.routings, *[r.memory for r in output.routings if r.memory is not None]]
    assert len(deciders) == 4
    for part, read in (
        (found.router, lambda r: r.logits),
        (found.predictor, lambda r: r.predictor_logits),
    ):
        expected = head_loss(
            [read(r) for r in deciders],
            [r.target for r in deciders if r.target is not None],
            [r.present for r in deciders],
        )
        assert part is not None
        for ours, theirs in zip(part, expected, strict=True):
            assert torch.equal(ours, theirs.detach())


def test_expert_heads_leave_noop_scores_and_padding_out() -> None:
    config, output = run("mode_integrated_expert_choice")
    found = routing_loss(config, output.routings, output.expert_routings).expert_router
    assert found is not None
    losses, claims, total = [], 0, 0
    for routing in output.expert_routings:
        assert routing.target is not None
        assert routing.present is not None
        logits, target = routing.logits[..., :4][routing.present], routing.target[routing.present]
        losses.append(F.binary_cross_entropy_with_logits(logits, target.float()).item())
        claims, total = claims + int((logits > 0).sum()), total + logits.numel()
    assert found.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.routed_fraction.item() == pytest.approx(claims / total)


def make_depth_routing(logits: list[list[float]]) -> Routing:
    scores = torch.tensor(logits)
    index, valid = torch.zeros_like(scores).long(), torch.ones_like(scores).bool()
    return Routing(index, scores, valid, scores, None, index, None, None)


def test_depth_balance_by_hand() -> None:
    """Block and bypass are two choices with shares C and 1 - C."""
    config = make_config("token_choice", num_layers=2, **{"routing.balance_loss_weight": 1.0})
    logits = [[2.0, -1.0, -1.0, -3.0]]
    inside = sum(1 / (1 + math.exp(-r)) for r in logits[0]) / 4
    expected = 0.25 * inside / 0.25 + 0.75 * (1 - inside) / 0.75
    found = routing_loss(config, [make_depth_routing(logits)])
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    crowded = routing_loss(config, [make_depth_routing([[9.0, 9.0, 9.0, 9.0]])])
    assert crowded.loss.item() == pytest.approx(1 / 0.25, rel=1e-3)
    # at capacity 1 the bypass has no share; that is expensive but finite
    config = config.override({"routing.capacity": 1.0})
    assert routing_loss(config, [make_depth_routing(logits)]).loss.isfinite()


def test_decoding_has_no_routing_loss() -> None:
    config, output = run("mod")
    routings = [r._replace(target=None) for r in output.routings]
    found = routing_loss(config, routings)
    assert found.router is None
    assert found.predictor is None
    assert found.loss.item() == 0


def test_expert_balance_counts_choices_before_the_limit() -> None:
    """Choices count also where no place was left, so that the loss sees the crowding."""
    config = make_config("moe_token_choice_limited", **{"experts.balance_loss_weight": 1.0})
    logits = torch.zeros(1, 6, 4)
    chosen = torch.zeros(1, 6, 4, dtype=torch.bool)
    chosen[..., :2] = True
    kept = torch.zeros(1, 6, 4, dtype=torch.bool)
    routing = ExpertRouting(logits, kept, chosen, None, None, None)
    # f = (½, ½, 0, 0), P = ¼ each, shares ¼ each
    assert routing_loss(config, (), [routing]).loss.item() == pytest.approx(1.0)
    sharp = routing._replace(logits=10 * chosen.float())
    assert routing_loss(config, (), [sharp]).loss.item() == pytest.approx(2.0, rel=1e-3)
