"""Muon for recorded steps takes the steps of torch's own, whatever the order of shapes."""

import copy

import pytest
import torch
from torch import nn

from depthmix.train.muon import Muon, orthogonalize

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


def test_what_has_no_gradient_stays() -> None:
    matrices = make_matrices()
    optimizer = Muon(matrices, **OPTIONS)
    before = [matrix.detach().clone() for matrix in matrices]
    matrices[1].grad = torch.randn_like(matrices[1])
    optimizer.step()
    moved = [not torch.equal(m, old) for m, old in zip(matrices, before, strict=True)]
    assert moved == [False, True, *[False] * 5]
    assert list(optimizer.state) == [matrices[1]]


def test_saved_state_goes_on() -> None:
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
    made = orthogonalize(matrices, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.5
    assert values.max() < 1.4
    # and the singular vectors that they had: each alone, whatever stands beside it
    alone = orthogonalize(matrices[1:2], (3.4445, -4.7750, 2.0315), 5, 1e-7)
    torch.testing.assert_close(made[1:2], alone)
    whole = torch.linalg.svd(matrices, full_matrices=False)
    assert ((made * (whole.U @ whole.Vh)).sum(dim=(1, 2)) / 6 > 0.6).all()
