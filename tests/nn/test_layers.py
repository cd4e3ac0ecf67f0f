"""Norm, rotary positions and MLP against closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F

from depthmix.nn.layers import (
    MLP,
    RMSNorm,
    activate,
    at_least_float32,
    input_width,
    look_up_phases,
    make_phase_table,
    normalize_rms,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_at_least_float32_only_widens(given: torch.dtype, expected: torch.dtype) -> None:
    assert at_least_float32(torch.zeros(1, dtype=given)).dtype == expected


def test_normalize_rms_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    root = math.sqrt(12.5 + 0.5)
    expected = torch.tensor([[3 / root, 4 / root], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(normalize_rms(x, 0.5), expected, rtol=0, atol=1e-15)


def test_rmsnorm_equals_torch_and_scales() -> None:
    norm, x = RMSNorm(8, 1e-5).double(), torch.randn(2, 3, 8, dtype=torch.float64)
    assert torch.equal(norm.weight, torch.ones(8, dtype=torch.float64))
    norm.weight.data.uniform_(0.5, 2)
    expected = F.rms_norm(x, (8,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-14)


def test_rmsnorm_takes_the_mean_square_in_float32() -> None:
    # 300² is beyond float16
    norm, x = RMSNorm(4, 1e-6), torch.full((1, 1, 4), 300.0, dtype=torch.float16)
    assert torch.equal(norm(x), torch.ones(1, 1, 4, dtype=torch.float16))


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_rmsnorm_equals_its_formula(
    dtype: torch.dtype, atol: float, compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one kernel, and, where a compiler fuses it, written out."""
    norm, x = RMSNorm(8, 0.1).to(dtype), torch.randn(2, 3, 8, dtype=dtype)
    norm.weight.data.uniform_(0.5, 2)
    wide, weight = x.double(), norm.weight.double()
    expected = wide / (wide.square().mean(dim=-1, keepdim=True) + 0.1).sqrt() * weight
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    found = norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_rmsnorm_keeps_bf16_and_rounds_once(weight_dtype: torch.dtype) -> None:
    norm, x = RMSNorm(64, 1e-6).to(weight_dtype), torch.randn(5, 64).bfloat16() * 100
    norm.weight.data.uniform_(0.5, 2)
    found = norm(x)
    assert found.dtype == torch.bfloat16
    wide = x.double()
    expected = wide / wide.square().mean(dim=-1, keepdim=True).sqrt() * norm.weight.double()
    # half of the step between numbers of eight bits, and a little for the float32 inside
    torch.testing.assert_close(found.double(), expected, rtol=2**-8 * 1.01, atol=0)


@pytest.mark.parametrize("position", [0, 1, 7, 100_000])
def test_phase_table_by_hand(position: int) -> None:
    table = make_phase_table(100_001, 8, 500.0)
    assert table.shape == (100_001, 2, 4)
    assert table.dtype == torch.float32
    for pair in range(4):
        angle = position * 500.0 ** (-2 * pair / 8)
        found = table[position, :, pair].tolist()
        assert found == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-7)


def test_stretched_positions_by_hand() -> None:
    plain = make_phase_table(64, 8, 100.0)
    # as if every position were a quarter of itself
    torch.testing.assert_close(make_phase_table(64, 8, 100.0, (4.0,))[::4], plain[:16])
    # trained for 40 positions, in which the four frequencies turn 6.4, 2.0, 0.64 and 0.2 times
    table = make_phase_table(64, 8, 100.0, (4.0, 1.0, 4.0, 40.0))
    turns = 40 * 100.0**-0.25 / (2 * math.pi)
    share = (turns - 1) / 3
    assert 0 < share < 1
    factors = torch.tensor([1.0, share + (1 - share) / 4, 0.25, 0.25], dtype=torch.float64)
    angles = 63 * factors * 100.0 ** -torch.arange(0, 1, 0.25, dtype=torch.float64)
    torch.testing.assert_close(table[63, 0], angles.cos().float())
    torch.testing.assert_close(table[63, 1], angles.sin().float())


def test_phases_are_looked_up_by_position() -> None:
    table = make_phase_table(10, 4, 100.0)
    phases = look_up_phases(table, torch.tensor([[0, 9, 3], [5, 5, 1]]))
    assert phases.shape == (2, 3, 2, 2)
    assert torch.equal(phases[1, 0], table[5])
    assert torch.equal(phases[0, 1], table[9])


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_mlp_by_hand(kind: str) -> None:
    mlp, x = MLP(4, 6, kind).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    up = x @ mlp.w_up.weight.T
    if kind == "swiglu":
        assert mlp.w_gate is not None
        gate = x @ mlp.w_gate.weight.T
        inner = gate / (1 + torch.exp(-gate)) * up
    else:
        assert mlp.w_gate is None
        inner = up * (1 + torch.erf(up / math.sqrt(2))) / 2
    torch.testing.assert_close(mlp(x), inner @ mlp.w_out.weight.T, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_activation_of_a_joined_matrix_by_hand(kind: str) -> None:
    """Experts hold SwiGLU's two matrices as one: the gate's columns first."""
    assert input_width(6, kind) == (12 if kind == "swiglu" else 6)
    hidden = torch.randn(5, input_width(6, kind), dtype=torch.float64)
    if kind == "swiglu":
        expected = hidden[:, :6] / (1 + torch.exp(-hidden[:, :6])) * hidden[:, 6:]
    else:
        expected = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    torch.testing.assert_close(activate(hidden, kind), expected, rtol=0, atol=1e-14)
