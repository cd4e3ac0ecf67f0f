"""Off the GPU a linear layer is torch's own; its GPU path is tested in integration/test_gpu.py."""

import pytest
import torch
import torch.nn.functional as F

from depthmix.kernels import linear


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_is_torchs_own_on_a_cpu(autocast: bool) -> None:
    x = torch.randn(2, 3, 64, requires_grad=True)
    weight = torch.randn(32, 64, requires_grad=True)
    results = []
    for function in (linear, F.linear):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = function(x, weight)
        results.append([out, *torch.autograd.grad(out.float().sum(), (x, weight))])
    assert results[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)
    for ours, truth in zip(*results, strict=True):
        assert torch.equal(ours, truth)
