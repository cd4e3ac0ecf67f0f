"""Attention of a packed step over pages, under several tunings, on one GPU.

    python benchmarks/chunks.py

A prompt chunk after an increasingly long context, compared with torch's own attention over
contiguous tensors if the context is empty; a routed block's few queries of many chunks; and the
kernel that rotates and stores keys. Results are checked before timing. Times are medians of
CUDA-graph replays, and TFLOP/s count the visible pairs of query and key. Takes less than a minute,
most of it compiling.
"""

import argparse
import platform
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from meters import require_gpu, time_steps
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from depthmix.kernels.decode import chunks
from depthmix.kernels.decode.chunks import ChunkTuning

PAGE_SIZE = 16
# calls per graph, and number of replays
NUM_CALLS, NUM_REPLAYS = 5, 40
PROMPT_TUNINGS = [
    ChunkTuning(128, 64, 8, 5),
    ChunkTuning(128, 64, 8, 5, split=True),
    ChunkTuning(128, 64, 8, 3),
    ChunkTuning(128, 128, 8, 3),
    ChunkTuning(128, 128, 8, 5),
    ChunkTuning(64, 64, 4, 5),
    ChunkTuning(64, 128, 4, 3),
]
# how many of the best tunings are tried on grouped-query attention
NUM_BEST = 3
FEW_TUNINGS = [
    ChunkTuning(16, 64, 4, 5),
    ChunkTuning(32, 64, 4, 5),
    ChunkTuning(32, 128, 4, 3),
    ChunkTuning(32, 128, 8, 3),
    ChunkTuning(64, 64, 4, 5),
]


class Case:
    """Chunks of `size` queries each, in rows with `past` tokens; their keys are already stored."""

    def __init__(
        self, num_heads: int, num_groups: int, width: int, num_chunks: int, size: int, past: int
    ) -> None:
        self.num_heads, self.num_groups, self.width = num_heads, num_groups, width
        self.num_chunks, self.size, self.past = num_chunks, size, past
        most = -(-(past + size) // PAGE_SIZE)
        half = {"device": "cuda", "dtype": torch.bfloat16}
        shape = (num_chunks * most, num_groups, PAGE_SIZE, width)
        self.keys, self.values = (torch.randn(shape, **half).transpose(0, 1) for _ in range(2))
        self.table = torch.randperm(num_chunks * most, device="cuda").view(num_chunks, most).int()
        self.lengths = torch.full((num_chunks,), past, device="cuda", dtype=torch.int32)
        self.rows = torch.arange(num_chunks, device="cuda", dtype=torch.int32)
        self.first = torch.arange(num_chunks + 1, device="cuda", dtype=torch.int32) * size
        self.num_places = num_chunks * size
        self.qkv = torch.randn(self.num_places, (num_heads + 2 * num_groups) * width, **half)
        self.out = torch.empty(self.num_places, num_heads * width, **half)

    def attend(self, tuning: ChunkTuning | None) -> Tensor:
        chunks.attend_chunks(
            self.qkv,
            self.out,
            self.first,
            self.rows,
            self.lengths,
            self.keys,
            self.values,
            self.table,
            num_heads=self.num_heads,
            first_chunk=0,
            max_places=self.num_places,
            tuning=tuning,
        )
        return self.out

    def make_contiguous(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as (chunks, heads, tokens, width)."""
        query = self.qkv.view(self.num_chunks, self.size, -1, self.width)
        query = query[:, :, : self.num_heads].transpose(1, 2).contiguous()
        each = self.num_heads // self.num_groups
        key, value = (
            pages[:, self.table.long()]
            .flatten(2, 3)[:, :, : self.past + self.size]
            .transpose(0, 1)
            .repeat_interleave(each, dim=1)
            for pages in (self.keys, self.values)
        )
        return query, key, value

    def attend_plainly(self) -> Tensor:
        query, key, value = self.make_contiguous()
        seen = torch.ones(self.size, self.past + self.size, device="cuda", dtype=torch.bool)
        seen = seen.tril(self.past)
        outs = [
            F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen)[0]
            for q, k, v in zip(query, key, value, strict=True)
        ]
        return torch.stack(outs).transpose(1, 2).reshape(self.num_places, -1)

    @property
    def num_flops(self) -> int:
        pairs = self.num_chunks * (self.size * self.past + self.size * (self.size + 1) // 2)
        return 4 * pairs * self.num_heads * self.width

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_groups} heads of {self.width}"
        return f"{heads}, {self.num_chunks} x {self.size} after {self.past}"


def time_graph(function: Callable[[], object]) -> float:
    """Microseconds per call, with several calls replayed as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_CALLS):
            function()
    return statistics.median(time_steps(graph.replay, "cuda", NUM_REPLAYS)) / NUM_CALLS


def print_time(case: Case, name: str, microseconds: float) -> None:
    rate = case.num_flops / microseconds / 1e6
    print(f"| {case} | {name} | {microseconds:.1f} | {rate:.0f} |", flush=True)


def compare_tunings(case: Case, tunings: list[ChunkTuning]) -> dict[ChunkTuning, float]:
    """Microseconds by tuning; one that does not fit is reported and left out."""
    truth = case.attend_plainly().double()
    times = {}
    for tuning in tunings:
        block_m, block_n, num_warps, num_stages, split = tuning
        name = f"{block_m} x {block_n}, {num_warps} warps, {num_stages} stages"
        name += ", split" if split else ""
        try:
            case.out.fill_(torch.nan)
            error = ((case.attend(tuning).double() - truth).norm() / truth.norm()).item()
        except Exception as problem:
            # too much shared memory, for example: the others are still of interest
            print(f"| {case} | {name} | {type(problem).__name__} | |", flush=True)
            continue
        assert error < 1e-2, f"{name}: relative error {error}"
        times[tuning] = time_graph(lambda tuning=tuning: case.attend(tuning))
        print_time(case, name, times[tuning])
    chosen = chunks.choose_tuning(torch.bfloat16, case.width, case.num_heads, case.num_places)
    print(f"| {case} | chosen: {tuple(chosen)} | | |", flush=True)
    return times


def compare_torch(case: Case) -> None:
    query, key, value = case.make_contiguous()

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                print_time(case, f"torch, {backend.name.lower()}", time_graph(attend))
        except RuntimeError as problem:
            print(f"| {case} | torch, {backend.name.lower()} | {type(problem).__name__} | |")


def time_rotation(case: Case) -> None:
    index = torch.arange(case.num_places, device="cuda", dtype=torch.int32)
    row, position = index // case.size, index.long() % case.size
    count = torch.full((1,), case.num_places, device="cuda", dtype=torch.int32)
    # the identity rotation, so that the queries stay the same from call to call
    phase_table = torch.tensor([1.0, 0.0], device="cuda")[:, None].expand(2, case.width // 2)
    phase_table = phase_table.repeat(case.size, 1, 1)
    tokens = (index, count, row, position, row, case.first, phase_table, None, None, None, 1e-5)
    cache = (case.keys, case.values, case.table, case.lengths)
    microseconds = time_graph(
        lambda: chunks.rotate_and_store(case.qkv, *tokens, *cache, num_heads=case.num_heads)
    )
    # everything is read and written once
    rate = 2 * case.qkv.numel() * case.qkv.element_size() / microseconds / 1e3
    print(f"| {case} | rotate and store | {microseconds:.1f} | {rate:.0f} GB/s |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=128, help="width of a head")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt's chunk")
    parser.add_argument("--past", type=int, nargs="+", default=[0, 2048, 6144])
    arguments = parser.parse_args()
    require_gpu(parser)
    torch.manual_seed(0)
    width, size = arguments.width, arguments.chunk
    print("| case | tuning | µs | TFLOP/s |\n|---|---|---|---|")
    tunings = PROMPT_TUNINGS
    for num_heads, num_groups in ((16, 16), (32, 8)):
        total: dict[ChunkTuning, float] = {}
        for past in arguments.past:
            case = Case(num_heads, num_groups, width, 1, size, past)
            for tuning, microseconds in compare_tunings(case, tunings).items():
                total[tuning] = total.get(tuning, 0.0) + microseconds
            if past == 0:
                compare_torch(case)
                time_rotation(case)
        tunings = sorted(total, key=total.__getitem__)[:NUM_BEST]
    few = Case(16, 16, width, 8, 32, 1024)
    compare_tunings(few, FEW_TUNINGS)
    time_rotation(few)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
