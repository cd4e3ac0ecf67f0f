"""Matrices are divided into tiles that fit a program. Invalid plans: see `test_step`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

plan = pytest.importorskip("depthmix.kernels.decode.plan")


@given(
    st.integers(1, 40000),
    st.integers(1, 9000),
    st.integers(1, 300),
    st.sampled_from([256, 4096, 8192, 16384]),
    st.booleans(),
)
def test_tiles_are_powers_of_two_and_not_too_large(
    num_rows: int, width: int, num_programs: int, tile: int, paired: bool
) -> None:
    tuning = plan.StepTuning(num_programs, tile=tile, min_columns=256)
    partner = num_rows if paired else 0
    cut = plan.cut_matrix(num_rows, width, torch.bfloat16, tuning, partner=partner)
    for size in (cut.rows, cut.columns):
        assert size & (size - 1) == 0
    assert cut.step >= 1
    assert cut.columns >= 16
    assert 2 * cut.rows * cut.columns <= max(tile, 512)
    assert 0 <= cut.padded - width < cut.columns
    # a tile is never twice as tall as a program's rows
    assert cut.step < 2 * max(2, -(-num_rows // num_programs))
