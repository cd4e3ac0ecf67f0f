"""Which kernels a GPU would compile for steps of any shape: started as a program, without a GPU.

Nothing is computed: tensors have no memory, and a launch only tells what Triton would
compile a kernel for. Prints how many kernels `warm_up` compiles, and which ones it leaves to the
first step that needs them. "compile" and "fail" in place of a model really compile two.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from depthmix.config import load_preset
from depthmix.infer.engine import count_pages
from depthmix.infer.pages import Pages
from depthmix.infer.paths.fused import (
    CHUNKS,
    FusedRunner,
    Step,
    StepShape,
    choose_chunks,
    choose_size,
)
from depthmix.kernels import compiling
from depthmix.kernels.compiling import compile_ahead
from depthmix.kernels.decode import places
from depthmix.nn import Transformer

MOST_ROWS, STEP_TOKENS, PAGE_SIZE = 256, 2048, 16


def ask(what: str, **environment: str) -> dict[str, Any]:
    """What this program prints in a process of its own, where Triton does not interpret."""
    changes = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, __file__, what],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Hopper:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launches:
    """Takes the place of every launch, and keeps what tells one compiled kernel from another."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], dict[str, str]] = {}

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        backend_options = dict(options, debug=False, instrumentation_mode="")
        *_, binder = kernel.device_caches[0]
        values, kinds, options = binder(*args, **backend_options)
        told = {}
        for parameter, kind in zip(kernel.params, kinds, strict=True):
            known = kind[0] == "constexpr"
            told[parameter.name] = str(values[parameter.name] if known else kind)
        told |= {name: str(options.get(name)) for name in ("num_warps", "num_stages", "maxnreg")}
        self.found.setdefault((kernel.__name__, json.dumps(told)), told)


def list_shapes(runner: FusedRunner) -> Iterator[StepShape]:
    """Every shape that a step can have."""
    sizes = sorted({choose_size(n) for n in range(1, runner.most_tokens + 1)})
    counts = [n for n in CHUNKS if n <= choose_chunks(runner.pages.num_rows)]
    for size in sizes:
        for num_chunks in counts[1:]:
            yield from (StepShape(size, num_alone, num_chunks) for num_alone in counts)
    yield from (StepShape(1 << n, 1 << n, 0) for n in range(runner.pages.num_rows.bit_length()))


@torch.no_grad()
def report(fields: dict[str, Any]) -> dict[str, Any]:
    config = load_preset("tiny").override(fields)
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
    selector = config.choose_selector(None)
    num_pages = count_pages(config, selector, MOST_ROWS, PAGE_SIZE)
    sizes = (num_pages, PAGE_SIZE, config.num_layers, MOST_ROWS)
    pages = Pages(*sizes, ahead=4, longest=config.max_seq_len)
    runner = FusedRunner(model, pages, selector, STEP_TOKENS)
    launches = Launches()
    JITFunction.run = lambda kernel, *args, **options: launches.run(kernel, *args, **options)
    for shape in runner.list_shapes():
        for plain in (True, False):
            runner._compute(runner._find_step(shape), plain, not plain)
    warm = set(launches.found)
    for shape in list_shapes(runner):
        step = Step(shape, len(config.routed_layers), runner.device)
        for plain, filtered in ((True, False), (False, False), (False, True)):
            runner._compute(step, plain, filtered)
    late = [(name, told) for (name, key), told in launches.found.items() if (name, key) not in warm]
    return {"num_warm": len(warm), "late": late}


def compile_some() -> dict[str, Any]:
    """Two kernels, one of them launched twice, compiled ahead; then once more."""
    with torch.device("meta"):
        x, wide = (torch.empty(8, width, dtype=torch.bfloat16) for width in (64, 128))
        count, weight = torch.empty(1, dtype=torch.int32), torch.empty(64, dtype=torch.bfloat16)

    def work() -> None:
        places.activate_places(wide, count, x, "swiglu")
        places.activate_places(wide[:4], count, x[:4], "swiglu")
        places.normalize_places(x, None, count, weight, 1e-6, x)

    heard: list[tuple[int, int]] = []
    first = compile_ahead(work, lambda done, total: heard.append((done, total)))
    again = compile_ahead(work, lambda done, total: heard.append((done, total)))
    kept = {
        kernel.__name__: [sorted(k.asm) for k in kernel.device_caches[0][0].values()]
        for kernel in (places._activate, places._normalize)
    }
    return {"first": first, "again": again, "heard": heard, "kept": kept}


def fail_to_compile() -> dict[str, Any]:
    """What comes out of it where a kernel is wrong, and where a launch after it is."""
    with torch.device("meta"):
        x, count = torch.empty(8, 64), torch.empty(1, dtype=torch.int32)

    def launch_wrong() -> None:
        places._activate[(1,)](x, count, x, 1, 64, "swiglu", block=63, overlaps=False)

    def raise_late() -> None:
        places._activate[(1,)](x, count, x, 1, 64, "swiglu", block=64, overlaps=False)
        raise KeyboardInterrupt

    found = []
    for work in (launch_wrong, raise_late):
        try:
            compile_ahead(work, lambda done, total: None)
        except BaseException as error:
            found.append(type(error).__name__)
    return {"errors": found, "launches": not compiling._ahead.get()}


if __name__ == "__main__":
    driver.set_active(Hopper())  # pyrefly: ignore[bad-argument-type]
    told = {"compile": compile_some, "fail": fail_to_compile}.get(sys.argv[1])
    print(json.dumps(told() if told else report(json.loads(sys.argv[1]))))
