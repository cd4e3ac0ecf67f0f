"""How kernels are compiled: once for what is alike, and many at a time.

Knows nothing of what they compute.
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# much of compiling is Python's, which has one lock
MOST_THREADS = 16

_ahead: ContextVar[bool] = ContextVar("depthmix_compile_ahead", default=False)


class Kernel(triton.JITFunction):
    """A kernel that `compile_ahead` keeps from being launched."""

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return super().run(*args, grid=grid, warmup=warmup or _ahead.get(), **options)


def jit(
    function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Any:
    """`triton.jit` of the function itself: a type checker's wrapper hides the names it uses.

    Triton compiles a kernel again for numbers and addresses that are multiples of 16 and for those
    that are not. `do_not_specialize` names the arguments for which that gains nothing: counts, and
    what is read one element at a time.
    """
    if function is None:
        return functools.partial(jit, do_not_specialize=do_not_specialize)
    function, names = inspect.unwrap(function), list(do_not_specialize)
    if INTERPRETED.value:
        return triton.jit(do_not_specialize=names)(function)
    return Kernel(function, do_not_specialize=names)


def compile_ahead(work: Callable[[], object], progress: Callable[[int, int], object]) -> int:
    """Compile the kernels that `work` launches, side by side; returns how many there were.

    None of them is launched, whatever else it computes is computed. What is compiled already is
    left out, and what is on disk is read from there. `progress` hears how many of how many are
    done. An interrupt ends it when those that are under way are done.
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
            # or leaving the mode would wait for all of them
            for future in mode.raw_futures:
                future.cancel()
            mode.raw_futures = []
            raise
        finally:
            _ahead.reset(token)
