"""Low-rank adapters beside frozen matrices, and how checkpoints store them.

The weights in a checkpoint are plain matrices with the adapters merged in, so other readers need
not know of adapters. The state to resume training from is a separate part.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from depthmix.checkpoint import Parts, collect_tensors, restore_tensors
from depthmix.config import Recipe
from depthmix.kernels import linear
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.nn.block import Block
from depthmix.nn.layers import Linear, add_bias

# the part of a checkpoint that is read only to resume training
PART = "adapters"


class LowRank(nn.Module):
    """W·x + scale · up · (down · x), with W frozen (arXiv:2106.09685, Eq. 3)."""

    def __init__(self, frozen: Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        """Takes over the matrix of `frozen`; `generator` is on the CPU for every device."""
        super().__init__()
        width_out, width_in = frozen.weight.shape
        self.base, self.scale = frozen.weight, scale
        self.register_parameter("bias", frozen.bias)
        first = torch.randn(rank, width_in, generator=generator) * width_in**-0.5
        self.down = nn.Parameter(first.to(frozen.weight))
        # 0, so that it starts out equal to the matrix
        self.up = nn.Parameter(frozen.weight.new_zeros(width_out, rank))

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B F"]:
        added = linear(self.scale * linear(x, self.down), self.up)
        return add_bias(linear(x, self.base) + added, self.bias)

    @property
    def weight(self) -> Float[Tensor, "F D"]:
        """The merged matrix, for code that needs some of its rows."""
        return self.base + self.scale * (self.up @ self.down)

    @torch.no_grad()
    def merge(self) -> Float[Tensor, "F D"]:
        """The merged matrix in float32 on the CPU: the device may lack memory for all of them."""
        base, up, down = (t.cpu() for t in (self.base, self.up, self.down))
        return base + self.scale * (up @ down)


def add_adapters(model: Transformer, recipe: Recipe) -> None:
    """Wrap the matrices of the adapted blocks; initial values depend only on the seed.

    Does nothing unless `train.trainable` is lora. Experts are not adapted.
    """
    if recipe.trainable != "lora":
        return
    rank, alpha = recipe.lora_rank, recipe.lora_alpha
    scale = 2.0 if alpha is None else alpha / rank
    generator = torch.Generator().manual_seed(recipe.seed)
    for layer in model.layers:
        block = layer.block if isinstance(layer, MixtureOfDepths) else layer
        if block is layer and recipe.lora_blocks == "routed":
            continue
        assert isinstance(block, Block)
        for part in (block.attention, block.mlp):
            for name, module in list(part.named_children()):
                if isinstance(module, Linear):
                    setattr(part, name, LowRank(module, rank, scale, generator))


def list_adapters(model: nn.Module) -> dict[str, LowRank]:
    """A model's adapters by the names of their matrices."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LowRank)}


def collect_parts(model: Transformer, optimizers: Sequence[Optimizer]) -> Parts:
    """`collect_tensors` with merged matrices, and another part with the unmerged tensors."""
    parts = collect_tensors(model, optimizers)
    weights, kept = parts["model"], {}
    for path, adapter in list_adapters(model).items():
        for name in ("base", "down", "up"):
            kept[f"{path}.{name}"] = weights.pop(f"{path}.{name}")
        weights[f"{path}.weight"] = adapter.merge()
    return {**parts, PART: kept} if kept else parts


def restore_parts(model: Transformer, optimizers: Sequence[Optimizer], parts: Parts) -> None:
    """Inverse of `collect_parts`; ignores the merged matrices."""
    merged = {f"{path}.weight" for path in list_adapters(model)}
    weights = {name: value for name, value in parts["model"].items() if name not in merged}
    weights |= parts.get(PART, {})
    restore_tensors(model, optimizers, {**parts, "model": weights})
