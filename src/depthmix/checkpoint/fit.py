"""Weights of one configuration for another that routes elsewhere, or not at all.

Owns what a block's tensors are called with and without a router around it, and how routers begin
that no training has seen. Knows nothing of files.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.nn import Transformer

# a routed block's own tensors are one level deeper than a dense one's
_ROUTED_BLOCK = re.compile(r"^(layers\.\d+\.)block\.")
_DECIDER = re.compile(r"^layers\.\d+\.(kv_)?decider\.")

# what a predictor that has seen nothing says of every token: keep it
KEEP_LOGIT = 1.0


class Fitted(NamedTuple):
    """Weights for a configuration, and what had to be made or left."""

    weights: dict[str, Tensor]
    new: tuple[str, ...]
    """Routers and predictors that begin here."""
    left: tuple[str, ...]
    """Those of blocks that no longer route."""


def fit_weights(
    config: ModelConfig, weights: Mapping[str, Tensor], origin: Path | str, seed: int = 0
) -> Fitted:
    """The tensors of `config`, taken from those of a model that may route elsewhere.

    Only routers and predictors may be new or left out. A new router has `routing.init_std`; a new
    predictor keeps every token, so that a model that was dense samples as it did.
    """
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in Transformer(config).state_dict().items()}
    given = {_ROUTED_BLOCK.sub(r"\1", name): value for name, value in weights.items()}
    if config.tied_head:
        # a tied head has no tensor of its own
        del wanted["head.weight"]
        _drop_tied_head(given, origin)
    elif "head.weight" not in given and "embedding.weight" in given:
        given["head.weight"] = given["embedding.weight"].clone()
    generator = torch.Generator().manual_seed(seed)
    fitted, new = {}, []
    for name, shape in wanted.items():
        plain = _ROUTED_BLOCK.sub(r"\1", name)
        if plain in given:
            value = given.pop(plain)
        elif _DECIDER.match(name):
            value = _start_decider(config, name, shape, generator)
            new.append(name)
        else:
            raise ValueError(f"{origin} has no '{plain}', which this model needs")
        if value.shape != shape:
            raise ValueError(
                f"'{plain}' of {origin} is {tuple(value.shape)} and this model's is "
                f"{tuple(shape)}: only fields of routing may be changed"
            )
        fitted[name] = value
    extra = [name for name in given if not _DECIDER.match(name)]
    if extra:
        raise ValueError(
            f"{origin} has '{extra[0]}', which this model has not: only fields of routing may be "
            f"changed"
        )
    return Fitted(fitted, tuple(new), tuple(given))


def _drop_tied_head(given: dict[str, Tensor], origin: Path | str) -> None:
    head, embedding = given.pop("head.weight", None), given.get("embedding.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(f"{origin} has a head of its own: leave out tied_head=true")


def _start_decider(
    config: ModelConfig, name: str, shape: torch.Size, generator: torch.Generator
) -> Tensor:
    part = name.split("decider.")[1]
    if part == "predictor.w_out.bias":
        return torch.full(shape, KEEP_LOGIT)
    if part == "predictor.w_out.weight":
        return torch.zeros(shape)
    std = config.routing.init_std if part == "router.weight" else shape[1] ** -0.5
    return std * torch.randn(shape, generator=generator)
