"""Every loss, as a pure function of outputs: language model, causal heads, load balance.

Routing losses come with what they mean: precision, recall and the share routed, because accuracy
alone misleads (always skipping is right for 87.5 % of tokens at capacity 0.125).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthmix.config import ExpertsConfig, ModelConfig
from depthmix.nn.experts import ExpertRouting
from depthmix.nn.routing import Routing

IGNORE = -100


class HeadLoss(NamedTuple):
    """How well a causal head foretells top-k membership."""

    loss: Float[Tensor, ""]
    precision: Float[Tensor, ""]
    """Share of the tokens it would route that top-k keeps."""
    recall: Float[Tensor, ""]
    """Share of the tokens that top-k keeps that it would route."""
    routed_fraction: Float[Tensor, ""]
    """Share of all tokens that it would route."""


class RoutingLoss(NamedTuple):
    """The weighted sum to add to the language-model loss, and its parts where they exist."""

    loss: Float[Tensor, ""]
    router: HeadLoss | None = None
    predictor: HeadLoss | None = None
    balance: Float[Tensor, ""] | None = None
    expert_router: HeadLoss | None = None
    expert_predictor: HeadLoss | None = None
    expert_balance: Float[Tensor, ""] | None = None


def language_model_loss(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats over the targets that are not `IGNORE`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)


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
    hit, claim, truth, total = (torch.stack(counts).sum() for counts in (hits, claims, truths, totals))
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
    """All the losses that `config` asks for, weighted and added up; metrics beside them.

    Heads are scored whatever their weight: a head that is not trained on is still worth watching.
    """
    routing, experts = config.routing, config.experts
    parts: dict[str, HeadLoss | Tensor | None] = {}
    every = [*routings, *(r.memory for r in routings if r.memory is not None)]
    terms = []
    if every and every[0].target is not None:
        targets = [r.target for r in every if r.target is not None]
        present = [r.present for r in every]
        router = head_loss([r.logits for r in every], targets, present)
        parts["router"] = router
        terms.append((routing.aux_loss_weight, router.loss))
        predicted = [r.predictor_logits for r in every if r.predictor_logits is not None]
        if predicted:
            predictor = head_loss(predicted, targets, present)
            parts["predictor"] = predictor
            terms.append((routing.predictor_loss_weight, predictor.loss))
    if every and routing.strategy == "token_choice":
        shares = [*config.capacities, *[routing.kv_capacity] * (len(every) - len(routings))]
        balance = torch.stack(
            [_balance_depth(r, share) for r, share in zip(every, shares, strict=True)]
        ).mean()
        parts["balance"] = balance
        terms.append((routing.balance_loss_weight, balance))
    if expert_routings and expert_routings[0].target is not None:
        count = experts.num_experts
        targets = [r.target for r in expert_routings if r.target is not None]
        present = [None if r.present is None else r.present[..., None] for r in expert_routings]
        router = head_loss([r.logits[..., :count] for r in expert_routings], targets, present)
        parts["expert_router"] = router
        terms.append((experts.aux_loss_weight, router.loss))
        predicted = [r.predictor_logits for r in expert_routings if r.predictor_logits is not None]
        if predicted:
            predictor = head_loss(predicted, targets, present)
            parts["expert_predictor"] = predictor
            terms.append((experts.predictor_loss_weight, predictor.loss))
    if expert_routings and experts.strategy == "token_choice":
        shares = expert_shares(experts).to(expert_routings[0].logits.device)
        balance = torch.stack(
            [
                balance_loss(r.logits.softmax(-1), r.chosen, shares, r.present)
                for r in expert_routings
            ]
        ).mean()
        parts["expert_balance"] = balance
        terms.append((experts.balance_loss_weight, balance))
    # a weight of zero leaves the term out, so that its gradient costs nothing
    weighted = [weight * term for weight, term in terms if weight > 0]
    total = torch.stack(weighted).sum() if weighted else torch.zeros(())
    return RoutingLoss(total, **parts)


def expert_shares(experts: ExpertsConfig) -> Float[Tensor, " choices"]:
    """The share of choices that each expert should get; what capacity leaves goes to no-ops."""
    used = experts.capacity / experts.per_token
    if experts.num_noop == 0 or used == 1:
        count = experts.num_experts + experts.num_noop
        return torch.full((count,), 1 / count)
    real = [used / experts.num_experts] * experts.num_experts
    return torch.tensor([*real, *[(1 - used) / experts.num_noop] * experts.num_noop])


def _balance_depth(routing: Routing, capacity: float | None) -> Float[Tensor, ""]:
    """Block and bypass as two choices, with shares C and 1 - C."""
    assert capacity is not None
    inside = routing.logits.sigmoid()
    shares = routing.logits.new_tensor([capacity, max(1 - capacity, 1e-6)])
    chosen = routing.logits > 0
    return balance_loss(
        torch.stack([inside, 1 - inside], dim=-1),
        torch.stack([chosen, ~chosen], dim=-1),
        shares,
        routing.present,
    )
