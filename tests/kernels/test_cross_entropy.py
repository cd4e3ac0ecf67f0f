"""The fused head and loss equal the head followed by the loss, for any number of classes.

The chunked path runs here as on a GPU; without one its kernel is interpreted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthmix.kernels import cross_entropy, linear_cross_entropy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IGNORE = -100
# 50,257 is 17 more than a multiple of 64, and so is 785
CLASSES = [5, 63, 64, 65, 785, 1000]

Loss = Callable[..., Tensor]


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


def make_inputs(
    num_classes: int, num_rows: int = 7, width: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head with logits of about size 4, and targets including the last class."""
    torch.manual_seed(num_classes)
    hidden = torch.randn(num_rows, width, device=DEVICE, requires_grad=True)
    weight = torch.randn(num_classes, width, device=DEVICE, requires_grad=True)
    targets = torch.randint(num_classes, (num_rows,), device=DEVICE)
    targets[0], targets[2] = num_classes - 1, IGNORE
    return hidden, weight, targets


def compute(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """A loss, and the gradients of three times that loss."""
    found = loss(hidden, weight, targets, IGNORE)
    return [found.detach(), *torch.autograd.grad(3 * found, (hidden, weight))]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # splits seven rows into three, three and one
    monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_classes", CLASSES)
def test_padded_classes_change_nothing(num_classes: int) -> None:
    inputs = make_inputs(num_classes)
    truth = compute(partial(linear_cross_entropy, chunked=False), *inputs)
    alone = compute(partial(linear_cross_entropy, chunked=True, multiple=1), *inputs)
    padded = compute(partial(linear_cross_entropy, chunked=True), *inputs)
    for first, second, third in zip(truth, alone, padded, strict=True):
        assert first.shape == second.shape == third.shape
        torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(third, first, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_classes", CLASSES)
def test_logits_are_made_in_aligned_rows(num_classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from depthmix.kernels import triton

    seen = []
    plain = triton.cross_entropy_

    def spy(logits: Tensor, *args: Any) -> Tensor:
        assert (logits[:, num_classes:] == -torch.inf).all()
        seen.append(logits)
        return plain(logits, *args)

    monkeypatch.setattr(triton, "cross_entropy_", spy)
    compute(partial(linear_cross_entropy, chunked=True), *make_inputs(num_classes))
    assert [len(logits) for logits in seen] == [3, 3, 1]
    for logits in seen:
        # the smallest sufficient multiple of 64
        assert logits.stride() == (-(-num_classes // 64) * 64, 1)
        # they now hold the gradient
        assert not logits[:, num_classes:].any()
        assert logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("value", [40.0, -40.0])
def test_padding_does_not_count_beside_far_logits(value: float) -> None:
    """A logit of 0 in the padding would dominate the softmax, or vanish in it."""
    hidden = torch.ones(3, 4, device=DEVICE, requires_grad=True)
    weight = torch.full((5, 4), value, device=DEVICE, requires_grad=True)
    targets = torch.tensor([0, 1, 4], device=DEVICE)
    found = compute(partial(linear_cross_entropy, chunked=True), hidden, weight, targets)
    truth = compute(partial(linear_cross_entropy, chunked=False), hidden, weight, targets)
    for first, second in zip(found, truth, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_classes", [64, 65])
def test_chunks_under_autocast(num_classes: int) -> None:
    hidden, weight, targets = make_inputs(num_classes)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = compute(partial(linear_cross_entropy, chunked=True), hidden, weight, targets)
    hidden, weight = (t.detach().bfloat16().float().requires_grad_() for t in (hidden, weight))
    truth = compute(partial(linear_cross_entropy, chunked=False), hidden, weight, targets)
    for first, second in zip(found, truth, strict=True):
        assert first.dtype == torch.float32
        error = (first - second).norm() / second.norm()
        assert error < 2e-2
    # the head's gradient is summed over three chunks in float32 and rounded once, to the dtype of
    # the cast weight
    assert torch.equal(found[2], found[2].bfloat16().float())


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_nothing_learns_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = make_inputs(65)
    truth = linear_cross_entropy(hidden, weight, targets, IGNORE, chunked=False)

    def fail(*args: object) -> None:
        raise AssertionError("a gradient is computed")

    monkeypatch.setattr(cross_entropy, "_add_product", fail)
    with torch.no_grad():
        found = linear_cross_entropy(hidden, weight, targets, IGNORE, chunked=True)
    torch.testing.assert_close(found, truth.detach())
    frozen = linear_cross_entropy(hidden.detach(), weight.detach(), targets, IGNORE, chunked=True)
    assert torch.equal(frozen, found)
    with pytest.raises(AssertionError, match="is computed"):
        linear_cross_entropy(hidden, weight.detach(), targets, IGNORE, chunked=True)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("num_classes", [64, 63])
def test_the_operation_is_what_it_says_to_the_compiler(num_classes: int, learns: bool) -> None:
    hidden, weight, targets = make_inputs(64)
    if not learns:
        hidden, weight = hidden.detach(), weight.detach()
    targets = targets.clamp(max=num_classes - 1)
    torch.library.opcheck(
        torch.ops.depthmix.linear_cross_entropy.default,
        (hidden, weight, targets, num_classes, IGNORE, learns),
        # the gradients among the results are not differentiable functions of the inputs
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.usefixtures("small_chunks")
def test_compiled_in_one_piece() -> None:
    torch._dynamo.reset()
    loss = partial(linear_cross_entropy, chunked=True)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    inputs = make_inputs(65)
    for first, second in zip(compute(compiled, *inputs), compute(loss, *inputs), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs, IGNORE), loss(*inputs, IGNORE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_classes", [50257, 50304, 49153])
def test_real_sizes(num_classes: int, compiled: bool, dtype: torch.dtype) -> None:
    """More than one chunk, the last one partial; in float32 chunking is forced."""
    torch._dynamo.reset()
    hidden, weight, targets = make_inputs(num_classes, num_rows=8192 + 808, width=768)
    with torch.no_grad():
        weight.mul_(0.05)
    truth = compute(partial(linear_cross_entropy, chunked=False), hidden, weight, targets)
    loss = partial(linear_cross_entropy, chunked=True if dtype == torch.float32 else None)
    loss = torch.compile(loss, fullgraph=True) if compiled else loss
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = compute(loss, hidden, weight, targets)
    for first, second in zip(found, truth, strict=True):
        assert first.dtype == second.dtype == torch.float32
        error = (first.double() - second.double()).norm() / second.double().norm()
        assert error < (1e-4 if dtype == torch.float32 else 2e-2)
