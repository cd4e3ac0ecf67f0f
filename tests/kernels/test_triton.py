"""The Triton kernels equal their reference; without a GPU they run in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthmix.kernels import reference

kernels = pytest.importorskip("depthmix.kernels.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel forgets to write must not be right by chance."""
    plain_empty, plain_new_empty = torch.empty, Tensor.new_empty

    def spoil(made: Tensor) -> Tensor:
        return made.fill_(torch.nan if made.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: spoil(plain_empty(*a, **k)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: spoil(plain_new_empty(*a, **k)))


def draw(seed: int, *limits: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(1, limit + 1, (), generator=generator)) for limit in limits]


@pytest.mark.parametrize("scores", ["distinct", "ties", "zeros", "infinite"])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_select_topk(seed: int, partial: bool, scores: str) -> None:
    rows, tokens = draw(seed, 4, 70)
    (kept,) = draw(seed + 100, tokens)
    torch.manual_seed(seed)
    values = torch.randn(rows, tokens, device=DEVICE)
    if scores == "ties":
        values = values.round()
    elif scores == "zeros":
        # -0.0 and 0.0 are the same score
        values = torch.where(values > 0, 0.0, -0.0)
    elif scores == "infinite":
        values = values.masked_fill(values < 0, -torch.inf).masked_fill(values > 1, torch.inf)
    counts = torch.randint(0, kept + 1, (rows,), device=DEVICE) if partial else None
    ours = kernels.select_topk(values, kept, counts)
    truth = reference.select_topk(values, kept, counts)
    assert torch.equal(ours[0], truth[0])
    assert torch.equal(ours[1], truth[1])


@pytest.mark.parametrize("shared_phase", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rotate_split(seed: int, shared_phase: bool) -> None:
    rows, tokens, queries, keys, half = draw(seed, 3, 9, 5, 3, 6)
    torch.manual_seed(seed)
    x = torch.randn(rows, tokens, queries + keys, 2 * half, device=DEVICE, requires_grad=True)
    phase = torch.randn(1 if shared_phase else rows, tokens, 2, half, device=DEVICE)
    ours = kernels.rotate_split(x, phase, queries)
    truth = reference.rotate_split(x, phase, queries)
    # attention returns gradients in a layout of its own
    grads = [torch.randn_like(part.transpose(1, 2).contiguous()).transpose(1, 2) for part in truth]
    for value, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(value, expected)
    (grad,) = torch.autograd.grad(ours, x, grads)
    (expected_grad,) = torch.autograd.grad(truth, x, grads)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("num_classes", [3, 100, 9001])
def test_cross_entropy(num_classes: int) -> None:
    torch.manual_seed(num_classes)
    logits = (5 * torch.randn(6, num_classes, device=DEVICE)).requires_grad_()
    targets = torch.tensor([0, 2, -100, 1, num_classes - 1, -100], device=DEVICE)
    scale = torch.tensor(0.25, device=DEVICE)
    expected = 0.25 * F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    (expected_grad,) = torch.autograd.grad(expected.sum(), logits)
    work = logits.detach().clone()
    losses = kernels.cross_entropy_(work, targets, scale, -100)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(work, expected_grad)
