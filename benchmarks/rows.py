"""Steps of few rows: what a dense and a routed block cost, and how their kernels are tuned.

    python benchmarks/rows.py                      # blocks, kernels, products and attention
    python benchmarks/rows.py blocks kernels       # only some of these
    python benchmarks/rows.py products --kinds update store

Needs a GPU; without one it only checks tiny shapes, interpreted. Blocks are those of a random model
of width 2,048 in bf16, whose rows have 600 tokens behind them (routed blocks: 75). A routed block
keeps so many rows because those are among the first of their sequence. Times are medians of replays
of a CUDA graph; a block's is the difference between stacks with more and fewer of them. Before a
tuning is timed, its results are compared with those of the first one.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from depthmix.kernels import paged_triton
from depthmix.kernels.blocks import Blocks, Pools, Tokens
from depthmix.kernels.plan import Rules, Weights
from depthmix.kernels.recording import record_graph
from depthmix.kernels.routed import TUNINGS, FewRows, Places, Tuning

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# the interpreter multiplies bf16 as integers
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
WIDTH, NUM_HEADS, MLP_WIDTH, NUM_CLASSES, NUM_UNITS = (
    (2048, 16, 5504, 32768, 64) if ON_GPU else (64, 2, 96, 100, 8)
)
HEAD_WIDTH = WIDTH // NUM_HEADS
PAST, PAST_ROUTED = (600, 75) if ON_GPU else (20, 5)
PAGE_SIZE, CAPACITY, FIRST_TOKENS = 16, 0.125, 10
BATCHES = (2, 8, 16, 64) if ON_GPU else (5,)
# rows that a routed block keeps
KEPT = (0, 1, 8)
# blocks of a stack, and how many more the larger one has
FEW_BLOCKS, MORE_BLOCKS = (4, 4) if ON_GPU else (1, 1)
NUM_REPLAYS = 30

PRODUCTS = {
    "plain": [
        Tuning(16, 256, 4, 4),
        Tuning(16, 512, 4, 3),
        Tuning(16, 512, 8, 3),
        Tuning(16, 512, 8, 4),
        Tuning(32, 256, 4, 3),
        Tuning(32, 256, 8, 4),
        Tuning(32, 512, 8, 3),
        Tuning(16, 128, 2, 6),
    ],
    "swiglu": [
        Tuning(16, 256, 4, 3),
        Tuning(16, 256, 4, 4),
        Tuning(16, 256, 8, 4),
        Tuning(16, 512, 8, 3),
        Tuning(32, 256, 8, 3),
        Tuning(16, 128, 2, 5),
    ],
    "store": [
        Tuning(16, 256, 4, 7),
        Tuning(16, 512, 8, 4),
        Tuning(16, 512, 8, 6),
        Tuning(16, 1024, 8, 3),
        Tuning(16, 1024, 16, 3),
    ],
    "update": [
        Tuning(16, 256, 4, 7),
        Tuning(16, 512, 8, 5),
        Tuning(16, 512, 8, 7),
        Tuning(16, 1024, 8, 4),
        Tuning(16, 1024, 16, 3),
        Tuning(16, 1024, 16, 4),
    ],
}
"""Tunings of each product that are tried beside the one that is used, which comes first."""
# tokens at a time, stages, programs
ATTENTION = [
    (16, 2, 1024),
    (16, 3, 1024),
    (16, 2, 2048),
    (32, 2, 1024),
    (32, 3, 1024),
    (32, 2, 512),
]


def make(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype) * scale


def make_weights(num_layers: int, num_routes: int) -> Weights:
    half = HEAD_WIDTH // 2
    angle = torch.outer(
        torch.arange(2 * PAST, device=DEVICE),
        10000 ** (-torch.arange(half, device=DEVICE) / half),
    )
    ones = torch.ones(num_layers, WIDTH, device=DEVICE, dtype=DTYPE)
    return Weights(
        embedding=make(NUM_CLASSES, WIDTH),
        phase_table=torch.stack([angle.cos(), angle.sin()], dim=1).float().contiguous(),
        norm_attention=ones,
        w_qkv=make(num_layers, 3 * WIDTH, WIDTH, scale=WIDTH**-0.5),
        w_attn_out=make(num_layers, WIDTH, WIDTH, scale=WIDTH**-0.5),
        norm_mlp=ones,
        w_in=make(num_layers, 2 * MLP_WIDTH, WIDTH, scale=WIDTH**-0.5),
        w_mlp_out=make(num_layers, WIDTH, MLP_WIDTH, scale=MLP_WIDTH**-0.5),
        norm=ones[0],
        head=make(NUM_CLASSES, WIDTH, scale=WIDTH**-0.5),
        router=make(num_routes, WIDTH, dtype=torch.float32) if num_routes else None,
        predictor_in=make(num_routes, NUM_UNITS, WIDTH) if num_routes else None,
        # nobody wishes to stay
        predictor_out=make(num_routes, NUM_UNITS, scale=0) if num_routes else None,
        predictor_bias=make(num_routes, scale=0) - 1 if num_routes else None,
    )


class Stack:
    """Some blocks, routed where the pattern says R, and a step in which every row decodes."""

    def __init__(
        self,
        pattern: str,
        num_rows: int,
        num_kept: int,
        tunings: Mapping[str, Tuning] | None = None,
    ) -> None:
        torch.manual_seed(0)
        num_layers = len(pattern)
        routed = tuple(layer for layer, kind in enumerate(pattern) if kind == "R")
        self.weights = make_weights(num_layers, len(routed))
        rules = Rules(
            NUM_HEADS,
            routed_layers=routed,
            selector="predictor" if routed else "all",
            gate="sigmoid",
            first_tokens=FIRST_TOKENS,
        )
        most = -(-(PAST + 1) // PAGE_SIZE)
        shape = (num_layers * num_rows * most, NUM_HEADS, PAGE_SIZE, HEAD_WIDTH)
        tables = torch.randperm(shape[0], device=DEVICE).int().view(num_layers, num_rows, most)
        past = [PAST_ROUTED if kind == "R" else PAST for kind in pattern]
        self.past = torch.tensor(past, device=DEVICE, dtype=torch.int32)[:, None]
        self.past = self.past.expand(-1, num_rows).contiguous()
        pools = Pools(
            make(*shape).transpose(0, 1), make(*shape).transpose(0, 1), tables, self.past.clone()
        )
        self.blocks = Blocks(
            self.weights,
            rules,
            pools,
            [CAPACITY] * len(routed),
            most_tokens=max(num_rows, 16),
            most_sampled=num_rows,
            newest=torch.zeros(num_rows, device=DEVICE, dtype=torch.int64),
        )
        self.blocks.few = FewRows(self.weights, rules, max(num_rows, 16), tunings)
        numbers = torch.arange(num_rows + 1, device=DEVICE, dtype=torch.int32)
        number = torch.tensor([num_rows], device=DEVICE, dtype=torch.int32)
        self.tokens = Tokens(
            given=torch.randint(NUM_CLASSES, (num_rows,), device=DEVICE, dtype=torch.int32),
            row=numbers[:-1].clone(),
            position=torch.where(numbers[:-1] < num_kept, FIRST_TOKENS - 1, PAST).int(),
            chunk=numbers[:-1].clone(),
            begin=numbers,
            chunk_row=numbers[:-1].clone(),
            num_tokens=number,
            sampled=numbers[:-1].clone(),
            num_sampled=number.clone(),
        )
        self.taken = torch.zeros(len(routed), num_rows, device=DEVICE, dtype=torch.uint8)
        self.num_rows, self.num_kept = num_rows, num_kept

    def run(self) -> Tensor:
        logits = self.blocks.run(self.tokens, self.taken, num_alone=self.num_rows, num_chunks=0)
        self.blocks.pools.lengths.copy_(self.past)
        return logits

    def find_results(self) -> tuple[Tensor, Tensor]:
        """Logits and x of a step, after another one that was the same."""
        self.run()
        logits = self.run().float().clone()
        assert (self.taken.sum(dim=1) == self.num_kept).all()
        return logits, self.blocks.x[: self.num_rows].float().clone()

    def time_step(self) -> float:
        self.find_results()
        return time_work(self.run)


def compare(found: Sequence[Tensor], truth: Sequence[Tensor], what: str) -> None:
    for ours, theirs in zip(found, truth, strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        assert error < 1e-2, f"{what}: relative error {error}"


def time_work(work: Callable[[], object]) -> float:
    """Median microseconds of a replay."""
    if not ON_GPU:
        work()
        return float("nan")
    graph, _ = record_graph(work, num_runs=1)
    times = []
    for number in range(NUM_REPLAYS + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(stop) * 1000)
    return statistics.median(times)


def time_blocks() -> None:
    print("\n| rows | kept | dense block, us | routed block, us | rest of a step, us |")
    print("| --- | --- | --- | --- | --- |")
    for num_rows in BATCHES:
        small, large = (
            Stack("D" * number, num_rows, 0).time_step()
            for number in (FEW_BLOCKS, FEW_BLOCKS + MORE_BLOCKS)
        )
        dense = (large - small) / MORE_BLOCKS
        rest = small - FEW_BLOCKS * dense
        for num_kept in KEPT:
            if num_kept <= num_rows:
                mixed = Stack("DR" * FEW_BLOCKS, num_rows, num_kept).time_step()
                routed = (mixed - small) / FEW_BLOCKS
                line = f"| {num_rows} | {num_kept} | {dense:.1f} | {routed:.1f} | {rest:.1f} |"
                print(line, flush=True)


def time_kernels() -> None:
    """Each kernel of a step by itself, as the profiler sees it."""
    print("\n| rows | kept | kernel | programs | launches | us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num_rows, num_kept in ((8, 1), (64, 8)):
        stack = Stack("DR" * 2, num_rows, num_kept)
        stack.find_results()
        if not ON_GPU:
            continue
        graph, _ = record_graph(stack.run, num_runs=1)
        for (name, grid), times in profile(graph.replay).items():
            line = f"| {num_rows} | {num_kept} | {name[:40]} | {grid} "
            print(f"{line}| {len(times) // 4} | {statistics.median(times):.1f} |", flush=True)


def profile(work: Callable[[], object]) -> dict[tuple[str, str], list[float]]:
    """Microseconds of all kernels of four calls, by name and number of programs."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    times = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            grid = "x".join(str(size) for size in event["args"].get("grid", []))
            times[event["name"], grid].append(event["dur"])
    return dict(sorted(times.items(), key=lambda item: -sum(item[1])))


def time_products(kinds: Sequence[str]) -> None:
    """Eight products in a row, each with weights of its own."""
    print("\n| product | tuning | us | TB/s |")
    print("| --- | --- | --- | --- |")
    num_rows, num_layers = min(8, max(BATCHES)), 8 if ON_GPU else 1
    weights = make_weights(num_layers, 0)
    order = torch.arange(64, device=DEVICE, dtype=torch.int32)
    count = torch.tensor([num_rows], device=DEVICE, dtype=torch.int32)
    ones = torch.ones(64, device=DEVICE)
    places = Places(order, count, ones, order, order, order, order)
    x, mixed, normed = (make(16, WIDTH) for _ in range(3))
    hidden, qkv = make(16, MLP_WIDTH), make(16, 3 * WIDTH)
    for kind in kinds:
        matrix = {
            "plain": weights.w_qkv,
            "swiglu": weights.w_in,
            "store": weights.w_attn_out,
            "update": weights.w_mlp_out,
        }[kind]
        truth = None
        for tuning in dict.fromkeys([TUNINGS[kind], *PRODUCTS[kind][: None if ON_GPU else 2]]):
            few = FewRows(weights, Rules(NUM_HEADS), 16, {kind: tuning})
            few.part_square.fill_(1.0)
            few.shaped.copy_(normed)
            old = x.clone()

            def work(few: FewRows = few, x: Tensor = old, kind: str = kind) -> None:
                for layer in range(num_layers):
                    if kind == "plain":
                        few.multiply(kind, normed, weights.w_qkv[layer], qkv, places)
                    elif kind == "store":
                        norm, out = weights.norm_mlp[layer], few.more
                        few.multiply(
                            kind, mixed, weights.w_attn_out[layer], out, places, x=x, norm=norm
                        )
                    elif kind == "swiglu":
                        w_in = weights.w_in[layer]
                        few.multiply(kind, few.shaped, w_in, few.hidden, places, prepared="store")
                    else:
                        few.multiply(kind, hidden, weights.w_mlp_out[layer], x, places)

            work()
            out = {"plain": qkv, "store": few.more, "swiglu": few.hidden, "update": old}[kind]
            result = out[:num_rows].float().clone()
            truth = result if truth is None else truth
            compare([result], [truth], f"{kind} {tuning}")
            us = time_work(work) / num_layers
            speed = matrix.nbytes / num_layers / us / 1e6
            sizes = ", ".join(str(size) for size in tuning)
            print(f"| {kind} | {sizes} | {us:.2f} | {speed:.2f} |", flush=True)


def time_attention() -> None:
    """Steps of dense blocks under several cuts of attention."""
    print("\n| rows | tokens, stages, programs | dense block, us |")
    print("| --- | --- | --- |")
    names = ("BLOCK_TOKENS_ALONE", "NUM_STAGES_ALONE", "PROGRAMS")
    before = [getattr(paged_triton, name) for name in names]
    for num_rows in BATCHES:
        few, more = (Stack("D" * number, num_rows, 0) for number in (1, 1 + MORE_BLOCKS))
        truth = None
        for values in dict.fromkeys([tuple(before), *(ATTENTION if ON_GPU else [])]):
            for name, value in zip(names, values, strict=True):
                setattr(paged_triton, name, value)
            results = more.find_results()
            truth = results if truth is None else truth
            compare(results, truth, f"attention {values}")
            dense = (time_work(more.run) - time_work(few.run)) / MORE_BLOCKS
            print(f"| {num_rows} | {values} | {dense:.1f} |", flush=True)
    for name, value in zip(names, before, strict=True):
        setattr(paged_triton, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = ("blocks", "kernels", "products", "attention")
    parser.add_argument("tables", nargs="*", help=f"some of {', '.join(tables)}; default: all")
    parser.add_argument("--kinds", nargs="*", default=list(PRODUCTS), choices=list(PRODUCTS))
    options = parser.parse_args()
    chosen = options.tables or tables
    name = torch.cuda.get_device_name() if ON_GPU else "interpreted"
    print(f"{name}, torch {torch.__version__}")
    with torch.no_grad():
        if "blocks" in chosen:
            time_blocks()
        if "kernels" in chosen:
            time_kernels()
        if "products" in chosen:
            time_products(options.kinds)
        if "attention" in chosen:
            time_attention()


if __name__ == "__main__":
    main()
