"""Each Triton kernel against what torch.compile makes of its reference, on one GPU.

    python benchmarks/kernels.py

The kernels of `depthmix.kernels.triton` must win here to stay. The two candidates in this file,
gather + RMSNorm on the way into a routed block and gate + scatter-add on the way out, are held
against `depthmix.kernels.inverse`, which is plain torch. Every candidate is checked before it is
timed. Times are medians of CUDA-graph replays.
"""

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench

from depthmix.kernels import cross_entropy, inverse, linear_cross_entropy, reference
from depthmix.kernels import triton as kernels
from depthmix.nn.layers import normalize_rms

EPS = 1e-6
SHAPES = {"large": (16, 2048, 1024, 256, 32768), "small": (32, 1024, 512, 128, 16384)}


@triton.jit
def _gather_norm(
    x, index, weight, gathered, normed, num_tokens, num_kept, width, eps, block: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    token = (place // num_kept) * num_tokens + tl.load(index + place)
    lane = tl.arange(0, block)
    inside = lane < width
    row = tl.load(x + token * width + lane, mask=inside, other=0.0)
    tl.store(gathered + place * width + lane, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(
        normed + place * width + lane,
        wide * scale * tl.load(weight + lane, mask=inside),
        mask=inside,
    )


@triton.jit
def _gather_norm_grad(
    gathered,
    weight,
    slot,
    grad_gathered,
    grad_normed,
    grad_x,
    num_tokens,
    num_kept,
    width,
    eps,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot + token)
    lane = tl.arange(0, block)
    inside = lane < width
    total = tl.zeros((block,), dtype=tl.float32)
    if place >= 0:
        here = ((token // num_tokens) * num_kept + place) * width + lane
        row = tl.load(gathered + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(row * row) / width + eps)
        unit = row * scale
        inner = tl.load(grad_normed + here, mask=inside, other=0.0).to(tl.float32)
        inner *= tl.load(weight + lane, mask=inside, other=0.0)
        total = tl.load(grad_gathered + here, mask=inside, other=0.0).to(tl.float32)
        total += scale * (inner - unit * (tl.sum(inner * unit) / width))
    tl.store(grad_x + token * width + lane, total, mask=inside)


@triton.jit
def _scatter_add(x, update, weight, slot, out, num_tokens, num_kept, width, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot + token)
    lane = tl.arange(0, block)
    inside = lane < width
    row = tl.load(x + token * width + lane, mask=inside, other=0.0).to(tl.float32)
    if place >= 0:
        here = (token // num_tokens) * num_kept + place
        row += tl.load(weight + here) * tl.load(
            update + here * width + lane, mask=inside, other=0.0
        )
    tl.store(out + token * width + lane, row, mask=inside)


@triton.jit
def _scatter_add_grad(
    grad,
    update,
    weight,
    index,
    grad_update,
    grad_weight,
    num_tokens,
    num_kept,
    width,
    block: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token = (place // num_kept) * num_tokens + tl.load(index + place)
    lane = tl.arange(0, block)
    inside = lane < width
    row = tl.load(grad + token * width + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_update + place * width + lane, row * tl.load(weight + place), mask=inside)
    old = tl.load(update + place * width + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_weight + place, tl.sum(row * old))


def time_graph(function: Callable[[], object]) -> float:
    """Microseconds of one call, many of them replayed as a graph."""
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
    compare_candidates(shape, scores)


def compare_candidates(shape: str, scores: Tensor) -> None:
    rows, tokens, width, kept, _ = SHAPES[shape]
    half = {"device": "cuda", "dtype": torch.bfloat16}
    index, slot = kernels.select_topk(scores, kept)
    x, update = torch.randn(rows, tokens, width, **half), torch.randn(rows, kept, width, **half)
    scale, weight = torch.rand(width, device="cuda"), torch.randn(rows, kept, device="cuda")
    grad_x = torch.randn(rows, tokens, width, **half)
    grads = [torch.randn(rows, kept, width, **half) for _ in range(2)]
    sizes = (tokens, kept, width)
    block = triton.next_power_of_2(width)

    @torch.compile(fullgraph=True)
    def way_in(x: Tensor) -> tuple[Tensor, Tensor]:
        gathered = inverse.gather_tokens(x, index, slot)
        return gathered, (normalize_rms(gathered, EPS) * scale).to(x.dtype)

    def triton_in() -> list[Tensor]:
        out = [torch.empty(rows, kept, width, **half) for _ in range(2)]
        _gather_norm[(rows * kept,)](x, index, scale, *out, *sizes, EPS, block=block)
        return out

    gathered = inverse.take_rows(x, index)

    @torch.compile(fullgraph=True)
    def way_in_grad(grad_gathered: Tensor, grad_normed: Tensor) -> Tensor:
        wide = gathered.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        unit, inner = wide * factor, grad_normed.float() * scale
        total = grad_gathered + factor * (inner - unit * (inner * unit).mean(-1, keepdim=True))
        return inverse.take_placed(total.to(x.dtype), slot)

    def triton_in_grad() -> list[Tensor]:
        out = torch.empty_like(x)
        _gather_norm_grad[(rows * tokens,)](
            gathered, scale, slot, *grads, out, *sizes, EPS, block=block
        )
        return [out]

    @torch.compile(fullgraph=True)
    def way_out(x: Tensor, update: Tensor, weight: Tensor) -> Tensor:
        return inverse.scatter_add_tokens(x, update, weight, index, slot)

    def triton_out() -> list[Tensor]:
        out = torch.empty_like(x)
        _scatter_add[(rows * tokens,)](x, update, weight, slot, out, *sizes, block=block)
        return [out]

    @torch.compile(fullgraph=True)
    def way_out_grad(grad: Tensor) -> tuple[Tensor, Tensor]:
        taken = inverse.take_rows(grad, index).float()
        return (taken * weight[..., None]).to(x.dtype), (taken * update).sum(-1)

    def triton_out_grad() -> list[Tensor]:
        out, out_weight = torch.empty_like(update), torch.empty_like(weight)
        _scatter_add_grad[(rows * kept,)](
            grad_x, update, weight, index, out, out_weight, *sizes, block=block
        )
        return [out, out_weight]

    with torch.no_grad():
        compare("gather + RMSNorm (candidate)", shape, triton_in, lambda: list(way_in(x)))
        compare("its gradient (candidate)", shape, triton_in_grad, lambda: [way_in_grad(*grads)])
        compare(
            "gate + scatter-add (candidate)",
            shape,
            triton_out,
            lambda: [way_out(x, update, weight)],
        )
        compare(
            "its gradient (candidate)", shape, triton_out_grad, lambda: list(way_out_grad(grad_x))
        )


if __name__ == "__main__":
    print("| kernel | shape | Triton, µs | torch.compile, µs | x |\n|---|---|---|---|---|")
    for name in SHAPES:
        compare_all(name)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, Python {platform.python_version()}")
