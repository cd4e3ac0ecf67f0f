"""The language model's loss, as a pure function of outputs; the routing losses are those of nn."""

from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels import linear_cross_entropy, mean_cross_entropy
from depthmix.nn.losses import (
    IGNORE,
    HeadLoss,
    RoutingLoss,
    balance_loss,
    expert_shares,
    head_loss,
    routing_loss,
)

__all__ = [
    "IGNORE",
    "HeadLoss",
    "RoutingLoss",
    "balance_loss",
    "expert_shares",
    "head_loss",
    "language_model_loss",
    "routing_loss",
    "token_loss",
]


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
