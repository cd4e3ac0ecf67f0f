"""The steps of few rows: without a GPU every table is made in Triton's interpreter."""

import os
import subprocess
import sys

import pending
import pytest


@pytest.mark.slow
def test_without_a_gpu_every_table_is_interpreted() -> None:
    pytest.importorskip("triton")
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(pending.FOLDER / "rows.py")],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tables = ("| 5 | 1 | nan", "| kernel |", "| plain: 16 rows | nan", "| dense block, us |")
    assert all(table in done.stdout for table in tables)
