"""Products run in the autocast dtype, and in the tensor's own dtype while autocast is stopped."""

import torch
import torch.nn.functional as F

from depthmix.kernels import compute_type, stop_autocast


def test_compute_type_follows_autocast() -> None:
    x = torch.zeros(2, 2)
    assert compute_type(x) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_type(x) == torch.bfloat16
    assert compute_type(x.double()) == torch.float64


def test_autocast_can_be_stopped() -> None:
    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, x).dtype == torch.bfloat16
        with stop_autocast(x):
            assert F.linear(x, x).dtype == torch.float32


def test_meta_tensors_have_no_autocast() -> None:
    x = torch.zeros(2, 2, device="meta")
    assert compute_type(x) == torch.float32
    with stop_autocast(x):
        assert F.linear(x, x).dtype == torch.float32
