"""The one-kernel decoding step alone: its settings against each other, and what a barrier costs.

    python benchmarks/decode_kernel.py                  # both shapes, dense and MoD, all settings
    python benchmarks/decode_kernel.py --barriers       # microseconds of a barrier
    python benchmarks/decode_kernel.py --paged          # the attention of a batch of 64 rows
    python benchmarks/decode_kernel.py --routed         # a routed block that keeps 8 rows of 64

Needs a GPU. Times are medians of 200 replays of a CUDA graph that holds the kernel, 1,152 tokens
into a sequence, with one and with two routed blocks taken. Most of the run is compiling: about five
seconds a setting.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise, product

import torch
import triton
import triton.language as tl
from decode_models import ROUTING, SHAPES, make_config

from depthmix.infer.single import stack_weights
from depthmix.kernels import paged_triton, routed
from depthmix.kernels.decode import DecodeStep
from depthmix.kernels.plan import Rules, Tuning, Weights
from depthmix.kernels.stages import arrive, wait
from depthmix.nn import Transformer

NUM_TOKENS, PAGE = 1152, 16
# so many that no weight is still in the second-level cache when it is read again
NUM_ROUTED = 12


@triton.jit
def meet(counter, x, count: tl.constexpr, programs: tl.constexpr, read: tl.constexpr):
    lane = tl.arange(0, 1024)
    total = tl.zeros((1024,), tl.float32)
    for stage in range(count):
        tl.store(x + tl.program_id(0), 1.0)
        arrive(counter)
        wait(counter, (stage + 1) * programs)
        if read:
            total += tl.load(x + lane, cache_modifier=".cg")
    tl.store(x + 4096 + lane, total)


def list_settings(num_processors: int) -> dict[str, Tuning]:
    two = 2 * num_processors
    return {
        "two programs of 4 warps": Tuning(two),
        "the same, 32 splits": Tuning(two, max_splits=32),
        "chunks of 64": Tuning(two, chunk=64),
        "one program of 8 warps": Tuning(num_processors, num_warps=8, tile=32768),
    }


def time_setting(model: Transformer, tuning: Tuning, num_taken: int) -> float:
    """Median microseconds of a step in which so many routed blocks are taken."""
    config, weights = model.config, stack_weights(model)
    num_layers, routed = config.num_layers, tuple(config.routed_layers)
    num_pages = -(-config.max_seq_len // PAGE) * num_layers
    shape = (num_pages, config.shape.num_kv_heads, PAGE, config.shape.head_width)
    pages = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table = torch.randperm(num_pages, device="cuda").view(num_layers, -1).int()
    if weights.predictor_bias is not None:
        weights.predictor_bias.fill_(-1e9)
        weights.predictor_bias[3 : 3 + 4 * num_taken : 4] = 1e9
    rules = Rules(
        num_heads=config.num_heads,
        norm_eps=config.norm_eps,
        routed_layers=routed,
        selector="predictor" if routed else "all",
    )
    step = DecodeStep(weights, rules, *pages, tuning)
    token, position = (torch.tensor([n], device="cuda") for n in (5, NUM_TOKENS))
    held = [NUM_TOKENS // 8 if layer in routed else NUM_TOKENS for layer in range(num_layers)]
    before = torch.tensor(held, device="cuda", dtype=torch.int32)
    lengths = before.clone()
    step(token, position, table, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lengths.copy_(before)
        position.fill_(NUM_TOKENS)
        step(token, position, table, lengths)
    for _ in range(20):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(201)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * a.elapsed_time(b) for a, b in pairwise(events))


def time_barriers(num_processors: int) -> None:
    x, counter = torch.zeros(8192, device="cuda"), torch.zeros(1, device="cuda", dtype=torch.int32)
    for programs, warps in ((num_processors, 8), (2 * num_processors, 4)):
        for read in (False, True):
            times = []
            for _ in range(6):
                counter.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                sizes = {"num_warps": warps, "launch_cooperative_grid": True}
                meet[(programs,)](counter, x, 200, programs, read, **sizes)
                end.record()
                torch.cuda.synchronize()
                times.append(1e3 * start.elapsed_time(end) / 200)
            what = "barrier and reading x" if read else "barrier"
            print(f"{programs} programs of {warps} warps, {what}: {min(times):.2f} µs")


def time_paged(num_tokens: int) -> None:
    """Attention of 64 rows over so many tokens each, by settings."""
    num_rows, num_heads, width = 64, 16, 128
    shape = (num_rows * (num_tokens // PAGE + 1), num_heads, PAGE, width)
    pages = [torch.randn(shape, device="cuda").bfloat16().transpose(0, 1) for _ in range(2)]
    table = torch.randperm(shape[0], device="cuda").view(num_rows, -1).int()
    new = torch.randn((3, num_rows, num_heads, width), device="cuda").bfloat16()
    row = torch.arange(num_rows, device="cuda")
    lengths = torch.full((num_rows,), num_tokens - 1, device="cuda").int()

    def attend() -> None:
        # each call counts the new token, and one is to be as the other
        paged_triton.attend_pages(*new, row, row, *pages, table, lengths.clone())

    for tokens, stages in product((16, 32), (1, 2, 3, 4)):
        paged_triton.BLOCK_TOKENS_ALONE, paged_triton.NUM_STAGES_ALONE = tokens, stages
        us = 1e3 * triton.testing.do_bench_cudagraph(attend)
        speed = 4 * num_rows * num_heads * num_tokens * width / us / 1e6
        settings = f"{num_tokens} tokens, blocks of {tokens}, {stages} stages"
        print(f"{settings}: {us:.1f} µs, {speed:.2f} TB/s", flush=True)


def list_routed_settings(kind: str) -> list[routed.Tuning]:
    sizes = [(128, 4, 7), (256, 1, 5), (256, 4, 3), (256, 4, 4), (256, 4, 7), (512, 8, 4)]
    if kind == "decide":
        sizes = [(256, 4, 6), (256, 8, 4), (256, 8, 6), (512, 8, 3), (512, 8, 4), (256, 8, 9)]
    rows = [routed.Tuning(16, *size) for size in sizes]
    return [*rows, routed.Tuning(16, 512, 8, 5), routed.Tuning(32, 256, 4, 4)]


def make_routed_weights(width: int, mlp_width: int, num_units: int) -> Weights:
    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return 0.02 * torch.randn(shape, device="cuda", dtype=dtype)

    return Weights(
        embedding=draw(1, width),
        phase_table=draw(1, 2, 1, dtype=torch.float32),
        norm_attention=1 + draw(NUM_ROUTED, width),
        w_qkv=draw(NUM_ROUTED, 3 * width, width),
        w_attn_out=draw(NUM_ROUTED, width, width),
        norm_mlp=1 + draw(NUM_ROUTED, width),
        w_in=draw(NUM_ROUTED, 2 * mlp_width, width),
        w_mlp_out=draw(NUM_ROUTED, width, mlp_width),
        norm=draw(width),
        head=draw(1, width),
        router=draw(NUM_ROUTED, width, dtype=torch.float32),
        predictor_in=draw(NUM_ROUTED, num_units, width),
        predictor_out=draw(NUM_ROUTED, num_units),
        predictor_bias=draw(NUM_ROUTED) - 1e9,
    )


def tell_routed(what: str, run: Callable[[int], object], num_bytes: int) -> None:
    """Print the microseconds of one call, of as many as there are layers, and what they read."""

    def run_all() -> None:
        for layer in range(NUM_ROUTED):
            run(layer)

    us = 1e3 * triton.testing.do_bench_cudagraph(run_all) / NUM_ROUTED
    print(f"{what}: {us:.1f} µs, {num_bytes / us / 1e6:.2f} TB/s", flush=True)


def time_routed() -> None:
    """The kernels of a routed block by settings, those of cuBLAS for all rows, and all together."""
    num_rows, num_heads, width, mlp_width, num_tokens = 64, 16, 2048, 5504, 272
    weights = make_routed_weights(width, mlp_width, 64)
    # nobody is chosen, but every eighth row begins a sequence and is kept
    rules = Rules(num_heads, 1e-6, tuple(range(NUM_ROUTED)), "predictor", first_tokens=1)
    row = torch.arange(num_rows, device="cuda")
    x = torch.randn((num_rows, width), device="cuda").bfloat16()
    position = row % 8
    phase = torch.randn((num_rows, 2, width // num_heads // 2), device="cuda")
    stacked = {
        "rotate": weights.w_qkv,
        "store": weights.w_attn_out,
        "swiglu": weights.w_in,
        "update": weights.w_mlp_out,
    }

    def tell_kind(kind: str, tuning: routed.Tuning) -> None:
        step = routed.RoutedRows(weights, rules, num_rows, 0.125, {kind: tuning})
        slot = step.decide(x, 0, position, row, None)
        assert int((slot >= 0).sum()) == num_rows // 8
        what = f"{kind}, {tuning}"
        if kind == "decide":
            size = 2 * (weights.predictor_in[0].numel() + 2 * x.numel())
            tell_routed(what, lambda layer: step.decide(x, layer, position, row, None), size)
            return
        step.shaped.normal_()
        step.hidden.normal_()
        sources = {"rotate": step.normed, "store": x, "swiglu": step.shaped, "update": step.hidden}
        given = (x.clone(), phase if kind == "rotate" else None)
        size = 2 * stacked[kind][0].numel()
        tell_routed(what, lambda layer: step.multiply(kind, sources[kind], layer, *given), size)

    def tell_library(kind: str) -> None:
        weight = stacked[kind]
        given = torch.randn((num_rows, weight.shape[2]), device="cuda").bfloat16()
        size = 2 * weight[0].numel()
        tell_routed(f"{kind}, cuBLAS", lambda layer: torch.mm(given, weight[layer].T), size)

    for kind in ("decide", *stacked):
        for tuning in list_routed_settings(kind):
            tell_kind(kind, tuning)
        if kind in stacked:
            tell_library(kind)
    most_pages = num_tokens // PAGE + 1
    shape = (NUM_ROUTED * num_rows * most_pages, num_heads, PAGE, width // num_heads)
    pages = [torch.randn(shape, device="cuda", dtype=x.dtype).transpose(0, 1) for _ in range(2)]
    table = torch.randperm(shape[0], device="cuda").view(NUM_ROUTED, num_rows, -1).int()
    lengths = torch.full((NUM_ROUTED, num_rows), num_tokens - 1, device="cuda").int()
    step = routed.RoutedRows(weights, rules, num_rows, 0.125)

    def run_block(layer: int) -> None:
        # each call counts the new token, and one is to be as the other
        places = (*pages, table[layer], lengths[layer].clone())
        step(x, layer, phase, position, row, None, *places)

    read = sum(2 * weight[0].numel() for weight in stacked.values())
    tell_routed(
        "the block", run_block, read + 4 * (num_rows // 8) * num_heads * num_tokens * shape[3]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["small", "large"])
    parser.add_argument("--model", nargs="+", choices=ROUTING, default=list(ROUTING))
    parser.add_argument("--barriers", action="store_true", help="time barriers and nothing else")
    parser.add_argument("--paged", action="store_true", help="time paged attention and no more")
    parser.add_argument("--routed", action="store_true", help="time a routed block and no more")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device is visible to torch: run it on a GPU")
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    if args.routed:
        time_routed()
        return
    if args.paged:
        time_paged(2176)
        time_paged(2176 // 8)
        return
    if args.barriers:
        time_barriers(num_processors)
        return
    for shape in args.shape:
        for name in args.model:
            torch.manual_seed(0)
            with torch.device("cuda"):
                model = Transformer(make_config(name, SHAPES[shape])).to(torch.bfloat16).eval()
            for setting, tuning in list_settings(num_processors).items():
                counts = (1, 2) if model.config.routed_layers else (0,)
                times = [f"{time_setting(model, tuning, count):.1f}" for count in counts]
                print(f"{shape} {name}, {setting}: {', '.join(times)} µs", flush=True)


if __name__ == "__main__":
    main()
