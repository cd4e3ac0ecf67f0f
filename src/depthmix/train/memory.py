"""Estimates for training on many GPUs: bytes in memory, on the network and on disk.

Shard sizes come from a model sharded by FSDP2 on a fake process group, without allocating memory.
Activations are the sum of the tensors that autograd saves in each kind of layer; the tests compare
the sums with autograd on small models. All else is arithmetic on these sizes; docs/scaling.md says
what was checked, and how accurate it was.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from depthmix import flops
from depthmix.config import ModelConfig, Recipe, RunConfig, num_kept
from depthmix.config.fields import Count, Positive, check_value
from depthmix.kernels.cross_entropy import CHUNK_TOKENS
from depthmix.units import (
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    format_tflops,
)
from depthmix.world import World

if TYPE_CHECKING:
    from rich.console import Console

FLOAT32 = 4
# as much as can be formatted with a unit
LARGEST_BYTES = 2**70


class Activations(NamedTuple):
    """Bytes of one sequence."""

    layers: tuple[int, ...]
    """Saved by each layer."""
    stream: int
    """The residual stream between two layers, the only tensor kept with checkpointing."""
    ends: int
    """Saved before the first layer and after the last one."""

    @property
    def saved(self) -> int:
        """Everything that is saved."""
        return self.ends + sum(self.layers)

    def find_peak(self, *, recompute: bool) -> int:
        """The peak: everything that is saved, and a layer's gradients."""
        if recompute:
            return self.ends + len(self.layers) * self.stream + 2 * max(self.layers)
        return self.saved + max(self.layers)


def count_activations(run: RunConfig, element_bytes: int = 2) -> Activations:
    """Bytes saved per sequence, with `element_bytes` per number in matrix products."""
    config, num_tokens = run.model, run.seq_len
    compiled = run.train.compile is not False
    sizes = _Sizes(config, element_bytes, compiled)
    # packed documents need a mask of all pairs where blocks of it cannot be skipped
    masked = run.train.document_mask and not (compiled and config.shape.head_width >= 16)
    layers = tuple(
        sum(_list_saved(config, sizes, layer, num_tokens, masked))
        for layer in range(config.num_layers)
    )
    stream = num_tokens * config.width * element_bytes
    # the last norm is not part of a layer, so it is never compiled
    norm = _Sizes(config, element_bytes, False).norm(config.width)
    phases = FLOAT32 * config.shape.head_width
    return Activations(layers, stream, num_tokens * (norm + phases))


class _Sizes(NamedTuple):
    """Bytes per token that the parts of a layer save.

    A compiled layer recomputes what is cheap: float32 copies, and products of two tensors.
    """

    config: ModelConfig
    element: int
    compiled: bool

    def norm(self, width: int) -> int:
        """Input, output and one number; if not compiled, three float32 tensors and the output."""
        if self.compiled:
            return 2 * width * self.element + FLOAT32
        cast = self.element if self.element < FLOAT32 else 0
        return width * (3 * FLOAT32 + cast) + FLOAT32

    def head_norm(self, width: int) -> int:
        """A norm of queries or keys, whose output is counted elsewhere."""
        return self.norm(width) - width * self.element if self.config.qk_norm else 0

    @property
    def query(self) -> int:
        """Queries, the output of attention, and the softmax's sums."""
        width = self.config.num_heads * self.config.shape.head_width
        sums = FLOAT32 * self.config.num_heads
        return 2 * width * self.element + sums + self.head_norm(width)

    @property
    def key_value(self) -> int:
        """Keys and values."""
        width = self.config.shape.num_kv_heads * self.config.shape.head_width
        return 2 * width * self.element + self.head_norm(width)

    def hidden(self, width: int) -> int:
        """Inside an MLP: gate, input and their product, or one tensor before and after GELU."""
        gated = 3 if self.compiled else 4
        return width * self.element * (gated if self.config.mlp == "swiglu" else 2)

    def router(self, *, normalize: bool = False) -> int:
        """Float32 copies of a router's input, besides the input itself."""
        num_casts = int(self.element < FLOAT32)
        if normalize:
            num_casts += 1 + num_casts
        return 0 if self.compiled else num_casts * FLOAT32 * self.config.width

    @property
    def lookup(self) -> int:
        """A memory's reader: its input, its projection, copies for the gate, and three numbers."""
        return 2 * self.config.width * self.element + self.router(normalize=True) + 3 * FLOAT32

    def predictor(self, hidden: int) -> int:
        """A predictor's hidden layer, and one number."""
        return hidden * (self.element + (0 if self.compiled else FLOAT32)) + FLOAT32


def _list_saved(
    config: ModelConfig, sizes: _Sizes, layer: int, num_tokens: int, masked: bool
) -> Iterator[int]:
    """Bytes that the parts of one layer save for one sequence."""
    width, element = config.width, sizes.element
    kept = offered = num_tokens
    num_deciders = 0
    if layer in config.routed_layers:
        capacity = config.capacities[config.routed_layers.index(layer)]
        kept = offered = num_kept(config.routing.share_places(capacity), num_tokens)
        num_deciders = 1
        if config.routing.kv_capacity is not None:
            num_deciders, offered = 2, num_kept(config.routing.kv_capacity, num_tokens)
    apart = num_deciders == 2
    readers = sorted({*config.memory_layers, *config.bypass_layers})
    if layer in readers:
        yield num_tokens * sizes.lookup
    if layer in readers[:1]:
        # all of them read the same vectors
        yield num_tokens * config.shape.memory_width * element
    if num_deciders:
        # every token is scored; a score, an index and a position take 16 bytes
        router = sizes.router(normalize=config.routing.normalize_input)
        scored = router + 16
        if config.routing.has_predictor:
            scored += sizes.predictor(config.routing.predictor_width)
        yield num_tokens * (width * element + num_deciders * scored)
        # gathered tokens: their phases, a copy for the gate, and their updates
        gathered = kept + (offered if apart else 0)
        yield gathered * (FLOAT32 * config.shape.head_width + router)
        yield kept * width * element
    yield kept * (2 * sizes.norm(width) + sizes.query) + offered * sizes.key_value
    if apart:
        # keys and values have a norm of their own, and their gate
        yield offered * (sizes.norm(width) + sizes.key_value // 2)
    if masked or apart:
        yield kept * offered * element
    if layer not in config.expert_layers:
        yield kept * sizes.hidden(config.shape.mlp_width)
        return
    experts = config.experts
    yield kept * (sizes.router() + 8 * experts.num_experts)
    if experts.has_predictor:
        yield kept * sizes.predictor(experts.predictor_width)
    # each pair: input, inside, output, and weighted sum
    weighted = width * (element if sizes.compiled else FLOAT32)
    pair = 2 * width * element + sizes.hidden(config.shape.expert_width) + weighted
    yield flops.count_expert_pairs(config, kept) * pair


# bytes of a parameter in a checkpoint: itself in float32, and AdamW's two moments
STATE_BYTES = 3 * FLOAT32

# latency of a ring's step inside a node and between nodes, from NCCL's cost model
# (src/graph/tuning.cc: Ring, Simple)
STEP_SECONDS, NODE_STEP_SECONDS = 3.4e-6, 9.6e-6

# common GPU memory sizes, in the manufacturers' units
GPU_BYTES = {"80 GB": 80e9, "141 GB": 141e9}

# usable fraction of a GPU's memory: CUDA's context, NCCL's buffers and fragmentation need the rest
USABLE = 0.9


class Cluster(NamedTuple):
    """The machines, as the user describes them."""

    num_gpus: Count
    gpus_per_node: Count = 8
    flops_per_second: Positive[float] = 400e12
    """Achieved FLOP/s of a GPU in training, not its peak."""
    nvlink_bytes_per_second: Positive[float] = 450e9
    """Bandwidth of one GPU inside its node, in one direction."""
    network_bytes_per_second: Positive[float] = 50e9
    """Bandwidth of the network per GPU, in one direction."""


class Group(NamedTuple):
    """Parameters that are gathered together."""

    kind: Literal["root", "layer", "router"]
    num_elements: int
    """Number of elements, without padding."""
    local_elements: int
    """Elements allocated on one rank."""
    num_muon: int = 0
    """Elements trained by Muon, which has one moment."""
    local_muon: int = 0
    """Elements of `local_elements` trained by Muon."""


class MemoryBound(NamedTuple):
    """Bytes on one GPU; their sum is an upper bound, because not all exist at the same time."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Gathered layers in the products' dtype, with gradients that are not reduced yet."""
    activations: int
    """An estimate."""
    loss: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self)


class Traffic(NamedTuple):
    """Bytes that one rank receives in a step; it sends as many."""

    all_gather_bytes: int
    reduce_scatter_bytes: int
    all_reduce_bytes: int
    """Between replicas, with HSDP."""
    seconds: float
    """At the given rates, without overlap."""


class Estimate(NamedTuple):
    """A run on a number of GPUs, in numbers."""

    cluster: Cluster
    shard_size: int
    num_rows: int
    """Sequences per micro-batch on one GPU."""
    memory: MemoryBound
    activations_kept: int
    """`memory.activations` without activation checkpointing."""
    activations_recomputed: int
    """`memory.activations` with activation checkpointing."""
    host_bytes: int
    """Memory of a node: the ranks' copies for a checkpoint, or one matrix each at the start."""
    checkpoint_bytes: int
    """One checkpoint on disk."""
    disk_bytes: int
    """The kept checkpoints, the best one and the one being written."""
    traffic: Traffic
    compute_seconds: float
    padding: float
    """Fraction that padding adds to the shards."""

    def fits(self, gpu_bytes: float) -> bool:
        """Whether the run fits on a GPU with this much memory."""
        return self.memory.total <= USABLE * gpu_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data with raw numbers."""
        parts = ("cluster", "memory", "traffic")
        tree = {**self._asdict(), **{name: getattr(self, name)._asdict() for name in parts}}
        tree["memory"]["total"] = self.memory.total
        return tree


def estimate_run(run: RunConfig, cluster: Cluster) -> Estimate:
    """The estimate for `run` on `cluster`; refuses what training would refuse."""
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
    # recomputation: one more forward pass besides the three that a step counts
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


def print_estimates(
    name: str, run: RunConfig, estimates: Sequence[Estimate], console: "Console"
) -> None:
    """Print a table with one column per number of GPUs, followed by the assumptions."""
    from rich import box
    from rich.table import Table

    rows = [list_rows(estimate) for estimate in estimates]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column(name, overflow="fold")
    for estimate in estimates:
        count = format_count(estimate.cluster.num_gpus, "GPU")
        table.add_column(count, justify="right", overflow="fold")
    for label in rows[0]:
        table.add_row(label, *(cells[label] for cells in rows))
    cluster = estimates[0].cluster
    total = format_number(flops.num_parameters(run.model).total)
    lines = (
        f"{total} parameters, {run.train.batch_size} x {run.seq_len} tokens per step; "
        f"nothing here was measured on GPUs",
        table,
        f"Assumed: {format_tflops(cluster.flops_per_second)} per GPU, nodes of "
        f"{cluster.gpus_per_node}, {cluster.nvlink_bytes_per_second / 1e9:g} GB/s inside, "
        f"{cluster.network_bytes_per_second / 1e9:g} GB/s of network per GPU. A total fits "
        f"if it is at most 90 % of the GPU. Activations are an estimate.",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=isinstance(line, str))


def list_rows(estimate: Estimate) -> dict[str, str]:
    """A column of the table: label → cell."""
    memory, traffic, compute = estimate.memory, estimate.traffic, estimate.compute_seconds
    longest, both = max(compute, traffic.seconds), compute + traffic.seconds
    recomputes = memory.activations == estimate.activations_recomputed
    other = estimate.activations_kept if recomputes else estimate.activations_recomputed
    return {
        "weights shared by": f"{estimate.shard_size}",
        "sequences at a time": f"{estimate.num_rows}",
        "parameters": format_bytes(memory.parameters),
        "gradients": format_bytes(memory.gradients),
        "optimiser state": format_bytes(memory.optimizer),
        "layers in flight": format_bytes(memory.gathered),
        "activations": format_bytes(memory.activations),
        "logits and head": format_bytes(memory.loss),
        "total of one GPU": format_bytes(memory.total),
        **{
            f"  fits {name}": "yes" if estimate.fits(size) else "no"
            for name, size in GPU_BYTES.items()
        },
        f"  {'without' if recomputes else 'with'} checkpointing": format_bytes(
            memory.total - memory.activations + other
        ),
        "host memory of a node": format_bytes(estimate.host_bytes),
        "a checkpoint": format_bytes(estimate.checkpoint_bytes),
        "  all that are kept": format_bytes(estimate.disk_bytes),
        "received: all-gather": format_bytes(traffic.all_gather_bytes),
        "  reduce-scatter": format_bytes(traffic.reduce_scatter_bytes),
        "  all-reduce": format_bytes(traffic.all_reduce_bytes),
        "computing": format_seconds(compute),
        "communicating": format_seconds(traffic.seconds),
        "a step": f"{format_seconds(longest)} to {format_seconds(both)}",
    }


def _check(recipe: Recipe, cluster: Cluster) -> None:
    for name, declared in Cluster.__annotations__.items():
        check_value(name, getattr(cluster, name), declared)
    recipe.check_sharing(cluster.num_gpus, "GPUs")


def _find_shard_size(recipe: Recipe, num_gpus: int) -> int:
    return 1 if num_gpus == 1 else recipe.shard_size or num_gpus


def count_shards(run: RunConfig, num_gpus: int, rank: int = 0) -> list[Group]:
    """Shard a model with FSDP2 over this many GPUs, without allocating memory."""
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
        # inner modules come first; the parameters that they leave belong to the outer ones
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
    """A fake process group without the other ranks; nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "this process is one of several"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_gathered(groups: Sequence[Group], size: int, shard_size: int) -> int:
    """Bytes of gathered copies in a dtype of `size` bytes.

    The root's parameters and gradients stay for the whole step; of the layers, the one computing
    and the one being gathered, the first one's gradients, and those being reduced in float32.
    """
    layers = [shard_size * group.local_elements for group in groups if group.kind == "layer"]
    if not layers:
        # one GPU: autocast's copies of the weights, which the backward pass needs again
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
    """The bytes that one rank receives in a step, and the time for it at the given rates.

    In a ring, each rank receives n - 1 of n parts. Layers are gathered for the forward pass and
    again for the backward pass; the root and the routers stay in between.
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
    # replicas of a shard are one shard group apart
    per_node = max(1, per_node // num_shards)
    seconds += _time_rings(cluster, reduce, 2 * len(groups), num_replicas, per_node)
    sent = [recipe.num_micro_batches * count for count in (gather, scatter, reduce)]
    return Traffic(*sent, seconds=recipe.num_micro_batches * seconds)


def _time_rings(
    cluster: Cluster, num_bytes: int, num_rings: int, num_ranks: int, per_node: int
) -> float:
    """Seconds for a rank to receive `num_bytes` in this many turns of a ring."""
    num_nodes = math.ceil(num_ranks / per_node)
    rate = cluster.nvlink_bytes_per_second
    if num_nodes > 1:
        # a ring enters each node once, over the network of all its members there
        rate = min(rate, min(per_node, num_ranks) * cluster.network_bytes_per_second)
    turn = (num_ranks - num_nodes) * STEP_SECONDS + (num_nodes - 1) * NODE_STEP_SECONDS
    return num_bytes / rate + num_rings * turn


def check_memory(run: RunConfig, world: World) -> None:
    """Refuse a run that cannot fit in memory, before the system kills the process."""
    # a lower bound: weights in float32, for trained ones also a gradient and a moment, and the
    # input of each block
    num_tokens = run.tokens_per_step // run.train.num_micro_batches // world.size
    needed = 2 * num_tokens * run.model.width * run.model.num_layers
    try:
        each = 12 if run.train.trainable == "all" else 4
        needed += each * flops.num_parameters(run.model).total // world.size
    except OverflowError:
        needed = LARGEST_BYTES
    if world.device.type == "cuda":
        present = torch.cuda.get_device_properties(world.device).total_memory
    else:
        present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        size = format_bytes(min(needed, LARGEST_BYTES))
        raise ValueError(
            f"this needs more than {size} of memory and there are {format_bytes(present)}: use a "
            f"smaller model, a smaller train.batch_size or a larger train.num_micro_batches"
        )
