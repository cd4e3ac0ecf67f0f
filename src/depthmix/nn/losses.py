"""The losses, as pure functions of outputs: the language model's, causal heads', load balance.

Those of routing come with what they mean: precision, recall and the share routed, because accuracy
alone misleads (always skipping is right for 87.5 % of tokens at capacity 0.125).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthmix.config import STRATEGIES, ExpertsConfig, ModelConfig
from depthmix.kernels import linear_cross_entropy, mean_cross_entropy
from depthmix.nn.experts import ExpertRouting
from depthmix.nn.routing import Routing

# a target that is not predicted
IGNORE = -100


def language_model_loss(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats over the targets that are not `IGNORE`."""
    return mean_cross_entropy(logits.flatten(0, 1), targets.flatten(), IGNORE)


def token_loss(
    hidden: Float[Tensor, "B T D"], head: Float[Tensor, "V D"], targets: Int[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """`language_model_loss` of `hidden @ head.T`, without ever holding all the logits."""
    return linear_cross_entropy(hidden.flatten(0, 1), head, targets.flatten(), IGNORE)


class HeadLoss(NamedTuple):
    """How well a causal head predicts top-k membership."""

    loss: Float[Tensor, ""]
    precision: Float[Tensor, ""]
    """Fraction of the tokens it would route that top-k keeps."""
    recall: Float[Tensor, ""]
    """Fraction of the tokens that top-k keeps that it would route."""
    routed_fraction: Float[Tensor, ""]
    """Fraction of all tokens that it would route."""


class RoutingLoss(NamedTuple):
    """The weighted sum to add to the language-model loss, and its parts where they exist."""

    loss: Float[Tensor, ""]
    router: HeadLoss | None = None
    predictor: HeadLoss | None = None
    balance: Float[Tensor, ""] | None = None
    expert_router: HeadLoss | None = None
    expert_predictor: HeadLoss | None = None
    expert_balance: Float[Tensor, ""] | None = None
    shares: Float[Tensor, " blocks"] | None = None
    """With biases, the share of tokens that chose each routed block; adds no loss."""


def head_loss(
    logits: Sequence[Float[Tensor, "..."]],
    targets: Sequence[Bool[Tensor, "..."]],
    present: Sequence[Bool[Tensor, "..."] | None],
) -> HeadLoss:
    """Binary cross-entropy of logits against membership, over tokens that are not padding.

    Each block gives one tensor of logits and one of targets; blocks count alike.
    """
    losses, hits, claims, truths, totals = [], [], [], [], []
    for logit, target, here in zip(logits, targets, present, strict=True):
        mask = torch.ones_like(target) if here is None else here.expand_as(target)
        total = mask.sum().clamp(min=1)
        each = F.binary_cross_entropy_with_logits(logit, target.to(logit.dtype), reduction="none")
        losses.append(each.where(mask, 0).sum() / total)
        claimed, kept = (logit > 0) & mask, target & mask
        hits.append((claimed & kept).sum())
        claims.append(claimed.sum())
        truths.append(kept.sum())
        totals.append(total)
    hit, claim, truth, total = (
        torch.stack(counts).sum() for counts in (hits, claims, truths, totals)
    )
    return HeadLoss(
        loss=torch.stack(losses).mean(),
        precision=hit / claim.clamp(min=1),
        recall=hit / truth.clamp(min=1),
        routed_fraction=claim / total,
    )


def balance_loss(
    probabilities: Float[Tensor, "B T choices"],
    chosen: Bool[Tensor, "B T choices"],
    shares: Float[Tensor, " choices"],
    present: Bool[Tensor, "B T"] | None,
) -> Float[Tensor, ""]:
    """Σ_j f_j·P_j / share_j: 1 when every choice gets the share of tokens it should.

    f_j is the share that chose j, P_j its mean probability; for equal shares this is the Switch
    Transformer's loss (arXiv:2101.03961, Eq. 4).
    """
    mask = torch.ones_like(chosen[..., :1]) if present is None else present[..., None]
    total = mask.sum().clamp(min=1)
    counts = (chosen & mask).sum(dim=(0, 1)).to(probabilities.dtype)
    frequency = counts / counts.sum().clamp(min=1)
    mean = (probabilities * mask).sum(dim=(0, 1)) / total
    return (frequency * mean / shares).sum()


def routing_loss(
    config: ModelConfig,
    routings: Sequence[Routing],
    expert_routings: Sequence[ExpertRouting] = (),
) -> RoutingLoss:
    """All the losses that `config` asks for, weighted and added up; its parts beside it, detached.

    Heads are scored at any weight: a head that is not trained on is still worth watching.
    """
    routing, experts = config.routing, config.experts
    deciders = [*routings, *(r.memory for r in routings if r.memory is not None)]
    choices = list(expert_routings)
    router = predictor = expert_router = expert_predictor = balance = expert_balance = None
    if deciders and routing.has_target:
        present = [r.present for r in deciders]
        router, predictor = _score_heads(
            [r.logits for r in deciders], [r.predictor_logits for r in deciders], deciders, present
        )
    depth_shares = None
    if deciders and routing.has_bias:
        depth_shares = torch.stack([_count_chosen(r) for r in deciders])
    elif deciders and STRATEGIES[routing.strategy].is_balanced:
        shares = [*config.capacities, *[routing.kv_capacity] * (len(deciders) - len(routings))]
        balances = [_balance_depth(r, share) for r, share in zip(deciders, shares, strict=True)]
        balance = torch.stack(balances).mean()
    if choices and experts.has_target:
        present = [None if r.present is None else r.present[..., None] for r in choices]
        logits = [r.logits[..., : experts.num_experts] for r in choices]
        expert_router, expert_predictor = _score_heads(
            logits, [r.predictor_logits for r in choices], choices, present
        )
    if choices and experts.tokens_choose:
        shares = expert_shares(experts, choices[0].logits.device)
        expert_balance = torch.stack(
            [balance_loss(r.logits.softmax(-1), r.chosen, shares, r.present) for r in choices]
        ).mean()
    terms = [
        (routing.aux_loss_weight, _loss_of(router)),
        (routing.predictor_loss_weight, _loss_of(predictor)),
        (routing.balance_loss_weight, balance),
        (experts.aux_loss_weight, _loss_of(expert_router)),
        (experts.predictor_loss_weight, _loss_of(expert_predictor)),
        (experts.balance_loss_weight, expert_balance),
    ]
    # a weight of zero leaves the term out, so that its gradient costs nothing
    weighted = [weight * term for weight, term in terms if term is not None and weight > 0]
    return RoutingLoss(
        loss=torch.stack(weighted).sum() if weighted else torch.zeros(()),
        router=_detach(router),
        predictor=_detach(predictor),
        balance=None if balance is None else balance.detach(),
        expert_router=_detach(expert_router),
        expert_predictor=_detach(expert_predictor),
        expert_balance=None if expert_balance is None else expert_balance.detach(),
        shares=depth_shares,
    )


def expert_shares(experts: ExpertsConfig, device: torch.device) -> Float[Tensor, " choices"]:
    """The share of choices that each expert should get; what capacity leaves goes to no-ops."""
    used = experts.capacity / experts.per_token
    if experts.num_noop == 0 or used == 1:
        count = experts.num_experts + experts.num_noop
        return torch.full((count,), 1 / count, device=device)
    real = torch.full((experts.num_experts,), used / experts.num_experts, device=device)
    noop = torch.full((experts.num_noop,), (1 - used) / experts.num_noop, device=device)
    return torch.cat([real, noop])


def _score_heads(
    logits: Sequence[Tensor],
    predicted: Sequence[Tensor | None],
    routings: Sequence[Routing | ExpertRouting],
    present: Sequence[Tensor | None],
) -> tuple[HeadLoss | None, HeadLoss | None]:
    """Router and predictor against the top-k of the same forward pass, where it is known."""
    targets = [r.target for r in routings if r.target is not None]
    if len(targets) < len(routings):
        return None, None
    known = [p for p in predicted if p is not None]
    predictor = head_loss(known, targets, present) if known else None
    return head_loss(logits, targets, present), predictor


def _balance_depth(routing: Routing, capacity: float | None) -> Float[Tensor, ""]:
    """Block and bypass as two choices, with shares C and 1 - C."""
    assert capacity is not None
    inside, chosen = routing.logits.sigmoid(), routing.logits > 0
    shares = [torch.full_like(inside[0, :1], s) for s in (capacity, max(1 - capacity, 1e-6))]
    return balance_loss(
        torch.stack([inside, 1 - inside], dim=-1),
        torch.stack([chosen, ~chosen], dim=-1),
        torch.cat(shares),
        routing.present,
    )


def _count_chosen(routing: Routing) -> Float[Tensor, ""]:
    """Share of tokens with a positive score, whether or not there was a place for them."""
    chosen_BT = routing.logits.detach() > 0
    if routing.present is None:
        return chosen_BT.float().mean()
    return (chosen_BT & routing.present).sum() / routing.present.sum().clamp(min=1)


def _loss_of(head: HeadLoss | None) -> Tensor | None:
    return None if head is None else head.loss


def _detach(head: HeadLoss | None) -> HeadLoss | None:
    if head is None:
        return None
    return HeadLoss(head.loss.detach(), head.precision, head.recall, head.routed_fraction)
