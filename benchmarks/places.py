"""The row kernels of a packed step: products of the occupied places against cuBLAS.

    python benchmarks/places.py                     # everything
    python benchmarks/places.py --quick             # only the tunings chosen by default
    python benchmarks/places.py --save times.json   # every tuning's time, to fit `choose_tuning`

Needs a GPU. A product has 2,048 places, some of them occupied; cuBLAS multiplies just these rows,
which in a real step it could not know. Times are medians of replays of a CUDA graph of several
calls, each with its own weights, so that these come from memory as in a model. Each is checked
before it is timed. Much of the run is compiling.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from meters import require_gpu
from torch import Tensor

from depthmix.kernels.decode import places
from depthmix.kernels.decode.places import PROCESSORS, PlaceTuning

NUM_PLACES = 2048
COUNTS = (64, 128, 256, 384, 512)
# columns, outputs, and numbers of occupied places
SHAPES = (
    (2048, 6144, COUNTS),
    (2048, 2048, COUNTS),
    (2048, 11008, COUNTS),
    (5504, 2048, COUNTS),
    (1024, 3072, (256,)),
    (1024, 1024, (256,)),
    (1024, 5632, (256,)),
    (2816, 1024, (256,)),
    # not aligned
    (2048, 10923, (256,)),
    (2048, 6144, (2048,)),
)
TILES = (
    *(tile.tuning for tile in places.TILES),
    # tiles that `choose_tuning` does not use
    PlaceTuning(64, 64, 64, 4, 4, programs=3 * PROCESSORS),
    PlaceTuning(64, 128, 64, 4, 8),
    PlaceTuning(64, 256, 64, 8, 5),
    PlaceTuning(128, 128, 64, 4, 3, programs=2 * PROCESSORS),
)
SPLITS = (1, 2, 3, 4, 8)
# bytes read in turn: more than the L2 cache holds
COLD_BYTES = 128 << 20
MOST_CALLS = 48
NUM_REPLAYS = 8


def time_calls(functions: Sequence[Callable[[], object]]) -> float:
    """Median microseconds per call, over all of them in turn."""
    for function in functions[:1]:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(functions))
    return statistics.median(times)


def describe(tuning: PlaceTuning) -> str:
    sizes = "x".join(str(size) for size in tuning[:3])
    each = tuning.programs // PROCESSORS
    return (
        f"{sizes}, {tuning.num_warps} warps, {tuning.num_stages} stages, {tuning.splits} parts, "
        f"{each} on a processor"
    )


def check(ours: Tensor, truth: Tensor, tuning: PlaceTuning) -> None:
    error = ((ours.float() - truth.float()).norm() / truth.float().norm()).item()
    assert error < 1e-2, f"{tuning}: relative error {error}"


def count_copies(num_bytes: int) -> int:
    return min(MOST_CALLS, max(2, -(-COLD_BYTES // num_bytes)))


def list_tunings(width: int) -> list[PlaceTuning]:
    """Every tile, whole and split into parts of at least four blocks of columns."""
    return [
        tile._replace(splits=splits)
        for tile in TILES
        for splits in SPLITS
        if splits == 1 or width >= 4 * splits * tile.block_k
    ]


def time_product(
    width: int, num_out: int, counts: Sequence[int], *, quick: bool
) -> list[dict[str, Any]]:
    half = {"device": "cuda", "dtype": torch.bfloat16}
    source = torch.randn(NUM_PLACES, width, **half)
    weights = [
        torch.randn(num_out, width, **half) * width**-0.5
        for _ in range(count_copies(2 * num_out * width))
    ]
    out, truth = (torch.empty(NUM_PLACES, num_out, **half) for _ in range(2))
    count = torch.zeros(1, device="cuda", dtype=torch.int32)

    def call(weight: Tensor, tuning: PlaceTuning, expected: int) -> Callable[[], None]:
        return lambda: places.multiply_places(
            source, weight, out, count, expected=expected, tuning=tuning
        )

    def call_cublas(weight: Tensor, number: int) -> Callable[[], Tensor]:
        return lambda: torch.mm(source[:number], weight.T, out=truth[:number])

    saved = []
    for number in counts:
        count.fill_(number)
        flops = 2 * number * width * num_out
        us_cublas = time_calls([call_cublas(weight, number) for weight in weights])
        torch.mm(source[:number], weights[-1].T, out=truth[:number])
        chosen = places.choose_tuning(number, num_out, width, torch.bfloat16)
        # skipped for unaligned shapes, which would be compiled again for each tile
        others = [] if quick or num_out % 16 else list_tunings(width)
        found = {}
        for tuning in dict.fromkeys((chosen, *others)):
            out.fill_(float("nan"))
            call(weights[-1], tuning, number)()
            check(out[:number], truth[:number], tuning)
            found[tuning] = time_calls([call(weight, tuning, number) for weight in weights])
        best = sorted(found, key=lambda tuning: found[tuning])
        case = f"| {width} x {num_out} | {number} | {us_cublas:.1f}"
        rows = [("chosen", chosen), ("best", best[0])]
        for name, tuning in dict.fromkeys(rows):
            us = found[tuning]
            print(
                f"{case} | {name}: {describe(tuning)} | {us:.1f} | {flops / us / 1e6:.0f} | "
                f"{us_cublas / us:.2f} |",
                flush=True,
            )
        times = [{**tuning._asdict(), "us": round(us, 2)} for tuning, us in found.items()]
        saved.append(
            {"width": width, "num_out": num_out, "count": number, "cublas": us_cublas}
            | {"chosen": chosen._asdict(), "times": times}
        )
    return saved


def time_rows() -> None:
    """Time the other kernels, with all places occupied and with an eighth of them."""
    num_tokens, width, hidden_width, num_units = 2048, 2048, 5504, 64
    half = {"device": "cuda", "dtype": torch.bfloat16}
    whole = {"device": "cuda", "dtype": torch.int32}
    x, update, more, out = (torch.randn(num_tokens, width, **half) for _ in range(4))
    hidden = torch.randn(num_tokens, 2 * hidden_width, **half)
    activated = torch.empty(num_tokens, hidden_width, **half)
    norm, router, gate = (torch.randn(size, device="cuda") for size in (width, width, num_tokens))
    w_in, w_out = torch.randn(num_units, width, **half), torch.randn(num_units, **half)
    bias = torch.zeros((), **half)
    score, wish = (torch.empty(num_tokens, device="cuda") for _ in range(2))
    num_alone, num_layers, num_rows = 64, 24, 256
    sizes = [1] * num_alone + [496] * 4
    begin = torch.tensor([0, *sizes], **whole).cumsum(0).int()
    chunk_row = torch.arange(len(sizes), **whole)
    row = torch.repeat_interleave(chunk_row, torch.tensor(sizes, device="cuda")).int()
    position = torch.arange(num_tokens, device="cuda")
    slot, index, first = (
        torch.zeros(size, **whole) for size in (num_tokens, num_tokens, len(begin))
    )
    taken = torch.zeros(num_tokens, device="cuda", dtype=torch.uint8)
    kept_row = torch.zeros(num_alone, device="cuda", dtype=torch.int32)
    packed, everyone = torch.zeros(1, **whole), torch.full((1,), num_tokens, **whole)
    lengths = torch.zeros(num_layers, num_rows, **whole)
    routes = torch.arange(num_layers, **whole) // 2
    firsts = torch.zeros(num_layers, len(begin), **whole)
    newest = torch.zeros(num_rows, device="cuda", dtype=torch.int64)
    given = torch.randint(32000, (num_tokens,), device="cuda")
    embedding = torch.randn(32000, width, **half)
    chosen = torch.randperm(num_tokens, device="cuda").int()
    for number in (num_tokens, num_tokens // 8):
        count = torch.full((1,), number, **whole)
        calls = {
            "normalize_places": lambda count=count: places.normalize_places(
                x, chosen, count, norm, 1e-5, out
            ),
            "add_and_normalize": lambda count=count: places.add_and_normalize(
                x, chosen, count, update, norm, 1e-5, out, keep=True
            ),
            "activate_places": lambda count=count: places.activate_places(
                hidden, count, activated, "swiglu"
            ),
            "add_update": lambda count=count: places.add_update(
                x, chosen, count, gate, update, more
            ),
        }
        print_times(calls, f"{number} places")
    calls = {
        "pack_tokens": lambda: places.pack_tokens(
            wish,
            score,
            row,
            position,
            None,
            begin,
            everyone,
            0,
            index,
            slot,
            first,
            packed,
            gate,
            kept_row,
            taken,
            gate_kind="sigmoid",
        ),
        "begin_step": lambda: places.begin_step(
            given,
            newest,
            row,
            position,
            begin,
            chunk_row,
            everyone,
            embedding,
            lengths,
            given,
            x,
        ),
        "end_step": lambda: places.end_step(firsts, begin, chunk_row, routes, lengths),
    }
    print_times(calls, f"{num_tokens} tokens")
    for number in (num_tokens, num_tokens // 4):
        # several, so that they come from memory
        streams = [
            torch.randn(number, width, **half) for _ in range(count_copies(2 * number * width))
        ]
        for name, heads in {"": (w_in, w_out, bias), ", no predictor": (None, None, None)}.items():
            calls = [
                lambda stream=stream, heads=heads: places.score_tokens(
                    stream, router, *heads, everyone, score, wish, normalize=True
                )
                for stream in streams
            ]
            everyone.fill_(number)
            print(f"| score_tokens{name} | {number} tokens | {time_calls(calls):.1f} |", flush=True)


def print_times(calls: Mapping[str, Callable[..., None]], what: str) -> None:
    for name, call in calls.items():
        print(f"| {name} | {what} | {time_calls([call] * 10):.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the tunings that are chosen")
    parser.add_argument("--save", type=Path, help="where to write every tuning's time")
    options = parser.parse_args()
    require_gpu(parser)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| kernel | of | us |\n| --- | --- | --- |")
    time_rows()
    print("\n| K x N | count | cuBLAS, us | tuning | us | TFLOP/s | share of cuBLAS |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    saved = []
    for width, num_out, counts in SHAPES:
        saved += time_product(width, num_out, counts, quick=options.quick)
        if options.save is not None:
            options.save.write_text(json.dumps(saved))


if __name__ == "__main__":
    main()
