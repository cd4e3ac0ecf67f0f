"""Sharding with FSDP2 and HSDP, compilation, and activation checkpointing.

All three are applied to a finished model.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from depthmix.config import Recipe
from depthmix.nn import Transformer
from depthmix.nn.router import Router
from depthmix.world import World


def make_mesh(size: int, device: str, shard_size: int | None) -> Any:
    """One dimension of processes that share the weights, or two if they are replicated too."""
    from torch.distributed.device_mesh import init_device_mesh

    shard_size = shard_size or size
    if size % shard_size:
        raise ValueError(
            f"train.shard_size = {shard_size} must divide the {size} processes of this run"
        )
    if shard_size == size:
        return init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    shape = (size // shard_size, shard_size)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def shard_model(root: nn.Module, mesh: Any, precision: torch.dtype | None) -> None:
    """Shard parameters, gradients and optimiser state over the mesh's processes, in place.

    Every block is its own group, so that one is gathered while another computes. Routers stay in
    float32, because rounded scores would tie.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    def place(parameter: nn.Parameter) -> Shard:
        # the mesh's last dimension is the sharded one
        return Shard(choose_shard_dim(tuple(parameter.shape), mesh.size(mesh.ndim - 1)))

    # a block's inputs are not cast: rounded rotary phases would mean wrong positions
    policy = MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    model = root.model
    assert isinstance(model, Transformer)
    for module in model.modules():
        if isinstance(module, Router):
            # small, and used twice in a forward pass: gathered once per step
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=MixedPrecisionPolicy(),
                reshard_after_forward=False,
                shard_placement_fn=place,
            )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, shard_placement_fn=place)
    fully_shard(root, mesh=mesh, mp_policy=policy, shard_placement_fn=place)


def wrap_model(
    root: nn.Module, recipe: Recipe, world: World, precision: torch.dtype | None, *, by_block: bool
) -> None:
    """Shard, checkpoint and compile a model on the meta device, as the recipe says."""
    model = root.model
    assert isinstance(model, Transformer)
    if recipe.checkpoint_activations:
        checkpoint_activations(model)
    if by_block:
        compile_layers(model)
    if world.size > 1:
        mesh = make_mesh(world.size, world.device.type, recipe.shard_size)
        shard_model(root, mesh, precision)


def allocate(root: nn.Module, device: torch.device, seed: int) -> None:
    """Allocate and initialise a model that was created on the meta device.

    The weights depend only on the seed, not on the number of processes: each process draws whole
    matrices on its CPU, one at a time, and keeps its part.
    """
    model = root.model
    assert isinstance(model, Transformer)
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    root.to_empty(device=device if sharded else torch.device("cpu"))
    torch.manual_seed(seed)
    with _DrawWhole():
        model.init_weights()
    root.to(device)


class _DrawWhole(TorchFunctionMode):
    """Initialise sharded tensors with the values that the whole ones would have."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor: Any = kwargs.get("tensor")
        if func is nn.init.normal_ and hasattr(tensor, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            options: dict[str, Any] = {n: v for n, v in kwargs.items() if n != "tensor"}
            func(whole, **options)
            # every process draws the same values, so nothing is sent
            mesh, placements = tensor.device_mesh, tensor.placements
            part = distribute_tensor(whole.to(tensor.device), mesh, placements, src_data_rank=None)
            return tensor.copy_(part)
        return func(*args, **kwargs)


def choose_shard_dim(shape: tuple[int, ...], num_shards: int) -> int:
    """The dimension to shard: the first, unless padding it would cost more than a tenth.

    FSDP2 pads the first dimension to a multiple: with 8 experts, each of 512 processes would have
    a whole one. It shards other dimensions only into equal parts, and at the cost of a copy.
    """
    padded = math.ceil(shape[0] / num_shards) * num_shards
    if padded <= 1.1 * shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % num_shards == 0), 0)


def compile_layers(model: Transformer, backend: Any = "inductor") -> None:
    """Compile layer by layer: sharding acts between layers, and equal layers share a graph."""
    # torch's tracing reads the gradient of a layer's input, which triggers its own warning
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    # layers share their code, and beyond torch's limit of 8 graphs they would run uncompiled; there
    # is one per capacity, in training and for each selector in validation
    config, num_graphs = torch._dynamo.config, 8 * len(model.layers)
    config.recompile_limit = max(config.recompile_limit, num_graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * num_graphs)
    for layer in model.layers:
        # capacities differ between layers but never change, and cannot be traced as symbols
        layer.compile(backend=backend, dynamic=False)


def checkpoint_activations(model: Transformer) -> None:
    """Keep only each block's input; the backward pass recomputes the rest."""
    from torch.utils.checkpoint import checkpoint

    for layer in model.layers:
        layer.forward = _recompute(checkpoint, layer.forward)


def _recompute(checkpoint: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed


def resolve_precision(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products, None for float32."""
    wanted = recipe.precision
    if wanted == "auto":
        wanted = "bfloat16" if device.type == "cuda" else "float32"
    return torch.bfloat16 if wanted == "bfloat16" else None
