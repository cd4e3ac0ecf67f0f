"""Random state goes through JSON unchanged, and every rank has its own."""

import json
import random

import numpy as np
import pytest
import torch

from depthmix.checkpoint import collect_rng, restore_rank_rng, restore_rng, seed_rng


def draw() -> tuple[object, ...]:
    # normal draws come in pairs: an odd number leaves one waiting, which is state too
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.randint(1 << 30),
        float(np.random.normal()),
        tuple(torch.rand(3).tolist()),
        tuple(torch.randn(3).tolist()),
    )


def test_restored_state_draws_the_same() -> None:
    draw()
    saved = json.loads(json.dumps(collect_rng()))
    first = [draw(), draw()]
    assert first[0] != first[1]
    restore_rng(saved)
    assert [draw(), draw()] == first


@pytest.mark.gpu
def test_restored_state_draws_the_same_on_the_gpu() -> None:
    saved = json.loads(json.dumps(collect_rng()))
    first = torch.rand(3, device="cuda")
    restore_rng(saved)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_every_rank_gets_its_own_state() -> None:
    states, drawn = [], []
    for rank in range(2):
        seed_rng(5, rank, 0)
        states.append(collect_rng())
        drawn.append(draw())
    for rank in range(2):
        assert restore_rank_rng(states, rank=rank, num_ranks=2, seed=5, step=9) is None
        assert draw() == drawn[rank]


def test_more_ranks_are_seeded_and_reported() -> None:
    saved = [collect_rng()]
    expected = draw()
    told = restore_rank_rng(saved, rank=0, num_ranks=2, seed=5, step=9)
    assert told is not None
    assert "written by 1 ranks and this run has 2" in told
    assert draw() == expected

    assert restore_rank_rng(saved, rank=1, num_ranks=2, seed=5, step=9) == told
    seeded = draw()
    assert seeded != expected
    seed_rng(5, 1, 9)
    assert draw() == seeded


def test_fewer_ranks_are_reported() -> None:
    told = restore_rank_rng([collect_rng()] * 3, rank=0, num_ranks=1, seed=0, step=0)
    assert told is not None


@pytest.mark.parametrize("other", [(6, 1, 9), (5, 2, 9), (5, 1, 8)])
def test_seeds_differ_by_seed_rank_and_step(other: tuple[int, int, int]) -> None:
    seed_rng(5, 1, 9)
    first = draw()
    seed_rng(*other)
    second = draw()
    assert all(a != b for a, b in zip(first, second, strict=True))
