"""Validation: its batches, losses under each relevant selector, and router statistics."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.data.loader import Batch, Loader
from depthmix.data.shards import Corpus
from depthmix.nn import Transformer
from depthmix.nn.losses import IGNORE, routing_loss, token_loss
from depthmix.nn.routing import Routing
from depthmix.nn.transformer import Hidden
from depthmix.runs.losses import name_metric

# compute the logits of this many tokens at a time
CHUNK_TOKENS = 4096

TokenBatch = tuple[Int[Tensor, "B T"], Int[Tensor, "B T"], Int[Tensor, "B T"] | None]


def make_val_loader(corpus: Corpus, shape: dict[str, Any]) -> Loader | None:
    """The validation split in its own order; None if it is shorter than one row."""
    split = corpus.split("val")
    if split.num_tokens <= shape["seq_len"]:
        return None
    return Loader(split, **shape, shuffle=False)


def read_val_batches(loader: Loader, num_batches: int) -> Iterator[Batch]:
    """The first batches, the same every time, at least one and at most an epoch."""
    loader.position = 0
    for _ in range(min(num_batches, max(1, loader.num_rows_per_epoch // loader.batch_size))):
        yield loader.next()


@torch.no_grad()
def validate(
    run_model: Callable[..., Any],
    config: ModelConfig,
    batches: Iterable[TokenBatch],
    precision: torch.dtype | None,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Mean losses over the batches, under the training rule and under the causal selector.

    A dense model has one `loss`; a routed one has `loss_topk` and, with a trained causal head,
    `loss_causal`, the head's precision, recall and fraction routed, and `dead_share`, the fraction
    of tokens that no block kept. Also returns the gates of the kept tokens, one tensor per routed
    block. `run_model` is a `Root`, which calls a function with the model.
    """
    selectors = {name_metric(rule): selector for rule, selector in config.list_rules().items()}
    sums: dict[str, Tensor] = {}
    weights: list[list[Tensor]] = [[] for _ in config.routed_layers]
    count = 0
    for batch in batches:
        count += 1
        for name, selector in selectors.items():
            loss, hidden = run_model(look_at_batch, *batch, selector, precision)
            add(sums, name, loss)
            if selector is not None:
                continue
            scored = routing_loss(config, hidden.routings, hidden.expert_routings)
            for part, value in describe_routing(scored).items():
                add(sums, part, value)
            for found, routing in zip(weights, hidden.routings, strict=True):
                found.append(routing.weight[routing.valid].float())
            if hidden.routings:
                add(sums, "dead_share", _count_dead(hidden.routings))
    assert count > 0, "there is nothing to validate on"
    means = {name: total / count for name, total in sums.items()}
    return means, [torch.cat(parts) for parts in weights]


def look_at_batch(
    model: Transformer,
    tokens: Int[Tensor, "B T"],
    targets: Int[Tensor, "B T"],
    documents: Int[Tensor, "B T"] | None,
    selector: str | None,
    precision: torch.dtype | None,
) -> tuple[Float[Tensor, ""], Hidden]:
    """Mean loss of a batch under a selector, computed a few rows at a time."""
    kind = tokens.device.type
    num_rows = max(1, CHUNK_TOKENS // tokens.shape[1])
    with torch.autocast(kind, dtype=precision, enabled=precision is not None):
        hidden = model.compute_hidden(tokens, selector=selector, document_ids=documents)
        parts = zip(hidden.hidden.split(num_rows), targets.split(num_rows), strict=True)
        # weighted by the number of targets, which padding makes uneven
        head = model.head.weight
        losses = [token_loss(h, head, t) * (t != IGNORE).sum() for h, t in parts]
    return torch.stack(losses).sum() / (targets != IGNORE).sum().clamp(min=1), hidden


def add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add to a named sum that may not exist yet."""
    value = value.detach().double()
    sums[name] = sums[name] + value if name in sums else value


def describe_routing(scored: Any) -> dict[str, Tensor]:
    """The parts of a `RoutingLoss` by name: `predictor_precision`, `router_recall`, …"""
    found: dict[str, Tensor] = {}
    for part, value in scored._asdict().items():
        if part == "loss" or value is None:
            continue
        if part == "shares":
            found["router_routed_fraction"] = value.mean()
            continue
        if isinstance(value, Tensor):
            found[f"{part}_loss"] = value
            continue
        found |= {f"{part}_{name}": number for name, number in value._asdict().items()}
    return found


def _count_dead(routings: Sequence[Routing]) -> Float[Tensor, ""]:
    dead = torch.stack([routing.slot < 0 for routing in routings]).all(0)
    present = routings[0].present
    return (dead if present is None else dead[present]).double().mean()
