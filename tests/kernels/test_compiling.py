"""Kernels are compiled ahead and side by side, for a GPU that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "compiled_kernels.py"


def run(what: str, cache: Path) -> dict[str, Any]:
    pytest.importorskip("triton")
    # what Triton interprets is not compiled
    changes = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, PROGRAM, what],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_launched_is_compiled_once_and_not_run(tmp_path: Path) -> None:
    told = run("compile", tmp_path)
    assert (told["first"], told["again"]) == (2, 0)
    assert told["heard"] == [[1, 2], [2, 2]]
    for compiled in told["kept"].values():
        assert len(compiled) == 1
        assert "cubin" in compiled[0]


def test_an_error_comes_out_and_launches_are_launches_again(tmp_path: Path) -> None:
    told = run("fail", tmp_path)
    assert told == {"errors": ["CompilationError", "KeyboardInterrupt"], "launches": True}
