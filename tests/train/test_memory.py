"""Plans for many GPUs: against what autograd saves, FSDP2's shards, torch's peak, sums by hand."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from depthmix import flops
from depthmix.config import Recipe, RunConfig, load_preset
from depthmix.nn import Transformer
from depthmix.nn.router import Router
from depthmix.train import memory, parallel
from depthmix.train.memory import (
    Activations,
    Cluster,
    Group,
    check_memory,
    count_activations,
    count_gathered,
    count_shards,
    count_traffic,
    estimate_run,
)
from depthmix.train.optim import make_optimizers
from depthmix.train.parallel import compile_layers
from depthmix.train.step import Root, TrainStep, compute_loss
from depthmix.world import World
from variants import NAMES, make_config

NUM_ROWS, NUM_TOKENS = 2, 128
SMALL: dict[str, Any] = {
    "num_layers": 4,
    "width": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 256,
    "max_seq_len": NUM_TOKENS,
}
EXPERTS = {"experts.strategy": "expert_choice", "experts.num_experts": 4}
DENSE = {"routing.strategy": "none"}
TWO_EACH = {"experts.strategy": "token_choice", "experts.per_token": 2, "experts.capacity": 2.0}

CASES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "gelu": {**DENSE, "mlp": "gelu"},
    "qk_norm": {**DENSE, "qk_norm": True, "num_kv_heads": None},
    "mod": {},
    "mod_half": {"routing.capacity": 0.5},
    "mod_plain": {"routing.normalize_input": False},
    "mod_kv": {"routing.kv_capacity": 0.5},
    "token_choice": {"routing.strategy": "token_choice"},
    "experts": {**DENSE, **EXPERTS},
    "experts_two_each": {**DENSE, **EXPERTS, **TWO_EACH},
    "experts_mod": {**EXPERTS, "routing.capacity": 0.5},
    "memory": {"routing.strategy": "none", "memory.place": "blocks", "memory.every": 2},
    "mod_lookup": {"routing.bypass": "lookup"},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_small_run(name: str, **recipe: Any) -> RunConfig:
    fields = {f"train.{field}": value for field, value in recipe.items()}
    return RunConfig.from_overrides(load_preset("1b", **{**SMALL, **CASES[name]}), fields)


def make_sharded_like(run: RunConfig, precision: torch.dtype) -> Transformer:
    """A model with the types of a sharded one's gathered weights."""
    model = Transformer(run.model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not isinstance(module, Router):
                parameter.data = parameter.data.to(precision)
    return model


def measure_layers(model: Transformer, run: RunConfig, precision: torch.dtype) -> int:
    """Bytes of what the layers save for the backward pass, each memory counted once."""
    tokens = torch.randint(run.model.vocab_size, (NUM_ROWS, NUM_TOKENS))
    documents = None
    if run.train.document_mask:
        documents = (torch.arange(NUM_TOKENS) // 50).repeat(NUM_ROWS, 1)
    parameters = [*model.parameters(), *model.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    # tensors are held: memory that were freed could come again
    saved: dict[int, Tensor] = {}
    inside = False

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if inside and place not in known:
            saved.setdefault(place, tensor)
        return tensor

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    model.layers[0].register_forward_pre_hook(enter)
    model.norm.register_forward_pre_hook(leave)
    cast = torch.autocast("cpu", torch.bfloat16)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        cast if precision == torch.bfloat16 else nullcontext(),
    ):
        compute_loss(model, tokens, tokens, documents)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_eager_layers_save_the_counted_bytes(name: str, precision: torch.dtype) -> None:
    run = make_small_run(name, compile=False)
    measured = measure_layers(make_sharded_like(run, precision), run, precision)
    estimate = NUM_ROWS * sum(count_activations(run, precision.itemsize).layers)
    assert 0.97 < estimate / measured < 1.04


@pytest.mark.compile
@pytest.mark.parametrize("name", ["dense", "qk_norm", "mod", "mod_kv", "experts_mod"])
def test_compiled_layers_save_the_counted_bytes(name: str) -> None:
    # without documents: the CPU has no attention that skips blocks, as a GPU has
    run = make_small_run(name, document_mask=False)
    model = make_sharded_like(run, torch.bfloat16)
    # what inductor's layers save, without its time to compile them
    compile_layers(model, "aot_eager_decomp_partition")
    measured = measure_layers(model, run, torch.bfloat16)
    estimate = NUM_ROWS * sum(count_activations(run, 2).layers)
    assert 0.97 < estimate / measured < 1.06


def test_routed_layers_save_less() -> None:
    layers = count_activations(make_small_run("mod")).layers
    assert layers[0] == layers[2]
    assert layers[1] == layers[3] < layers[0] / 3
    # packed documents cost a mask of all pairs, where it is not made of blocks
    for fields, size in (({"compile": False}, 2 * NUM_TOKENS**2), ({}, 0)):
        masked, plain = (make_small_run("dense", document_mask=d, **fields) for d in (True, False))
        difference = count_activations(masked).layers[0] - count_activations(plain).layers[0]
        assert difference == size


def test_peaks() -> None:
    activations = Activations(layers=(100, 20, 100), stream=4, ends=1)
    assert activations.saved == 221
    # all of them, and one layer's gradients
    assert activations.find_peak(recompute=False) == 221 + 100
    # what enters each layer, and one layer computed again with its gradients
    assert activations.find_peak(recompute=True) == 1 + 3 * 4 + 2 * 100


BILLION = load_preset("1b")


def make_run(preset: str = "1b", **fields: Any) -> RunConfig:
    # of AdamW, whose state is what torch's own tracker is asked about
    fixed = {"train.batch_size": 512, "train.optimizer": "adamw"}
    return RunConfig.from_overrides(load_preset(preset), {**fixed, **fields})


@pytest.mark.parametrize("name", NAMES)
def test_shards_of_every_model_add_up(name: str) -> None:
    run = RunConfig(model=make_config(name))
    groups = count_shards(run, num_gpus=4)
    total = flops.num_parameters(run.model).total
    assert sum(group.num_elements for group in groups) == total
    kinds = [group.kind for group in groups]
    assert (kinds.count("root"), kinds.count("layer")) == (1, run.model.num_layers)
    num_deciders = 2 if run.model.routing.kv_capacity is not None else 1
    num_routers = num_deciders * len(run.model.routed_layers) + len(run.model.expert_layers)
    # each reader of a memory has a gate
    num_routers += flops.count_lookups(run.model)
    assert kinds.count("router") == num_routers
    assert not dist.is_initialized()


@pytest.mark.parametrize("num_gpus", [8, 64, 512])
def test_shards_are_the_analytic_share(num_gpus: int) -> None:
    total = flops.num_parameters(BILLION).total
    local = sum(group.local_elements for group in count_shards(make_run(), num_gpus))
    # at most a few rows of padding
    assert 1 <= local * num_gpus / total < 1.05


def test_uneven_shards_are_padded_on_every_rank() -> None:
    # an embedding of 256 rows, of which the last of 7 ranks would get 34 and the others 37
    run = make_run("tiny-dense", vocab_size=256, width=60, num_heads=2, num_kv_heads=2)
    first, last = (count_shards(run, 7, rank)[-1] for rank in (0, 6))
    assert first == last
    assert first.kind == "root"
    # beside it the last norm's 60 numbers, 9 for each
    assert first.local_elements == 37 * 60 + 9


def test_few_experts_are_cut_for_many_gpus() -> None:
    fields = {"experts.strategy": "expert_choice", "experts.num_experts": 8, "width": 512}
    run = make_run("60m-dense", **fields)
    layers = [group for group in count_shards(run, 128) if group.kind == "layer"]
    # uncut, every rank would hold a whole expert: 16 times its share
    assert all(group.local_elements * 128 < 1.1 * group.num_elements for group in layers)


def test_replicas_hold_the_shards_of_their_group() -> None:
    shared, replicated = (make_run(**{"train.shard_size": size}) for size in (None, 8))
    assert count_shards(shared, 8) == count_shards(replicated, 64)


@pytest.mark.parametrize("name", ["mod", "mode_staged", "mod_kv"])
def test_muon_has_one_moment_where_it_trains(name: str) -> None:
    run = RunConfig(model=make_config(name), train=Recipe(optimizer="muon"))
    model = Transformer(run.model)
    optimizers = make_optimizers(model, run.train)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    states = []
    for optimizer in optimizers:
        optimizer.step()
        states += optimizer.state.values()
    # the step that AdamW counts is one number
    held = sum(v.nbytes for state in states for v in state.values() if v.ndim)
    found = estimate_run(run, Cluster(num_gpus=1))
    assert found.memory.optimizer == held
    total = flops.num_parameters(run.model).total
    assert found.checkpoint_bytes == held + 4 * total
    assert found.disk_bytes == (run.train.num_kept_checkpoints + 2) * found.checkpoint_bytes
    shared = count_shards(run, num_gpus=4)
    assert sum(group.num_muon for group in shared) == 3 * total - (held + 4 * total) // 4
    assert all(group.local_muon <= group.local_elements for group in shared)
    assert all(4 * group.local_muon >= group.num_muon for group in shared)


class Tracked:
    """One rank of a sharded training on the CPU, its memory tracked by torch."""

    def __init__(self, run: RunConfig, num_ranks: int) -> None:
        recipe, model = run.train, Transformer(run.model)
        with memory._pretend_world(num_ranks, 0):
            root = Root(model)
            if recipe.checkpoint_activations:
                parallel.checkpoint_activations(model)
            mesh = parallel.make_mesh(num_ranks, "cpu", recipe.shard_size)
            parallel.shard_model(root, mesh, torch.bfloat16)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            step = TrainStep(model, optimizer, precision=torch.bfloat16, root=root)
            rows = recipe.batch_size // num_ranks
            tokens = torch.randint(run.model.vocab_size, (rows, run.seq_len))
            tracker = FSDPMemTracker(root, optimizer)
            with tracker:
                step(tokens, tokens)
                # the first step makes the optimiser's state
                tracker.reset_mod_stats()
                step(tokens, tokens)
        (found,) = tracker.get_tracker_snapshot("peak").values()
        self.bytes = {getattr(kind, "name", kind): count for kind, count in found.items()}


@pytest.mark.parametrize(
    ("preset", "num_gpus", "recompute"),
    [("1b-dense", 2, False), ("1b-dense", 16, True), ("1b", 2, True), ("1b", 16, False)],
)
def test_a_total_bounds_the_peak_that_torch_tracks(
    preset: str, num_gpus: int, recompute: bool
) -> None:
    small = {"num_layers": 8, "width": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}
    recipe = {"compile": False, "document_mask": False, "checkpoint_activations": recompute}
    recipe |= {"batch_size": 2 * num_gpus, "seq_len": 64}
    run = make_run(preset, **small, **{f"train.{name}": value for name, value in recipe.items()})
    estimate = estimate_run(run, Cluster(num_gpus)).memory
    tracked = Tracked(run, num_gpus).bytes
    assert estimate.parameters == tracked["SHARDED_PARAM"]
    # a counter of steps stands beside the moments of each parameter
    assert estimate.optimizer == pytest.approx(tracked["OPT"], rel=0.02)
    moved = sum(tracked[kind] for kind in ("UNSHARDED_PARAM", "ALL_GATHER", "REDUCE_SCATTER"))
    assert moved <= estimate.gathered
    assert 0.7 < tracked["Total"] / estimate.total < 1


GROUPS = [Group("router", 40, 10), Group("layer", 390, 100), Group("layer", 400, 100)]
GROUPS.append(Group("root", 200, 50))


def test_gathered_copies() -> None:
    # the root and its gradients in two bytes, routers in four, of one layer ten bytes a number
    assert count_gathered(GROUPS, 2, 4) == 4 * (2 * 2 * 50 + 2 * 4 * 10 + 10 * 100)
    assert count_gathered([Group("root", 200, 200)], 2, 1) == 400
    assert count_gathered([Group("root", 200, 200)], 4, 1) == 0


def test_traffic_inside_a_node() -> None:
    cluster = Cluster(4, nvlink_bytes_per_second=1e3)
    found = count_traffic(GROUPS, 2, Recipe(), cluster)
    # three other ranks; layers twice; routers in float32
    gathered = 3 * (2 * 2 * 200 + 2 * 50 + 4 * 10)
    scattered = 3 * 4 * 260
    assert found[:3] == (gathered, scattered, 0)
    # three steps of each of ten rings
    assert found.seconds == pytest.approx((gathered + scattered) / 1e3 + 10 * 3 * 3.4e-6)
    # every micro-batch gathers and scatters
    twice = count_traffic(GROUPS, 2, Recipe(num_micro_batches=2), cluster)
    assert twice == pytest.approx([2 * value for value in found])


def test_traffic_between_nodes_and_replicas() -> None:
    cluster = Cluster(16, gpus_per_node=2, network_bytes_per_second=1e3)
    found = count_traffic(GROUPS, 2, Recipe(shard_size=4), cluster)
    local = 260
    # a ring of all 4 replicas goes around twice, a quarter of the shard at each of its steps
    assert found.all_reduce_bytes == 2 * 3 * 4 * local // 4
    rings = found.all_gather_bytes + found.reduce_scatter_bytes
    # shards lie on two nodes, whose two links both serve the ring; each replica has its own
    seconds = rings / 2e3 + 10 * (2 * 3.4e-6 + 9.6e-6)
    seconds += found.all_reduce_bytes / 1e3 + 2 * len(GROUPS) * 3 * 9.6e-6
    assert found.seconds == pytest.approx(seconds)
    one_each = count_traffic(GROUPS, 2, Recipe(shard_size=1), cluster)
    assert one_each[:2] == (0, 0)
    assert one_each.all_reduce_bytes == 2 * 15 * 4 * local // 16


def test_an_estimate_adds_up() -> None:
    run = make_run(**{"train.num_kept_checkpoints": 3})
    found = estimate_run(run, Cluster(64, flops_per_second=1e14))
    total = flops.num_parameters(BILLION).total
    assert (found.shard_size, found.num_rows) == (64, 8)
    memory = found.memory
    assert memory.gradients == memory.parameters
    assert memory.optimizer == 2 * memory.parameters
    assert memory.total == sum(memory)
    # logits of a chunk in bfloat16; the head's gradient in float32, that of what enters it
    tokens, vocabulary, width = 8 * 2048, BILLION.vocab_size, BILLION.width
    assert memory.loss == 2 * 8192 * vocabulary + 4 * vocabulary * width + 2 * tokens * width
    assert (found.checkpoint_bytes, found.disk_bytes) == (12 * total, 5 * 12 * total)
    # on few GPUs a checkpoint's copies count, on many the largest matrix while it is drawn
    assert found.host_bytes == 8 * 4 * BILLION.vocab_size * BILLION.width
    few = estimate_run(run, Cluster(8))
    assert few.host_bytes == 8 * 3 * few.memory.parameters
    step = flops.training_flops(BILLION, batch_size=512, causal_half=True)
    assert found.compute_seconds == pytest.approx(step / 64 / 1e14)
    assert found.fits(memory.total / 0.9 + 1)
    assert not found.fits(memory.total / 0.9 - 1)
    tree = found.to_dict()
    assert tree["memory"]["total"] == memory.total
    assert tree["traffic"]["all_gather_bytes"] == found.traffic.all_gather_bytes


def test_checkpointing_trades_memory_for_compute() -> None:
    kept, recomputed = (
        estimate_run(make_run(**{"train.checkpoint_activations": recompute}), Cluster(64))
        for recompute in (False, True)
    )
    assert kept.memory.activations == recomputed.activations_kept
    assert recomputed.memory.activations == kept.activations_recomputed
    assert recomputed.memory.activations < kept.memory.activations / 3
    assert recomputed.compute_seconds == pytest.approx(4 / 3 * kept.compute_seconds)


def test_one_gpu_shares_nothing() -> None:
    found = estimate_run(make_run(**{"train.shard_size": 8}), Cluster(1))
    total = flops.num_parameters(BILLION).total
    assert found.shard_size == 1
    assert found.memory.parameters == 4 * total
    assert found.memory.gathered == 2 * total
    assert found.traffic == (0, 0, 0, 0)
    assert found.padding == 0


@pytest.mark.parametrize(
    ("fields", "cluster", "sentence"),
    [
        ({"train.batch_size": 100}, Cluster(8), "among 8 GPUs: use a multiple of 8"),
        (
            {"train.num_micro_batches": 4},
            Cluster(512),
            "512 GPUs x train.num_micro_batches=4: use a multiple of 2048",
        ),
        ({"train.shard_size": 3}, Cluster(8), "train.shard_size = 3 must divide the 8 processes"),
        ({}, Cluster(0), "num_gpus = 0 must be at least 1"),
        ({}, Cluster(8, 8, float("nan")), "flops_per_second = nan must be "),
    ],
)
def test_runs_that_could_not_start_are_refused(
    fields: dict[str, Any], cluster: Cluster, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        estimate_run(make_run(**fields), cluster)
    assert not dist.is_initialized()


def test_frozen_weights_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world, model = World(0, 1, torch.device("cpu")), load_preset("1b")
    # 8 bytes for each parameter: no room for a gradient and a moment beside it
    machine = {"SC_PAGE_SIZE": 8, "SC_PHYS_PAGES": flops.num_parameters(model).total}
    monkeypatch.setattr(os, "sysconf", machine.__getitem__)
    for trainable in ("routers", "lora"):
        fields = {"train.trainable": trainable, "train.optimizer": "adamw"}
        check_memory(RunConfig.from_overrides(model, fields), world)
    with pytest.raises(ValueError, match="this needs more than"):
        check_memory(RunConfig(model=model), world)
