"""One transformer block: attention, then an MLP or experts. Returns its update.

The caller adds the update to the residual, so this file knows nothing of routing over depth.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from depthmix.config import ModelConfig
from depthmix.nn.attention import Attention, AttentionCache, Memory, Place
from depthmix.nn.experts import ExpertRouting, Experts
from depthmix.nn.layers import MLP, RMSNorm


class Update(NamedTuple):
    """What a block adds to the residual stream."""

    update: Float[Tensor, "B T D"]
    experts: ExpertRouting | None
    """Its experts' decisions, if it has experts."""


class Block(nn.Module):
    """f(x) = a + mlp(norm(x + a)) with a = attention(norm(x))."""

    def __init__(self, config: ModelConfig, *, experts: bool = False) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.norm_mlp = RMSNorm(config.width, config.norm_eps)
        self.mlp = (
            Experts(config) if experts else MLP(config.width, config.shape.mlp_width, config.mlp)
        )

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        place: Place,
        *,
        selector: str | None = None,
        memory: Memory | None = None,
        cache: AttentionCache | None = None,
    ) -> Update:
        if memory is not None:
            memory = Memory(self.norm_attention(memory.x), memory.place, memory.weight)
        mixed_BTD = self.attention(self.norm_attention(x), place, memory=memory, cache=cache)
        x_BTD = self.norm_mlp(x + mixed_BTD)
        if isinstance(self.mlp, Experts):
            out_BTD, expert_routing = self.mlp(
                x_BTD,
                place.valid,
                selector,
                decoding=cache is not None,
                compact=cache is not None and cache.compact,
            )
            return Update(mixed_BTD + out_BTD, expert_routing)
        return Update(mixed_BTD + self.mlp(x_BTD), None)
