"""The grouped product against a loop over rows, its gradients, and its FLOPs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from depthmix.kernels import grouped, multiply_groups


def make_ends(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def multiply_by_rows(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    rows = [row @ weight[expert] for row, expert in zip(x, experts, strict=True)]
    return torch.stack(rows) if rows else x.new_zeros(0, weight.shape[2])


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 5))
def test_product_equals_a_loop_over_rows(counts: list[int], width: int, columns: int) -> None:
    torch.manual_seed(sum(counts))
    x = torch.randn(sum(counts), width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(counts), width, columns, dtype=torch.float64, requires_grad=True)
    ours = multiply_groups(x, weight, make_ends(counts))
    truth = multiply_by_rows(x, weight, counts)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-13)
    upstream = torch.randn_like(ours)
    # an expert without rows has no gradient in the loop, which counts as zero
    expected = torch.autograd.grad(
        (truth * upstream).sum() + 0 * (x.sum() + weight.sum()), (x, weight)
    )
    found = torch.autograd.grad((ours * upstream).sum(), (x, weight))
    for ours_grad, truth_grad in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_grad, truth_grad, rtol=0, atol=1e-13)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 5))
def test_product_that_asks_nobody_equals_the_loop(
    counts: list[int], width: int, columns: int
) -> None:
    torch.manual_seed(sum(counts))
    x = torch.randn(sum(counts), width, dtype=torch.float64)
    weight = torch.randn(len(counts), width, columns, dtype=torch.float64)
    found = grouped.multiply_all_groups(x, weight, make_ends(counts))
    truth = multiply_groups(x, weight, make_ends(counts))
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-13)


def test_product_that_asks_nobody_reads_no_number() -> None:
    """A meta tensor has no values to read; and non-finite rows do not affect others."""
    x, weight = torch.randn(6, 4), torch.randn(3, 4, 2)
    arguments = [t.to("meta") for t in (x, weight, make_ends([1, 0, 5]))]
    assert grouped.multiply_all_groups(*arguments).shape == (6, 2)
    x[0], weight[1] = torch.inf, torch.nan
    found = grouped.multiply_all_groups(x, weight, make_ends([1, 0, 5]))
    assert found[1:].isfinite().all()
    assert not found[0].isfinite().any()


@pytest.mark.parametrize("counts", [[2, 3, 1], [0, 4, 0], [0, 0, 5], [5, 0, 0]])
def test_gradcheck_with_empty_experts(counts: list[int]) -> None:
    x = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    ends = make_ends(counts)
    assert torch.autograd.gradcheck(lambda x, w: multiply_groups(x, w, ends), (x, weight))


def test_operator_is_well_formed() -> None:
    """Schema, fake tensors and autograd agree with the operator itself."""
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(3, 4, 2, requires_grad=True)
    checked = torch.library.opcheck(
        torch.ops.depthmix.multiply_groups.default, (x, weight, make_ends([1, 0, 5]))
    )
    assert set(checked.values()) == {"SUCCESS"}


def test_flops_are_those_of_one_product_over_all_rows() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(3, 4, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = multiply_groups(x, weight, make_ends([1, 0, 5]))
    assert counter.get_total_flops() == 2 * 6 * 4 * 5
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 6 * 4 * 5)
