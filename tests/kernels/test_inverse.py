"""Gathers in both directions equal the reference: outputs and gradients, with poisoned memory."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthmix.kernels import inverse, reference


@pytest.fixture
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make uninitialised floats NaN, so that unwritten memory cannot pass for zero."""

    def poison(make: Any) -> Any:
        def make_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(-(2**30))

        return make_poisoned

    for owner, names in ((torch, ("empty", "empty_like")), (Tensor, ("new_empty",))):
        for name in names:
            monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int, bool, int]:
    length = draw(st.integers(1, 9))
    return (
        draw(st.integers(1, 3)),
        length,
        draw(st.integers(1, length)),
        draw(st.integers(1, 5)),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
    )


def run_both(batch: int, length: int, places: int, width: int, full: bool, seed: int) -> list[Any]:
    """[inverse, reference], for each: the gathered rows, the sum, and every gradient."""
    made = torch.Generator().manual_seed(seed)
    counts = None if full else torch.randint(0, places + 1, (batch,), generator=made)
    index, slot = reference.select_topk(torch.randn(batch, length, generator=made), places, counts)
    shape = {"x": (batch, length, width), "u": (batch, places, width), "w": (batch, places)}
    values = {k: torch.randn(s, generator=made, dtype=torch.float64) for k, s in shape.items()}
    upstream = torch.randn(shape["x"], generator=made, dtype=torch.float64)
    pulled = torch.randn(shape["u"], generator=made, dtype=torch.float64)
    results = []
    for kernels in (inverse, reference):
        x, update, weight = (v.clone().requires_grad_() for v in values.values())
        taken, rest = kernels.gather_tokens(x, index, slot)
        summed = kernels.scatter_add_tokens(rest.sin(), update, weight, index, slot)
        ((taken * pulled).sum() + (summed * upstream).sum()).backward()
        results.append([taken, summed, x.grad, update.grad, weight.grad])
    return results


@pytest.mark.usefixtures("_poisoned_memory")
# the fixture only replaces functions, so examples may share it
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes())
def test_inverse_equals_the_reference(shape: tuple[int, int, int, int, bool, int]) -> None:
    assert torch.empty(1).isnan().all()
    fast, truth = run_both(*shape)
    for ours, expected in zip(fast, truth, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)


def test_gradients_of_weight_and_update_are_zero_in_empty_places() -> None:
    index, slot = reference.select_topk(torch.randn(1, 6), 4, torch.tensor([2]))
    x = torch.randn(1, 6, 3, dtype=torch.float64)
    update = torch.full((1, 4, 3), float("nan"), dtype=torch.float64)
    update[:, :2] = 1.0
    update.requires_grad_()
    weight = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    inverse.scatter_add_tokens(x, update, weight, index, slot).sum().backward()
    assert update.grad is not None
    assert weight.grad is not None
    assert update.grad[0, :, 0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert weight.grad[0].tolist() == [3.0, 3.0, 0.0, 0.0]


def test_inverse_gradients_are_right() -> None:
    index, slot = reference.select_topk(torch.randn(2, 5), 3, torch.tensor([3, 1]))
    x = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    update = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, u, w: inverse.scatter_add_tokens(x, u, w, index, slot), (x, update, weight)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mixed_types_keep_their_gradients_types(dtype: torch.dtype) -> None:
    index, slot = reference.select_topk(torch.randn(2, 8), 3)
    x = torch.randn(2, 8, 64, dtype=dtype, requires_grad=True)
    weight = torch.randn(2, 3, requires_grad=True)
    update, rest = inverse.gather_tokens(x, index, slot)
    update.retain_grad()
    summed = inverse.scatter_add_tokens(rest, update, weight, index, slot)
    truth = reference.scatter_add_tokens(x, update, weight, index, slot)
    assert torch.equal(summed, truth)
    assert summed.dtype == dtype
    upstream = torch.randn_like(summed)
    summed.backward(upstream)
    assert x.grad is not None
    assert update.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, update.grad.dtype, weight.grad.dtype) == (dtype, dtype, torch.float32)
    # the gate's gradient is a sum over the whole width: in float32 even if the stream is not
    taken = inverse.take_rows(upstream, index).double() * update.detach().double()
    torch.testing.assert_close(weight.grad.double(), taken.sum(2), rtol=1e-5, atol=1e-5)
