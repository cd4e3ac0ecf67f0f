"""Each Triton kernel against its reference under torch.compile, on one GPU.

    python benchmarks/kernels.py

The kernels in `depthmix.kernels.triton` are kept only if they win here. Each is checked before it
is timed. Times are medians of CUDA-graph replays.
"""

import argparse
import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from meters import require_gpu
from torch import Tensor
from triton.testing import do_bench

from depthmix.kernels import cross_entropy, linear_cross_entropy, reference
from depthmix.kernels import triton as kernels

SHAPES = {"large": (16, 2048, 1024, 256, 32768), "small": (32, 1024, 512, 128, 16384)}


def time_graph(function: Callable[[], object]) -> float:
    """Microseconds per call, with many calls replayed as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            function()
    return do_bench(graph.replay, return_mode="median") / 5 * 1000


def check(name: str, ours: list[Tensor], truth: list[Tensor]) -> None:
    for value, expected in zip(ours, truth, strict=True):
        error = ((value.double() - expected.double()).norm() / expected.double().norm()).item()
        assert error < 1e-2, f"{name}: relative error {error}"


def compare(
    name: str, shape: str, ours: Callable[[], list[Tensor]], plain: Callable[[], list[Tensor]]
) -> None:
    check(name, ours(), plain())
    us_ours, us_plain = time_graph(ours), time_graph(plain)
    print(
        f"| {name} | {shape} | {us_ours:.1f} | {us_plain:.1f} | {us_plain / us_ours:.2f} |",
        flush=True,
    )


def compare_all(shape: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    rows, tokens, width, kept, classes = SHAPES[shape]
    half = {"device": "cuda", "dtype": torch.bfloat16}
    scores = torch.randn(rows, tokens, device="cuda")
    compiled_topk = torch.compile(reference.select_topk, fullgraph=True)
    compare(
        "select_topk",
        shape,
        lambda: list(kernels.select_topk(scores, kept)),
        lambda: list(compiled_topk(scores, kept)),
    )

    heads, head_width = 2 * (width // 128), 128
    packed = torch.randn(rows, tokens, heads, head_width, **half, requires_grad=True)
    phase = torch.randn(1, tokens, 2, head_width // 2, device="cuda")
    grads = [torch.randn(rows, tokens, heads // 2, head_width, **half) for _ in range(2)]
    compiled_rotate = torch.compile(reference.rotate_split, fullgraph=True)
    compare(
        "rotate_split, forward and backward",
        shape,
        lambda: list(
            torch.autograd.grad(kernels.rotate_split(packed, phase, heads // 2), packed, grads)
        ),
        lambda: list(
            torch.autograd.grad(compiled_rotate(packed, phase, heads // 2), packed, grads)
        ),
    )

    hidden = torch.randn(rows * tokens, width, **half, requires_grad=True)
    head = (torch.randn(classes, width, **half) * 0.05).requires_grad_()
    targets = torch.randint(classes, (rows * tokens,), device="cuda")

    @torch.compile(fullgraph=True)
    def plain_loss(hidden: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, head).float(), targets)

    compare(
        f"linear_cross_entropy, forward and backward, {cross_entropy.CHUNK_TOKENS} tokens a chunk",
        shape,
        lambda: list(
            torch.autograd.grad(linear_cross_entropy(hidden, head, targets, -100), (hidden, head))
        ),
        lambda: list(torch.autograd.grad(plain_loss(hidden, head), (hidden, head))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    require_gpu(parser)
    print("| kernel | shape | Triton, µs | torch.compile, µs | x |\n|---|---|---|---|---|")
    for name in SHAPES:
        compare_all(name)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
