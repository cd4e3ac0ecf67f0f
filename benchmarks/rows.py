"""Steps of few rows: the cost of a dense and a routed block, and the tuning of their kernels.

    python benchmarks/rows.py                      # blocks, kernels, tunings and attention
    python benchmarks/rows.py blocks kernels       # only some of these

Needs a GPU; without one it only checks tiny shapes in the interpreter. Blocks are those of a random
model of width 2,048 in bf16, whose rows hold 600 tokens (routed blocks: 75). A routed block keeps
the intended rows because those are among the first of their sequence. Times are medians of replays
of a CUDA graph; a block's time is the difference between stacks with more and fewer blocks. Before
a tuning is timed, its results are compared with those of the first one.
"""

import argparse
import functools
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

# read when a kernel is defined: without a GPU, Triton's own interpreter runs it
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from depthmix.kernels import paged_triton
from depthmix.kernels.compiling import compile_ahead
from depthmix.kernels.decode.blocks import Blocks, Pools, Tokens
from depthmix.kernels.decode.plan import Rules, Weights
from depthmix.kernels.decode.routed import TUNINGS, FewRows, RowTuning
from depthmix.kernels.recording import record_graph

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
DENSE_ROWS = (8, 16) if ON_GPU else (5,)
# rows that a routed block keeps
KEPT = (0, 1, 8)
# blocks of the smaller stack, and how many more the larger one has
FEW_BLOCKS, MORE_BLOCKS = (4, 4) if ON_GPU else (1, 1)
NUM_REPLAYS = 30


def change(kinds: Iterable[str], **fields: int) -> dict[str, RowTuning]:
    """The tunings of some kernels with changed fields."""
    return {kind: TUNINGS[kind]._replace(**fields) for kind in kinds}


TRIED = {
    "as used": {},
    "plain: 16 rows": change(["plain"], most_rows=16, block=512, num_stages=3),
    "plain: 16 rows, narrow": change(["plain"], most_rows=16),
    "plain: 512 columns": change(["plain"], block=512, num_stages=3),
    "plain: 64 rows, 8 warps": change(["plain"], most_rows=64, num_warps=8),
    "plain: 2 warps": change(["plain"], most_rows=16, block=128, num_warps=2, num_stages=6),
    "swiglu: 32 rows": change(["swiglu"], most_rows=32, num_stages=3),
    "swiglu: 32 rows, narrow": change(["swiglu"], most_rows=32, block=128, num_stages=5),
    "swiglu: 512 columns": change(["swiglu"], block=512, num_stages=2),
    "swiglu: 2 warps": change(["swiglu"], block=128, num_warps=2, num_stages=5),
    "store: 8 rows": change(["store"], most_rows=8, num_stages=6),
    "store: 512 columns": change(["store"], block=512, num_warps=8, num_stages=5),
    "update: 8 rows": change(["update"], most_rows=8, block=256, num_warps=4, num_stages=6),
    "update: 8 rows, wide": change(["update"], most_rows=8, num_stages=4),
    "update: 4 warps": change(["update"], num_warps=4),
    "decide: 128 columns": change(["decide"], block=128),
    "decide: 512 columns": change(["decide"], block=512, num_warps=8),
    "decide: 8 warps": change(["decide"], num_warps=8),
}
"""Alternatives to the tunings in use."""
# rows, and how many of them a routed block keeps, for comparing tunings
CASES = ((8, 0), (8, 1), (8, 8), (64, 8)) if ON_GPU else ((5, 1),)
# tokens per block, stages, programs
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


@functools.cache
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
        # no token wishes to be kept
        predictor_out=make(num_routes, NUM_UNITS, scale=0) if num_routes else None,
        predictor_bias=make(num_routes, scale=0) - 1 if num_routes else None,
    )


class Stack:
    """Some blocks, routed where the pattern has an R, and a step in which every row decodes."""

    def __init__(
        self,
        pattern: str,
        num_rows: int,
        num_kept: int,
        tunings: Mapping[str, RowTuning] | None = None,
    ) -> None:
        num_layers = len(pattern)
        routed = tuple(layer for layer, kind in enumerate(pattern) if kind == "R")
        self.weights = make_weights(num_layers, len(routed))
        torch.manual_seed(0)
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
        if tunings is not None:
            # these are of kernels that devices with prefetched products do not use
            self.blocks.few.prefetched = None
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
        """Logits and x of a step, after another identical step."""
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
    """Time each kernel of a step separately, with the profiler."""
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


def time_tunings() -> None:
    """Time dense and routed blocks under several tunings, which are compiled in parallel."""
    names = list(TRIED)[: None if ON_GPU else 2]
    few, more = FEW_BLOCKS, FEW_BLOCKS + MORE_BLOCKS
    kinds = [("D" * number, num_rows, 0) for number in (few, more) for num_rows in DENSE_ROWS]
    kinds += [("DR" * few, *case) for case in CASES]
    stacks = {(name, *kind): Stack(*kind, TRIED[name]) for name in names for kind in kinds}
    if ON_GPU:
        compile_ahead(lambda: [stack.run() for stack in stacks.values()], lambda done, total: None)
    cases = [f"dense, {num_rows} rows" for num_rows in DENSE_ROWS]
    cases += [f"routed, {num_kept} of {num_rows}" for num_rows, num_kept in CASES]
    print(f"\n| tuning | {' | '.join(cases)} |")
    print("|---" * (1 + len(cases)) + "|")
    truths = {kind: stacks[names[0], *kind].find_results() for kind in kinds}
    # a routed block's rows beside dense blocks that the few-row kernels do not compute
    for _, num_rows, _ in kinds:
        alone = ("D" * few, num_rows, 0)
        if (names[0], *alone) not in stacks:
            stacks[names[0], *alone] = Stack(*alone)
    for name in names:
        times = {}
        for kind in kinds:
            stack = stacks[name, *kind]
            compare(stack.find_results(), truths[kind], f"{name} {kind}")
            times[kind] = time_work(stack.run)
        blocks = [
            (times["D" * more, num_rows, 0] - times["D" * few, num_rows, 0]) / MORE_BLOCKS
            for num_rows in DENSE_ROWS
        ]
        for num_rows, num_kept in CASES:
            alone = ("D" * few, num_rows, 0)
            if alone not in times:
                times[alone] = time_work(stacks[names[0], *alone].run)
            blocks.append((times["DR" * few, num_rows, num_kept] - times[alone]) / few)
        print(f"| {name} | {' | '.join(f'{us:.1f}' for us in blocks)} |", flush=True)


def time_attention() -> None:
    """Time steps of dense blocks under several ways to split attention."""
    print("\n| rows | tokens, stages, programs | dense block, us |")
    print("| --- | --- | --- |")
    names = ("ALONE_PARTS", "ALONE_WHOLE", "PROGRAMS")
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
    tables = ("blocks", "kernels", "tunings", "attention")
    parser.add_argument("tables", nargs="*", help=f"some of {', '.join(tables)}; default: all")
    options = parser.parse_args()
    chosen = options.tables or tables
    name = torch.cuda.get_device_name() if ON_GPU else "interpreted"
    print(f"{name}, torch {torch.__version__}")
    with torch.no_grad():
        if "blocks" in chosen:
            time_blocks()
        if "kernels" in chosen:
            time_kernels()
        if "tunings" in chosen:
            time_tunings()
        if "attention" in chosen:
            time_attention()


if __name__ == "__main__":
    main()
