"""Whole matrices come from their parts and go back to them, however they were cut."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from depthmix.train.exchange import Exchange, cut_shape

NUM_RANKS = 3
# shape, and the dimension that is cut; of 3 the last part of 7 is short, and that of 4 and 1 empty
CASES = [((7, 4), 0), ((4, 7), 0), ((5, 6), 1), ((9, 2), 0), ((1, 3), 0), ((2, 2), 0), ((6, 5), 0)]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 1))
def test_parts_are_those_of_torch(length: int, num_parts: int, dim: int) -> None:
    shape = (length, 3) if dim == 0 else (3, length)
    wanted = [tuple(part.shape) for part in torch.empty(shape).chunk(num_parts, dim)]
    found = cut_shape(shape, dim, num_parts)
    assert len(found) == num_parts
    assert found[: len(wanted)] == wanted
    assert all(part[dim] == 0 for part in found[len(wanted) :])


def work(rank: int, meeting: str, folder: Path) -> None:
    torch.set_num_threads(1)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    # all of them, and fewer than there are processes
    for cases in (CASES, CASES[:2], CASES[:1]):
        torch.manual_seed(0)
        wholes = [torch.randn(shape) for shape, _ in cases]
        dims = [dim for _, dim in cases]
        shared = [distribute_tensor(w, mesh, [Shard(d)]) for w, d in zip(wholes, dims, strict=True)]
        exchange = Exchange(shared)
        own = [tensor.to_local() for tensor in shared]
        gathered = exchange.gather(own)
        assert len(gathered) == len(range(rank, len(cases), NUM_RANKS))
        for found, wanted in zip(gathered, wholes[rank::NUM_RANKS], strict=True):
            assert torch.equal(found, wanted)
        for found, part in zip(exchange.scatter([2 * g for g in gathered]), own, strict=True):
            assert torch.equal(found, 2 * part)
    dist.destroy_process_group()
    (folder / f"done-{rank}").touch()


@pytest.mark.distributed
@pytest.mark.slow
def test_three_processes_share_matrices_out(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path / 'meeting'}"
    mp.start_processes(work, (meeting, tmp_path), nprocs=NUM_RANKS, start_method="spawn")
    assert len(list(tmp_path.glob("done-*"))) == NUM_RANKS
