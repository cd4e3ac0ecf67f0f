"""Kernels are compiled ahead of time and in parallel, for a GPU that need not be present."""

from pathlib import Path

import pytest

compiled_kernels = pytest.importorskip("compiled_kernels")

pytestmark = pytest.mark.slow


def test_what_is_launched_is_compiled_once_and_not_run(tmp_path: Path) -> None:
    told = compiled_kernels.ask("compile", TRITON_CACHE_DIR=str(tmp_path))
    assert (told["first"], told["again"]) == (2, 0)
    assert told["heard"] == [[1, 2], [2, 2]]
    for compiled in told["kept"].values():
        assert len(compiled) == 1
        assert "cubin" in compiled[0]


def test_an_error_comes_out_and_launches_are_launches_again(tmp_path: Path) -> None:
    told = compiled_kernels.ask("fail", TRITON_CACHE_DIR=str(tmp_path))
    assert told == {"errors": ["CompilationError", "KeyboardInterrupt"], "launches": True}
