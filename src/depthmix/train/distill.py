"""Distillation: the divergence from a teacher's predictions on the same tokens."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthmix.config import RunConfig
from depthmix.models import StoredModel
from depthmix.nn import Transformer
from depthmix.nn.losses import IGNORE

# compute the logits of this many tokens at a time, for both models
CHUNK_TOKENS = 2048


class Distillation:
    """A frozen teacher and the weight of its loss."""

    def __init__(self, teacher: Transformer, weight: float) -> None:
        self.teacher, self.weight = teacher.requires_grad_(False).eval(), weight

    def compute_loss(
        self,
        hidden: Float[Tensor, "B T D"],
        head: Float[Tensor, "V D"],
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        document_ids: Int[Tensor, "B T"] | None,
    ) -> Float[Tensor, ""]:
        """The weighted divergence of the predictions from `hidden` from the teacher's."""
        with torch.no_grad():
            known = self.teacher.compute_hidden(tokens, document_ids=document_ids).hidden
        mean = mean_divergence(hidden, head, known, self.teacher.head.weight, targets)
        return self.weight * mean


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
    """The teacher of a run on its device; refuses one with another vocabulary."""
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
    return Distillation(source.network.to(device), run.train.distill_loss_weight)
