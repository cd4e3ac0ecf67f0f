"""Two ranks with FSDP2 shards write what one process reads, and the other way round, bitwise."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from depthmix.checkpoint import (
    Checkpoints,
    collect_rng,
    collect_tensors,
    load_weights,
    restore_rank_rng,
    restore_tensors,
)
from depthmix.config import load_preset
from depthmix.models import open_model
from depthmix.nn import Transformer
from depthmix.train.muon import Muon

NUM_RANKS = 2
CONFIG = load_preset("tiny", num_layers=2)

Training = tuple[Transformer, list[torch.optim.Optimizer]]


def make_training(seed: int, shard: bool) -> Training:
    torch.manual_seed(seed)
    model = Transformer(CONFIG)
    if shard:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = Muon([{"params": matrices, "lr": 0.1}], weight_decay=0.1, momentum=0.9)
    return model, [muon, torch.optim.AdamW(others)]


def run_step(training: Training, seed: int) -> None:
    model, optimizers = training
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(seed))
    model(tokens).logits.square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def gather_whole(training: Training) -> dict[str, dict[str, Tensor]]:
    def make_whole(tensor: Any) -> Tensor:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()

    collected = collect_tensors(*training)
    return {p: {n: make_whole(t) for n, t in named.items()} for p, named in collected.items()}


def assert_same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    assert {p: set(n) for p, n in one.items()} == {p: set(n) for p, n in other.items()}
    for part, named in one.items():
        for name, value in named.items():
            assert torch.equal(value, other[part][name]), name


def load_newest(folder: Path, training: Training) -> dict[str, Any]:
    checkpoints = Checkpoints(folder)
    found = checkpoints.find_newest()
    assert found is not None
    tensors = collect_tensors(*training)
    state = checkpoints.load(found, tensors)
    restore_tensors(*training, tensors)
    return state | {"damaged": list(found.damaged)}


def save_and_wait(checkpoints: Checkpoints, step: int, training: Training) -> None:
    checkpoints.save(step, collect_tensors(*training), {})
    checkpoints.wait()


def work(rank: int, folder: Path) -> None:
    """What each rank does; an error in it fails the test."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)

    # one → two
    training = make_training(seed=5, shard=True)
    state = load_newest(folder / "one", training)
    assert_same(gather_whole(training), torch.load(folder / "one.pt", weights_only=True))
    changed = restore_rank_rng(
        state["rng"], rank=rank, num_ranks=NUM_RANKS, seed=1, step=state["step"]
    )
    assert changed is not None

    # two → one: written in the background while the weights already change
    checkpoints = Checkpoints(folder / "two", keep_last=2)
    torch.manual_seed(100 + rank)
    for step in (1, 2):
        run_step(training, seed=rank)
        whole = gather_whole(training)
        # what rank 0 says counts, but for the random state
        checkpoints.save(
            step,
            collect_tensors(*training),
            {"rng": collect_rng(), "rank": rank, "config": {"model": CONFIG.to_dict()}},
        )
    run_step(training, seed=rank)
    checkpoints.wait()
    if rank == 0:
        torch.save(whole, folder / "two.pt")

    # two → two, past a damaged one that only rank 0 looks at
    if rank == 0:
        (folder / "two" / "step-00000003").mkdir()
    dist.barrier()
    again = make_training(seed=6, shard=True)
    state = load_newest(folder / "two", again)
    assert "has no checksums.json" in state["damaged"][0]
    assert_same(gather_whole(again), whole)
    assert restore_rank_rng(state["rng"], rank=rank, num_ranks=NUM_RANKS, seed=1, step=2) is None
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(100 + rank).get_state())

    # an error of one rank reaches all, and nothing half-written stays
    for called in ("os.fsync", "depthmix.checkpoint.folder.measure_file"):
        full = OSError(28, "No space left on device") if rank == 1 else None
        with (
            patch(called, side_effect=full, return_value={}),
            pytest.raises(OSError, match="could not be written") as told,
        ):
            save_and_wait(checkpoints, 9, training)
        assert told.value.errno == 28
    save_and_wait(checkpoints, 10, training)
    dist.destroy_process_group()


@pytest.mark.distributed
def test_shards_and_whole_tensors_are_interchangeable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # where there is a GPU, FSDP2 would move the CPU's model to it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    alone = make_training(seed=0, shard=False)
    run_step(alone, seed=7)
    checkpoints = Checkpoints(tmp_path / "one", asynchronous=False)
    checkpoints.save(1, collect_tensors(*alone), {"rng": collect_rng()})
    torch.save(gather_whole(alone), tmp_path / "one.pt")

    mp.spawn(work, (tmp_path,), nprocs=NUM_RANKS)

    whole = torch.load(tmp_path / "two.pt", weights_only=True)
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == [
        "step-00000002",
        "step-00000010",
    ]
    path = tmp_path / "two" / "step-00000002"
    shards = {p.name for p in path.glob("*.safetensors")}
    assert {f"model.rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)} <= shards
    sizes = [p.stat().st_size for p in sorted(path.glob("model.*"))]
    assert max(sizes) < 0.7 * sum(sizes)
    state = json.loads((path / "state.json").read_text())
    assert (state["num_ranks"], len(state["rng"]), state["rank"]) == (2, 2, 0)

    assert_same({"model": load_weights(path)}, {"model": whole["model"]})
    assert torch.equal(
        open_model(path).network.embedding.weight, whole["model"]["embedding.weight"]
    )
    resumed = make_training(seed=8, shard=False)
    (tmp_path / "two" / "step-00000010").rename(tmp_path / "ten")
    load_newest(tmp_path / "two", resumed)
    assert_same(gather_whole(resumed), whole)
