"""Distillation: how far a model is from its teacher on the same tokens.

By its predictions, and by its residual stream after each block.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthmix.config import RunConfig
from depthmix.models import StoredModel
from depthmix.nn import Transformer
from depthmix.nn.losses import IGNORE
from depthmix.nn.transformer import Hidden

# compute the logits of this many tokens at a time, for both models
CHUNK_TOKENS = 2048


class Distillation:
    """A frozen teacher and the weights of its losses."""

    def __init__(self, teacher: Transformer, weight: float, hidden_weight: float = 0.0) -> None:
        """`hidden_weight` is of the residual streams, for which the teacher needs our shape."""
        self.teacher, self.weight = teacher.requires_grad_(False).eval(), weight
        self.hidden_weight = hidden_weight

    @property
    def keeps_streams(self) -> bool:
        """Whether the streams after each block are needed."""
        return self.hidden_weight > 0

    def compute_loss(
        self,
        hidden: Hidden,
        head: Float[Tensor, "V D"],
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        document_ids: Int[Tensor, "B T"] | None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""] | None]:
        """The weighted losses: the predictions', and the streams' if they are compared."""
        with torch.no_grad():
            known = self.teacher.compute_hidden(
                tokens, document_ids=document_ids, keeps_streams=self.keeps_streams
            )
        mean = mean_divergence(hidden.hidden, head, known.hidden, self.teacher.head.weight, targets)
        if not self.keeps_streams:
            return self.weight * mean, None
        distance = mean_distance(hidden.streams, known.streams, targets)
        return self.weight * mean, self.hidden_weight * distance


def mean_distance(
    streams: Sequence[Float[Tensor, "B T D"]],
    known: Sequence[Float[Tensor, "B T D"]],
    targets: Int[Tensor, "B T"],
) -> Float[Tensor, ""]:
    """Mean of |x − t|² / |t|² over blocks, and over the targets that are not `IGNORE`.

    Relative for each token: the streams of some are a thousand times as large as those of others.
    """
    present = targets != IGNORE
    means = []
    for own, teacher in zip(streams, known, strict=True):
        wanted = teacher.float()
        square = wanted.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        each = (own.float() - wanted).square().sum(-1) / square
        means.append(each.where(present, 0).sum())
    return torch.stack(means).mean() / present.sum().clamp(min=1)


def mean_divergence(
    hidden: Float[Tensor, "B T D"],
    head: Float[Tensor, "V D"],
    teacher_hidden: Float[Tensor, "B T D2"],
    teacher_head: Float[Tensor, "V D2"],
    targets: Int[Tensor, "B T"],
) -> Float[Tensor, ""]:
    """Mean of KL(teacher ‖ student) in nats over the targets that are not `IGNORE`."""
    flat = (hidden.flatten(0, 1), teacher_hidden.flatten(0, 1), targets.flatten())
    sums = []
    for part in zip(*(tensor.split(CHUNK_TOKENS) for tensor in flat), strict=True):
        # recomputed in the backward pass: not all logits would fit in memory
        sums.append(
            checkpoint(
                _add_divergence,
                head,
                teacher_head,
                *part,
                use_reentrant=False,
                # nothing here is random, and reading the RNG state breaks CUDA graph capture
                preserve_rng_state=False,
            )
        )
    return torch.stack(sums).sum() / (targets != IGNORE).sum().clamp(min=1)


def _add_divergence(
    head: Tensor, teacher_head: Tensor, hidden: Tensor, teacher_hidden: Tensor, targets: Tensor
) -> Tensor:
    logs = (hidden @ head.to(hidden.dtype).T).float().log_softmax(-1)
    known = (teacher_hidden @ teacher_head.to(teacher_hidden.dtype).T).float().log_softmax(-1)
    each = (known.exp() * (known - logs)).sum(-1)
    return each.where(targets != IGNORE, 0).sum()


def open_distillation(source: StoredModel, run: RunConfig, device: torch.device) -> Distillation:
    """The teacher of a run on its device; refuses one that does not fit."""
    config = source.config
    if config.vocab_size != run.model.vocab_size:
        raise ValueError(
            f"train.teacher = {run.train.teacher} has {config.vocab_size} ids, but this model has "
            f"{run.model.vocab_size}: a teacher needs the same vocabulary"
        )
    if config.max_seq_len < run.seq_len:
        raise ValueError(
            f"train.teacher = {run.train.teacher} has {config.max_seq_len} positions: use "
            f"train.seq_len={config.max_seq_len} or less"
        )
    shapes = [(each.num_layers, each.width) for each in (config, run.model)]
    if run.train.hidden_loss_weight and shapes[0] != shapes[1]:
        (depth, width), (own_depth, own_width) = shapes
        raise ValueError(
            f"train.teacher = {run.train.teacher} has {depth} blocks of width {width}, but this "
            f"model has {own_depth} of width {own_width}: train.hidden_loss_weight compares blocks"
        )
    weights = (run.train.distill_loss_weight, run.train.hidden_loss_weight)
    return Distillation(source.network.to(device), *weights)
