"""What every test starts from: one instruction set, fixed seeds, two threads, no GPU assumed."""

import os
import random

# Before torch is imported. oneDNN picks its kernels by processor; this ceiling (below AMX) gives
# bf16 results that are the same on different machines.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import numpy as np
import pytest
import torch

try:
    import hypothesis
except ImportError:  # the GPU tests also run where only torch and pytest are installed
    pass
else:
    # No deadline: a first call may compile or load, and its time says nothing.
    hypothesis.settings.register_profile(
        "depthmix", deadline=None, derandomize="CI" in os.environ, print_blob=True
    )
    hypothesis.settings.load_profile("depthmix")

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
