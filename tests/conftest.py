"""What every test starts from: one instruction set, fixed seeds, one thread, no GPU assumed."""

import gc
import os
import random
import signal

# Before torch is imported: on some processors oneDNN's newest bf16 kernels die with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# the processes that tests start share the machine with other tests, as tests do
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

# Modules and tests live until the end: a third of collecting them would be looking for garbage.
gc.disable()

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

if not torch.cuda.is_available():
    # read when a kernel is defined: without a GPU, Triton's own interpreter runs it
    os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        import interpreted_kernels
    except ImportError:  # there is not a Triton for every platform
        pass
    else:
        interpreted_kernels.speed_up()

# the models are tiny: a second thread only waits, and badly so where the machine is shared
torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts its background jobs deaf to Ctrl-C, and what they start is deaf too
    signal.signal(signal.SIGINT, signal.default_int_handler)


# `torch.manual_seed` writes down for every kind of device who asked, which takes a while
seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    seed_torch(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # nor are they looked at again in each of the many collections that transformers asks for
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
