"""Off the GPU a linear layer is torch's own; its GPU path is tested in integration/test_gpu.py."""

import pytest
import torch
import torch.nn.functional as F

from depthmix.kernels import linear
from depthmix.kernels.linear import _Linear


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


@pytest.mark.compile
@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_weight_has_no_gradient_computed(compiled: bool) -> None:
    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, weight)

    x, weight = torch.randn(2, 3, 64, requires_grad=True), torch.randn(32, 64)
    function = (
        torch.compile(multiply, backend="aot_eager", fullgraph=True) if compiled else multiply
    )
    # no CPU supports its product
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.mm(weight, weight.T, out_dtype=torch.float32)
    (found,) = torch.autograd.grad(function(x, weight).sum(), x)
    (truth,) = torch.autograd.grad(F.linear(x, weight).sum(), x)
    torch.testing.assert_close(found, truth)
