"""The head and its loss together equal the head and then the loss."""

import pytest
import torch
import torch.nn.functional as F

from depthmix.kernels import linear_cross_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_equal_torch(dtype: torch.dtype) -> None:
    hidden = torch.randn(9, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(5, 6, dtype=dtype, requires_grad=True)
    targets = torch.tensor([0, 4, -100, 2, 2, -100, 1, 3, 0])
    found = linear_cross_entropy(hidden, weight, targets, -100)
    kept = targets >= 0
    chances = (hidden @ weight.T).log_softmax(-1)[kept]
    expected = -chances[torch.arange(7), targets[kept]].mean()
    torch.testing.assert_close(found, expected.float())
    ours = torch.autograd.grad(found, (hidden, weight))
    theirs = torch.autograd.grad(expected, (hidden, weight))
    for first, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_autocast_multiplies_in_bf16_and_sums_in_float32() -> None:
    hidden, weight, targets = torch.randn(64, 32), torch.randn(40, 32), torch.randint(40, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, targets, -100)
    logits = F.linear(hidden.bfloat16(), weight.bfloat16()).float()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.cross_entropy(logits, targets))
    assert found != linear_cross_entropy(hidden, weight, targets, -100)


def test_no_target_is_no_loss() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    loss = linear_cross_entropy(hidden, weight, torch.full((3,), -100), -100)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()
