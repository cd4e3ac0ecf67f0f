"""Optimisers for a model: the learning rate of each parameter, and of each step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from depthmix.config import BASE_WIDTH, Recipe
from depthmix.nn import Transformer
from depthmix.nn.router import Predictor, Router
from depthmix.train.lora import list_adapters
from depthmix.train.muon import Muon

MUON_MOMENTUM = 0.95
# the width at which matrices have the unscaled learning rate
MUON_WIDTH = 256
# modules whose matrices are summed over the width
READERS = (".layers.", ".lookups.")


def group_parameters(model: Transformer) -> dict[str, list[nn.Parameter]]:
    """Parameters grouped by how they are trained; frozen ones are in no group.

    The outputs of the blocks' `matrices` are sums over the width, so their rate falls with it
    (arXiv:2203.03466). The same holds for two groups without weight decay: `heads` (an untied
    output head, and the first matrix of each adapter) and `deciders` (routers and predictors, whose
    scores would drift towards ties). Embeddings and norms (`others`) and the predictors'
    `thresholds` are not summed over the width; nor is an adapter's second matrix, which sums over
    its rank (arXiv:2402.12354). A memory's `tables` have a rate of their own.
    """
    adapters = list_adapters(model).values()
    modules = [m for m in model.modules() if isinstance(m, Router | Predictor)]
    deciders = {id(p) for module in modules for p in module.parameters()}
    heads = {id(adapter.down) for adapter in adapters}
    if not model.config.tied_head:
        heads.add(id(model.head.weight))
    seconds = {id(adapter.up) for adapter in adapters}
    tables = set() if model.ngrams is None else {id(model.ngrams.rows.weight)}
    names = ("matrices", "heads", "deciders", "thresholds", "tables", "others")
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in names}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in deciders:
            groups["deciders" if parameter.ndim > 1 else "thresholds"].append(parameter)
        elif id(parameter) in tables:
            groups["tables"].append(parameter)
        elif id(parameter) in heads:
            groups["heads"].append(parameter)
        elif is_summed(name) and parameter.ndim > 1 and id(parameter) not in seconds:
            groups["matrices"].append(parameter)
        else:
            groups["others"].append(parameter)
    return groups


def is_summed(name: str) -> bool:
    """Whether a parameter is part of a block, or of a memory's reader."""
    return any(part in f".{name}" for part in READERS)


def list_muon(model: Transformer) -> list[nn.Parameter]:
    """The parameters for Muon: matrices, and stacks of experts' matrices."""
    return group_parameters(model)["matrices"]


def check_state(optimizers: Sequence[Optimizer]) -> None:
    """Refuse restored state of another optimiser, such as AdamW's for stacks of experts."""
    for optimizer in optimizers:
        if not isinstance(optimizer, Muon):
            continue
        if any(state.keys() - {"momentum_buffer"} for state in optimizer.state.values()):
            raise ValueError(
                "this checkpoint has AdamW's state for matrices that Muon trains now, as stacks of "
                "experts once were: start a new run from its weights with depthmix train --from"
            )


def make_optimizers(
    model: Transformer, recipe: Recipe, *, capturable: bool = False
) -> list[Optimizer]:
    """The optimisers of a recipe; `set_rates` sets the learning rates before each step.

    `capturable` is for steps recorded as a CUDA graph: rates are then tensors, which each replay
    reads.
    """
    on_gpu = model.embedding.weight.is_cuda
    scale = BASE_WIDTH / model.config.width if recipe.scale_by_width else 1.0
    scales = {"matrices": scale, "heads": scale, "others": 1.0}
    factor = recipe.router_rate_factor
    scales |= {"deciders": scale * factor, "thresholds": factor}
    scales["tables"] = recipe.memory_rate_factor
    groups = {name: params for name, params in group_parameters(model).items() if params}
    optimizers: list[Optimizer] = []
    if recipe.optimizer == "muon":
        matrices = groups.pop("matrices", [])
        if not matrices:
            raise ValueError("train.optimizer = muon has no matrix to train here: use adamw")
        # its updates have the same size in all directions: outputs change by √width, not by width
        by_root = math.sqrt(MUON_WIDTH / model.config.width)
        group = {"params": matrices, "scale": by_root if recipe.scale_by_width else 1.0}
        optimizers.append(Muon([group], weight_decay=recipe.weight_decay, momentum=MUON_MOMENTUM))
    optimizers.append(
        torch.optim.AdamW(
            [
                {
                    "params": params,
                    "scale": scales[name],
                    "weight_decay": recipe.weight_decay if name == "matrices" else 0.0,
                }
                for name, params in groups.items()
                if params
            ],
            betas=(recipe.beta1, recipe.beta2),
            fused=on_gpu,
            capturable=capturable,
        )
    )
    if capturable:
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["lr"] = torch.tensor(0.0, device=model.embedding.weight.device)
    return optimizers


def set_rates(optimizers: Sequence[Optimizer], recipe: Recipe, step: int, num_steps: int) -> float:
    """Set every group's learning rate for `step`; returns the unscaled rate."""
    rate = recipe.learning_rate * recipe.rate_at(step, num_steps)
    for group in (g for optimizer in optimizers for g in optimizer.param_groups):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group["scale"])
        else:
            group["lr"] = rate * group["scale"]
    return rate
