"""The single-kernel decoding step alone: a comparison of its settings, and the cost of a barrier.

    python benchmarks/decode_kernel.py                  # both shapes, dense and MoD, all settings
    python benchmarks/decode_kernel.py --barriers       # microseconds of a barrier
    python benchmarks/decode_kernel.py --paged          # the attention of a batch of 64 rows

Needs a GPU. Times are medians of 200 replays of a CUDA graph of the kernel, 1,152 tokens into a
sequence, with one and with two routed blocks taken. Most of the run is compiling: about five
seconds per setting.
"""

import argparse
import statistics
from itertools import pairwise, product

import torch
import triton
import triton.language as tl
from decode_models import ROUTING, SHAPES, make_config
from meters import require_gpu

from depthmix.infer.paths.layout import stack_weights
from depthmix.kernels import paged_triton
from depthmix.kernels.decode.plan import Rules, StepTuning
from depthmix.kernels.decode.stages import arrive, wait
from depthmix.kernels.decode.step import DecodeStep
from depthmix.nn import Transformer

NUM_TOKENS, PAGE = 1152, 16


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


def list_settings(num_processors: int) -> dict[str, StepTuning]:
    two = 2 * num_processors
    return {
        "two programs of 4 warps": StepTuning(two),
        "the same, 32 splits": StepTuning(two, max_splits=32),
        "chunks of 64": StepTuning(two, chunk=64),
        "one program of 8 warps": StepTuning(num_processors, num_warps=8, tile=32768),
    }


def time_setting(model: Transformer, tuning: StepTuning, num_taken: int) -> float:
    """Median microseconds of a step in which `num_taken` routed blocks are taken."""
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
    """Attention of 64 rows over `num_tokens` tokens each, by setting."""
    num_rows, num_heads, width = 64, 16, 128
    shape = (num_rows * (num_tokens // PAGE + 1), num_heads, PAGE, width)
    pages = [torch.randn(shape, device="cuda").bfloat16().transpose(0, 1) for _ in range(2)]
    table = torch.randperm(shape[0], device="cuda").view(num_rows, -1).int()
    new = torch.randn((3, num_rows, num_heads, width), device="cuda").bfloat16()
    row = torch.arange(num_rows, device="cuda")
    lengths = torch.full((num_rows,), num_tokens - 1, device="cuda").int()

    def attend() -> None:
        # a copy, because each call adds a token to the lengths, and all calls should be equal
        paged_triton.attend_pages(*new, row, row, *pages, table, lengths.clone())

    for tokens, stages in product((16, 32), (1, 2, 3, 4)):
        paged_triton.ALONE_PARTS = paged_triton.ALONE_WHOLE = tokens, stages
        us = 1e3 * triton.testing.do_bench_cudagraph(attend)
        speed = 4 * num_rows * num_heads * num_tokens * width / us / 1e6
        settings = f"{num_tokens} tokens, blocks of {tokens}, {stages} stages"
        print(f"{settings}: {us:.1f} µs, {speed:.2f} TB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["small", "large"])
    parser.add_argument("--model", nargs="+", choices=ROUTING, default=list(ROUTING))
    parser.add_argument("--barriers", action="store_true", help="time barriers and nothing else")
    parser.add_argument("--paged", action="store_true", help="time paged attention and no more")
    args = parser.parse_args()
    require_gpu(parser)
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
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
