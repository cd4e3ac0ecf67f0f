"""The initial weights of a training run: another model's, and which of them to train."""

from collections.abc import Mapping

import torch
from torch import Tensor

from depthmix.checkpoint import collect_tensors
from depthmix.checkpoint.weights import fit_weights
from depthmix.models import StoredModel
from depthmix.nn import Transformer
from depthmix.nn.router import Predictor, Router


@torch.no_grad()
def load_start(model: Transformer, source: StoredModel, seed: int) -> str:
    """Load the weights of `source`, whose routed blocks may be others; returns a message about it.

    Called on every process; if the model is sharded, each keeps its part.
    """
    fitted = fit_weights(model.config, source.load(), source.path, seed)
    _copy(model, fitted.weights)
    sentence = f"starting from the weights of {source.path}"
    for names, what in ((fitted.new, "are new"), (fitted.left, "are left out")):
        if names:
            sentence += f"; {len(names)} tensors of routers and predictors {what}"
    return sentence


def _copy(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    for name, target in collect_tensors(model, [])["model"].items():
        value = weights[name].to(target.device, target.dtype)
        if hasattr(target, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            # every process has read the same, so nothing is sent
            mesh, placements = target.device_mesh, target.placements  # pyrefly: ignore
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        target.copy_(value)


def freeze(model: Transformer, trainable: str) -> None:
    """Freeze all other parameters: `all` trains everything, `routers` only routers and predictors,
    and `lora` those and the adapters."""
    if trainable == "all":
        return
    routes = model.config.routed_layers or model.config.expert_layers
    if trainable == "routers" and not routes:
        raise ValueError("train.trainable = routers needs a model with routed blocks")
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Router | Predictor):
            module.requires_grad_(True)
