"""What training on many GPUs takes, before any is rented: bytes in memory, on the wire, on disk.

Shards are counted on a model that FSDP2 really cut, without its memory and without the other
processes. All else is arithmetic on their sizes (docs/scaling.md says what was checked, and how
near it came). Knows nothing of a real device.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from depthmix import flops
from depthmix.config import Recipe, RunConfig
from depthmix.kernels.cross_entropy import CHUNK_TOKENS
from depthmix.train.activations import FLOAT32, count_activations

# a parameter's share of a checkpoint: itself in float32, and AdamW's two moments
STATE_BYTES = 3 * FLOAT32

# a ring's step inside a node and between nodes, as NCCL's own cost model has them
# (src/graph/tuning.cc: Ring, Simple)
STEP_SECONDS, NODE_STEP_SECONDS = 3.4e-6, 9.6e-6

# the share of a GPU that may be planned: its context, NCCL's buffers and gaps need the rest
USABLE = 0.9


class Cluster(NamedTuple):
    """The machines, as whoever plans states them."""

    num_gpus: int
    gpus_per_node: int = 8
    flops_per_second: float = 400e12
    """What a GPU computes in a real training, not its maker's peak."""
    nvlink_bytes_per_second: float = 450e9
    """Of one GPU inside its node, in one direction."""
    network_bytes_per_second: float = 50e9
    """Of one GPU's part of its node's network, in one direction."""


class Group(NamedTuple):
    """Parameters that are gathered together."""

    kind: Literal["root", "layer", "router"]
    num_elements: int
    """All of them, without padding."""
    local_elements: int
    """On one rank, as allocated."""
    num_muon: int = 0
    """Those of `num_elements` that Muon trains: it has one moment."""
    local_muon: int = 0
    """Those of `local_elements`."""


class MemoryBound(NamedTuple):
    """Bytes on one GPU; their sum is a bound, because not all are there at the same time."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole layers in the type of the products, with the gradients that wait to be shared."""
    activations: int
    """An estimate."""
    loss: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Traffic(NamedTuple):
    """What one rank receives in a step; it sends as much."""

    all_gather_bytes: int
    reduce_scatter_bytes: int
    all_reduce_bytes: int
    """Between replicas, under HSDP."""
    seconds: float
    """At the stated rates, if nothing else goes on."""


class Estimate(NamedTuple):
    """A run on a number of GPUs, in numbers."""

    cluster: Cluster
    shard_size: int
    num_rows: int
    """Sequences of a micro-batch on one GPU."""
    memory: MemoryBound
    activations_kept: int
    """`memory.activations` without activation checkpointing."""
    activations_recomputed: int
    """The same with it."""
    host_bytes: int
    """On one node: the ranks' copies for a checkpoint, or at the start one matrix of each."""
    checkpoint_bytes: int
    """One checkpoint on disk."""
    disk_bytes: int
    """Those that are kept, the best one and the one being written."""
    traffic: Traffic
    compute_seconds: float
    padding: float
    """What padding adds to the shards, as a share."""

    def fits(self, gpu_bytes: float) -> bool:
        """Whether a GPU of so much memory would do."""
        return self.memory.total <= USABLE * gpu_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data with raw numbers."""
        parts = ("cluster", "memory", "traffic")
        tree = {**self._asdict(), **{name: getattr(self, name)._asdict() for name in parts}}
        tree["memory"]["total"] = self.memory.total
        return tree


def estimate_run(run: RunConfig, cluster: Cluster) -> Estimate:
    """Everything about `run` on `cluster`; refuses what the training itself would refuse."""
    recipe, config, num_gpus = run.train, run.model, cluster.num_gpus
    _check(recipe, cluster)
    shard_size = _find_shard_size(recipe, num_gpus)
    groups = count_shards(run, num_gpus)
    num_parameters = flops.num_parameters(config).total
    assert sum(group.num_elements for group in groups) == num_parameters
    local = sum(group.local_elements for group in groups)
    state = STATE_BYTES * local - FLOAT32 * sum(group.local_muon for group in groups)
    checkpoint = STATE_BYTES * num_parameters - FLOAT32 * sum(group.num_muon for group in groups)
    num_rows = recipe.batch_size // (num_gpus * recipe.num_micro_batches)
    # auto is bfloat16 on a GPU
    size = FLOAT32 if recipe.precision == "float32" else 2
    activations = count_activations(run, size)
    kept = num_rows * activations.find_peak(recompute=False)
    recomputed = num_rows * activations.find_peak(recompute=True)
    on_node = min(cluster.gpus_per_node, num_gpus)
    compute = flops.training_flops(
        config, seq_len=run.seq_len, batch_size=recipe.batch_size, causal_half=True
    )
    # a second forward pass beside the three that a step counts
    compute = compute * 4 / 3 if recipe.checkpoint_activations else compute
    return Estimate(
        cluster=cluster,
        shard_size=shard_size,
        num_rows=num_rows,
        memory=MemoryBound(
            parameters=FLOAT32 * local,
            gradients=FLOAT32 * local,
            optimizer=state - FLOAT32 * local,
            gathered=count_gathered(groups, size, shard_size),
            activations=recomputed if recipe.checkpoint_activations else kept,
            loss=_count_loss(run, num_rows, size),
        ),
        activations_kept=kept,
        activations_recomputed=recomputed,
        host_bytes=on_node * max(state, FLOAT32 * config.vocab_size * config.width),
        checkpoint_bytes=checkpoint,
        disk_bytes=checkpoint * (recipe.num_kept_checkpoints + 2),
        traffic=count_traffic(groups, size, recipe, cluster),
        compute_seconds=compute / num_gpus / cluster.flops_per_second,
        padding=shard_size * local / num_parameters - 1,
    )


def _check(recipe: Recipe, cluster: Cluster) -> None:
    for name, value in cluster._asdict().items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name.replace('_', ' ')} = {value} must be greater than 0")
    recipe.check_sharing(cluster.num_gpus, "GPUs")


def _find_shard_size(recipe: Recipe, num_gpus: int) -> int:
    return 1 if num_gpus == 1 else recipe.shard_size or num_gpus


def count_shards(run: RunConfig, num_gpus: int, rank: int = 0) -> list[Group]:
    """What FSDP2 makes of a model on so many GPUs: one without memory, cut for real."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from depthmix.nn import Transformer
    from depthmix.nn.router import Router
    from depthmix.train.optim import list_muon
    from depthmix.train.parallel import make_mesh, shard_model
    from depthmix.train.step import Root

    with torch.device("meta"):
        root = Root(Transformer(run.model))
    by_muon = run.train.optimizer == "muon"
    if num_gpus == 1:
        count = sum(p.numel() for p in root.parameters())
        num_muon = sum(p.numel() for p in list_muon(root.model)) if by_muon else 0
        return [Group("root", count, count, num_muon, num_muon)]
    groups, seen = [], set()
    with _pretend_world(num_gpus, rank):
        shard_model(root, make_mesh(num_gpus, "cpu", run.train.shard_size), torch.bfloat16)
        muon = {id(p) for p in list_muon(root.model)} if by_muon else set()
        # inner modules come last: what they leave belongs to the outer ones
        for module in reversed(list(root.modules())):
            if isinstance(module, FSDPModule):
                own: list[Any] = [p for p in module.parameters() if id(p) not in seen]
                seen |= {id(p) for p in own}
                kind = "router" if isinstance(module, Router) else "layer"
                counts = []
                for part in (own, [p for p in own if id(p) in muon]):
                    # the storage has the padding, the tensor does not
                    stored = (p.to_local().untyped_storage().nbytes() // p.itemsize for p in part)
                    counts += [sum(p.numel() for p in part), sum(stored)]
                groups.append(Group("root" if module is root else kind, *counts))
    return groups


@contextmanager
def _pretend_world(num_ranks: int, rank: int) -> Iterator[None]:
    """A process group whose other ranks do not exist; nothing that it sends arrives."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "this process is one of several"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_gathered(groups: Sequence[Group], size: int, shard_size: int) -> int:
    """Bytes of whole copies in a type of `size` bytes.

    The root's parameters and gradients stay for a step; of the layers, the one that computes and
    the one that arrives, the first one's gradients, and those in float32 on their way out.
    """
    layers = [shard_size * group.local_elements for group in groups if group.kind == "layer"]
    if not layers:
        # one GPU: the products' own copies of the weights, which the backward pass needs again
        return 0 if size == FLOAT32 else size * groups[0].num_elements
    root = sum(shard_size * group.local_elements for group in groups if group.kind == "root")
    routers = sum(shard_size * group.local_elements for group in groups if group.kind == "router")
    return 2 * size * root + 2 * FLOAT32 * routers + (3 * size + FLOAT32) * max(layers)


def _count_loss(run: RunConfig, num_rows: int, size: int) -> int:
    """The head's largest tensors: a chunk's logits and the head's gradient; in float32, all."""
    config, num_tokens = run.model, num_rows * run.seq_len
    if size == FLOAT32:
        return 2 * FLOAT32 * num_tokens * config.vocab_size
    logits = size * min(CHUNK_TOKENS, num_tokens) * config.vocab_size
    return logits + FLOAT32 * config.vocab_size * config.width + size * num_tokens * config.width


def count_traffic(groups: Sequence[Group], size: int, recipe: Recipe, cluster: Cluster) -> Traffic:
    """What one rank receives in a step, and the time that it takes at the stated rates.

    Rings: of n parts each rank receives n - 1. Layers are gathered for the forward pass and again
    for the backward one; the root and the routers stay in between.
    """
    num_shards = _find_shard_size(recipe, cluster.num_gpus)
    num_replicas = cluster.num_gpus // num_shards
    gather = scatter = reduce = num_rings = 0
    for group in groups if num_shards > 1 else ():
        times = 2 if group.kind == "layer" else 1
        received = (num_shards - 1) * group.local_elements
        gather += times * received * (FLOAT32 if group.kind == "router" else size)
        scatter += received * FLOAT32
        num_rings += times + 1
    if num_replicas > 1:
        local = sum(group.local_elements for group in groups)
        reduce = 2 * (num_replicas - 1) * FLOAT32 * local // num_replicas
    per_node = cluster.gpus_per_node
    seconds = _time_rings(cluster, gather + scatter, num_rings, num_shards, per_node)
    # replicas of one shard stand a shard group apart
    per_node = max(1, per_node // num_shards)
    seconds += _time_rings(cluster, reduce, 2 * len(groups), num_replicas, per_node)
    sent = [recipe.num_micro_batches * count for count in (gather, scatter, reduce)]
    return Traffic(*sent, seconds=recipe.num_micro_batches * seconds)


def _time_rings(
    cluster: Cluster, num_bytes: int, num_rings: int, num_ranks: int, per_node: int
) -> float:
    """Seconds for a rank to receive `num_bytes` in so many turns around a ring."""
    num_nodes = math.ceil(num_ranks / per_node)
    rate = cluster.nvlink_bytes_per_second
    if num_nodes > 1:
        # a ring enters a node once, by the network of all its members in it
        rate = min(rate, min(per_node, num_ranks) * cluster.network_bytes_per_second)
    turn = (num_ranks - num_nodes) * STEP_SECONDS + (num_nodes - 1) * NODE_STEP_SECONDS
    return num_bytes / rate + num_rings * turn
