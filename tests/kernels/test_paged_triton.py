"""Paged attention in Triton equals the reference: lengths, page boundaries, empty places."""

import pytest
import torch

from depthmix.kernels.paged import attend_pages

kernels = pytest.importorskip("depthmix.kernels.paged_triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_inputs(
    heads: int, groups: int, width: int, lengths: list[int], asking: list[int], giving: list[int]
) -> list[torch.Tensor]:
    """Rows that hold `lengths` tokens; `asking` and `giving` are the rows of queries and keys."""
    torch.manual_seed(0)
    page_size, most = 4, 12
    table = torch.randperm(len(lengths) * most).view(len(lengths), most).int()
    # entries that no row holds must not be read
    pages = torch.full((2, groups, len(lengths) * most, page_size, width), torch.nan)
    for row, length in enumerate(lengths):
        for slot in range(length):
            page = table[row, slot // page_size]
            pages[:, :, page, slot % page_size] = torch.randn(2, groups, width)
    return [
        torch.randn(len(asking), heads, width),
        torch.randn(len(giving), groups, width),
        torch.randn(len(giving), groups, width),
        torch.tensor(asking),
        torch.tensor(giving),
        pages[0].clone(),
        pages[1].clone(),
        table,
        torch.tensor(lengths, dtype=torch.int32),
    ]


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 16), (6, 2, 16), (3, 1, 24)])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("block", [4, 16])
def test_equals_the_truth(
    monkeypatch: pytest.MonkeyPatch, heads: int, groups: int, width: int, parts: int, block: int
) -> None:
    asking, giving = [0, 3, 2, -1], [0, 1, 3, 2, -1]
    inputs = make_inputs(heads, groups, width, [0, 3, 40, 7], asking, giving)
    monkeypatch.setattr(kernels, "PROGRAMS", parts * len(asking) * groups)
    monkeypatch.setattr(kernels, "BLOCK_TOKENS", max(block, 16))
    monkeypatch.setattr(kernels, "ALONE_PARTS", (block, 2))
    monkeypatch.setattr(kernels, "ALONE_WHOLE", (2 * block, 3))
    truth_inputs = [t.clone() for t in inputs]
    truth = attend_pages(*truth_inputs)
    inputs = [t.to(DEVICE) for t in inputs]
    found = kernels.attend_pages(*inputs)
    torch.testing.assert_close(found.cpu(), truth, rtol=0, atol=1e-5)
    assert torch.equal(inputs[8].cpu(), truth_inputs[8])
    assert inputs[8].tolist() == [1, 4, 41, 8]
    for ours, theirs in ((inputs[5], truth_inputs[5]), (inputs[6], truth_inputs[6])):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)
    assert not found[asking.index(-1)].any()


def test_pages_may_lie_in_any_order_in_memory() -> None:
    """On a GPU a page's heads are contiguous, on a CPU a head's pages are."""
    inputs = make_inputs(4, 2, 16, [5, 9], [1, 0], [0, 1])
    truth = attend_pages(*[t.clone() for t in inputs])
    inputs = [t.to(DEVICE) for t in inputs]
    for index in (5, 6):
        inputs[index] = inputs[index].transpose(0, 1).contiguous().transpose(0, 1)
    found = kernels.attend_pages(*inputs)
    torch.testing.assert_close(found.cpu(), truth, rtol=0, atol=1e-5)
