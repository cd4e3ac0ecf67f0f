"""Muon for recorded steps takes the steps of torch's own, whatever the order of shapes."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from depthmix.train.muon import Exchange, Muon, cut_shape, orthogonalize

SHAPES = [(8, 8), (16, 8), (8, 16), (8, 24), (8, 8), (24, 8), (5, 5)]
OPTIONS = {"weight_decay": 0.1, "momentum": 0.9}


def make_matrices() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def step(optimizer: torch.optim.Optimizer, matrices: list[nn.Parameter], number: int) -> None:
    torch.manual_seed(number)
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    optimizer.step()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_steps_are_torchs(as_tensor: bool) -> None:
    ours, theirs = make_matrices(), make_matrices()
    fast = Muon(ours, **OPTIONS)
    plain = torch.optim.Muon(theirs, **OPTIONS, adjust_lr_fn="match_rms_adamw")
    for number, rate in enumerate((0.3, 0.1, 0.02)):
        fast.param_groups[0]["lr"] = torch.tensor(rate) if as_tensor else rate
        plain.param_groups[0]["lr"] = rate
        before = [matrix.detach().clone() for matrix in theirs]
        step(fast, ours, number)
        step(plain, theirs, number)
        for mine, other, old in zip(ours, theirs, before, strict=True):
            # torch's iteration is in bf16, which is off by some per cent of an update
            error = (mine - other).norm() / (other - old).norm()
            assert error < 0.05
            mine.data.copy_(other)
    for mine, other in zip(ours, theirs, strict=True):
        buffers = [o.state[m]["momentum_buffer"] for o, m in ((fast, mine), (plain, other))]
        torch.testing.assert_close(*buffers)


@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8), (2, 5, 5)])
def test_a_stack_is_trained_like_its_matrices(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(shape))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    stacked, single = Muon([stack], **OPTIONS), Muon(matrices, **OPTIONS)
    for number in range(3):
        torch.manual_seed(number)
        stack.grad = torch.randn(shape)
        for matrix, grad in zip(matrices, stack.grad, strict=True):
            matrix.grad = grad
        stacked.step()
        single.step()
    torch.testing.assert_close(stack.detach(), torch.stack([m.detach() for m in matrices]))


def test_parameters_without_a_gradient_do_not_change() -> None:
    matrices = make_matrices()
    optimizer = Muon(matrices, **OPTIONS)
    before = [matrix.detach().clone() for matrix in matrices]
    matrices[1].grad = torch.randn_like(matrices[1])
    optimizer.step()
    moved = [not torch.equal(m, old) for m, old in zip(matrices, before, strict=True)]
    assert moved == [False, True, *[False] * 5]
    assert list(optimizer.state) == [matrices[1]]


def test_training_continues_from_saved_state() -> None:
    matrices = make_matrices()
    optimizer = Muon(matrices, **OPTIONS)
    step(optimizer, matrices, 0)
    twins = [nn.Parameter(matrix.detach().clone()) for matrix in matrices]
    twin = Muon(twins, **OPTIONS)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, all_of_it in ((optimizer, matrices), (twin, twins)):
        step(one, all_of_it, 1)
    for mine, other in zip(matrices, twins, strict=True):
        assert torch.equal(mine, other)


def test_orthogonal_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 6, 10)
    made = orthogonalize(matrices)
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.5
    assert values.max() < 1.4
    # and the singular vectors that they had: each alone, whatever stands beside it
    alone = orthogonalize(matrices[1:2])
    torch.testing.assert_close(made[1:2], alone)
    whole = torch.linalg.svd(matrices, full_matrices=False)
    assert ((made * (whole.U @ whole.Vh)).sum(dim=(1, 2)) / 6 > 0.6).all()


NUM_RANKS = 3
# shape, and the dimension that is cut; of 3 the last part of 7 is short, and that of 4 and 1 empty
CASES = [((7, 4), 0), ((4, 7), 0), ((5, 6), 1), ((9, 2), 0), ((1, 3), 0), ((2, 2), 0), ((6, 5), 0)]
CASES += [((4, 3, 2), 0), ((2, 3, 6), 2)]


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
