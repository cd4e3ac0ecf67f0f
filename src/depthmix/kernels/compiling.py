"""How kernels are compiled: once per set of equivalent arguments, and in parallel.

Knows nothing of what they compute.
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# much of the compiler is Python code, which the global lock serializes
MOST_THREADS = 16

_ahead: ContextVar[bool] = ContextVar("depthmix_compile_ahead", default=False)


class Kernel(triton.JITFunction):
    """A kernel that `compile_ahead` compiles without launching."""

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return super().run(*args, grid=grid, warmup=warmup or _ahead.get(), **options)


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Return options of a launch that may start before the previous kernel ends: see `await_turn`.

    Devices can do that from Hopper on.
    """
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"overlaps": can, "launch_pdl": can}


def is_ahead() -> bool:
    """Whether kernels are only compiled, not launched: see `compile_ahead`."""
    return _ahead.get()


def jit(
    function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Any:
    """`triton.jit` of the unwrapped function: a type checker's wrapper hides the names it uses.

    Triton compiles separate versions for numbers and addresses that are multiples of 16 and those
    that are not. `do_not_specialize` names the arguments for which that gains nothing: counts, and
    tensors read one element at a time.
    """
    if function is None:
        return functools.partial(jit, do_not_specialize=do_not_specialize)
    function, names = inspect.unwrap(function), list(do_not_specialize)
    if INTERPRETED.value:
        return triton.jit(do_not_specialize=names)(function)
    return Kernel(function, do_not_specialize=names)


@jit
def await_turn(overlaps: tl.constexpr):
    """Wait for the previous kernel, and let the next one start, which waits in its turn.

    In this order, a kernel that starts can rely on what was written before the previous one.
    """
    if overlaps:
        gdc_wait()
        gdc_launch_dependents()


def compile_ahead(work: Callable[[], object], progress: Callable[[int, int], object]) -> int:
    """Compile the kernels that `work` launches, in parallel; return how many there were.

    No kernel is launched, but everything else in `work` runs. Kernels already compiled are skipped,
    and those in the disk cache are loaded from it. `progress` is called with the number done and
    the total. An interrupt takes effect when the compilations in progress finish.
    """
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    with threads, triton.AsyncCompileMode(threads) as mode:
        token = _ahead.set(True)
        try:
            work()
            total = len(mode.raw_futures)
            for number, future in enumerate(as_completed(mode.raw_futures), 1):
                future.result()
                progress(number, total)
            return total
        except BaseException:
            # otherwise leaving the mode would wait for all of them
            for future in mode.raw_futures:
                future.cancel()
            mode.raw_futures = []
            raise
        finally:
            _ahead.reset(token)
