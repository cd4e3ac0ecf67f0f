"""Models of `variants` as transformers has them; asserts nothing."""

from typing import Any

import torch
from torch import Tensor

from depthmix.hf import DepthmixConfig, DepthmixForCausalLM
from variants import make_config, make_model


def make_hf_model(
    name: str, *, dtype: torch.dtype = torch.float64, **overrides: Any
) -> DepthmixForCausalLM:
    """A variant in evaluation mode, with a selector where it has no causal head."""
    config = make_config(name, **overrides)
    selector = "all" if config.routing.strategy == "stochastic" else None
    model = DepthmixForCausalLM(DepthmixConfig.from_model_config(config, selector=selector))
    model.model = make_model(config, dtype=dtype)
    return model.eval()


def pad_left(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask; the padding's own id is a real token's."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), 7)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, longest - len(row) :] = row
        mask[number, longest - len(row) :] = 1
    return ids, mask
