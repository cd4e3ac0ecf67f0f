"""Blocks for a few tokens in one launch, with weights prefetched all the time: see `stream.cu`.

Owns the kernel's constants, its buffers and its argument. Knows nothing of models, graphs or
sampling: it takes stacked tensors and numbers.
"""

import ctypes
import functools
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels import nvrtc
from depthmix.kernels.compiling import is_ahead
from depthmix.kernels.decode.plan import Rules, Weights, find_room
from depthmix.kernels.decode.stages import GATES

# most tokens: with sixteen, kernels for each product are faster
TOKENS = 8
# number of tokens up to which a routed block is expected to keep none
AHEAD = 4
# warps that multiply: fewer duplicate less work, more hide latency better
WARPS = 8
# context tokens that a warp processes at a time
SPAN = 16
# must agree with ring.cuh
TILE_ROWS, PIECE = 16, 1024
PART_BYTES = TILE_ROWS * (2 * PIECE + 64)

_POINTERS = (
    *("norm_attention", "w_qkv", "qkv_bias", "norm_query", "norm_key", "w_attn_out", "norm_mlp"),
    *("w_in", "w_mlp_out", "norm", "head", "phase_table", "router", "predictor_in"),
    *("predictor_out", "predictor_bias"),
    *("key_pages", "value_pages", "tables", "lengths"),
    *("x", "row", "position", "sampled", "num_sampled", "logits", "taken"),
    *("qkv", "mixed", "stream", "hidden", "foreseen", "part_top", "part_sum", "part_out"),
    *("arrivals", "counters"),
)
_NUMBERS = (*("num_tokens", "num_rows", "max_pages", "logits_stride", "first_tokens", "ahead"),)


class StreamTask(ctypes.Structure):
    """The kernel's argument; pointers that a model or a call does not need are null."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("norm_eps", ctypes.c_float),
    )


def find_obstacle(
    weights: Weights, rules: Rules, pages: Float[Tensor, "G pages page H"]
) -> str | None:
    """Say why the kernel does not support these weights; None if it does."""
    tensors = [
        t for name, t in weights._asdict().items() if t is not None and name != "phase_table"
    ]
    dtype = weights.embedding.dtype
    if dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != dtype for t in tensors):
        return "its weights are not all bf16, or all fp16"
    if weights.phase_table.dtype != torch.float32 or pages.dtype != dtype:
        return "its cache has another type than its weights"
    num_heads, head_width = rules.num_heads, pages.shape[3]
    widths = (weights.embedding.shape[1], weights.w_mlp_out.shape[2], num_heads * head_width)
    if any(width % 64 for width in widths):
        return "its widths are not multiples of 64"
    if head_width not in (16, 32, 64, 128):
        return f"its head width is {head_width}"
    return nvrtc.find_obstacle(weights.embedding.device)


class StreamedBlocks:
    """Runs all blocks for up to eight tokens over one cache; suitable for capture.

    Launches must not overlap. All tokens belong to different rows.
    """

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        key_pages: Float[Tensor, "G pages page H"],
        value_pages: Float[Tensor, "G pages page H"],
        tables: Int[Tensor, "L rows most"],
        lengths: Int[Tensor, "L rows"],
    ) -> None:
        self.weights, self.rules = weights, rules
        self.pages = (key_pages, value_pages)
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.device = device
        self.num_programs = count_programs(device)
        num_layers, num_projected, width = weights.w_qkv.shape
        num_heads, head_width, mlp_width = (
            rules.num_heads,
            key_pages.shape[3],
            weights.w_mlp_out.shape[2],
        )
        num_kv_heads, page_size = key_pages.shape[0], key_pages.shape[2]
        # pages must be contiguous, each with all its heads
        for pages in self.pages:
            assert pages.transpose(0, 1).is_contiguous()
        assert tables.is_contiguous()
        assert lengths.is_contiguous()
        routes = [-1] * num_layers
        for route, layer in enumerate(rules.routed_layers):
            routes[layer] = route
        decides = bool(rules.routed_layers) and rules.selector != "all"
        asks = decides and rules.selector == "predictor"
        heads = weights.predictor_in
        num_routes = len(rules.routed_layers)
        own_rows = -(-width // self.num_programs) + 1
        self.defines = {
            "IS_BF16": int(dtype == torch.bfloat16),
            "WIDTH": width,
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_WIDTH": head_width,
            "MLP_WIDTH": mlp_width,
            "NUM_CLASSES": weights.head.shape[0],
            "NUM_UNITS": heads.shape[1] if asks and heads is not None else 1,
            "NUM_ROUTES": max(1, num_routes),
            "PAGE_SIZE": page_size,
            "IS_SWIGLU": int(weights.w_in.shape[1] == 2 * mlp_width),
            "DECIDES": int(decides),
            "ASKS_PREDICTOR": int(asks),
            "NORMALIZES": int(rules.normalize),
            "IS_FINAL": int(rules.early_exit),
            "GATE": GATES.index(rules.gate),
            "OWN_ROWS": own_rows,
            "NUM_LAYERS": num_layers,
        }
        self.route_of_layer = ",".join(map(str, routes))
        most = TOKENS

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        sharing = num_heads // num_kv_heads
        self.num_queries = next(n for n in (4, 3, 2, 1) if sharing % n == 0)
        num_units = num_heads // self.num_queries
        num_parts = (self.num_programs + most * num_units) * self.num_queries
        self.logits = make(most, weights.head.shape[0])
        self.arrivals = make(most * num_units, dtype=torch.int32)
        self.counters = make(3, dtype=torch.int32)
        self.scratch = {
            "qkv": make(most, num_projected),
            "mixed": make(most, num_heads * head_width, dtype=dtype),
            "stream": make(most, width, dtype=dtype),
            "hidden": make(most, mlp_width, dtype=dtype),
            "foreseen": make(max(1, num_routes), self.defines["NUM_UNITS"], most),
            "part_top": make(num_parts),
            "part_sum": make(num_parts),
            "part_out": make(num_parts, head_width),
        }
        tensors = {
            **{name: t for name, t in weights._asdict().items() if name in _POINTERS},
            **self.scratch,
            "key_pages": key_pages,
            "value_pages": value_pages,
            "tables": tables,
            "lengths": lengths,
            "arrivals": self.arrivals,
            "counters": self.counters,
            "logits": self.logits,
        }
        self._fixed = {name: t.data_ptr() for name, t in tensors.items() if t is not None}
        self._fixed |= {
            "num_rows": tables.shape[1],
            "max_pages": tables.shape[2],
            "logits_stride": self.logits.stride(0),
            "first_tokens": rules.first_tokens,
            "ahead": AHEAD,
        }
        self.kernel: nvrtc.Launch | None = None

    def run(
        self,
        x: Float[Tensor, "T D"],
        row: Int[Tensor, " T"],
        position: Int[Tensor, " T"],
        sampled: Int[Tensor, " S"],
        num_sampled: Int[Tensor, " 1"],
        taken: Int[Tensor, "R T"],
    ) -> Float[Tensor, "S V"]:
        """All blocks and the head for up to eight tokens; `x` is overwritten.

        Row -1 marks an empty place. Adds to the cache and its lengths.
        """
        num_tokens = x.shape[0]
        assert x.is_contiguous()
        assert taken.is_contiguous()
        assert num_tokens <= TOKENS
        tensors = {"x": x, "row": row, "position": position, "sampled": sampled}
        tensors |= {"num_sampled": num_sampled, "taken": taken}
        if self.kernel is None:
            self.kernel = self._compile()
        if not is_ahead():
            self.kernel(self._make_task(num_tokens, tensors), self.num_programs)
        return self.logits[: sampled.shape[0]]

    def _make_task(self, num_tokens: int, tensors: dict[str, Tensor]) -> StreamTask:
        task = StreamTask(norm_eps=self.rules.norm_eps, num_tokens=num_tokens)
        for name, value in self._fixed.items():
            setattr(task, name, value)
        for name, tensor in tensors.items():
            setattr(task, name, tensor.data_ptr())
        return task

    def _compile(self) -> nvrtc.Launch:
        defines = {**self.defines, "TOKENS": TOKENS}
        rest = count_shared_bytes(defines, self.num_queries)
        num_parts = (find_room(self.device) - rest) // (PART_BYTES + 16)
        return compile_stream(
            {
                **defines,
                "PARTS": num_parts,
                "NUM_WARPS": WARPS,
                "SPAN": SPAN,
                "ROUTE_OF_LAYER": self.route_of_layer,
            },
            self.device,
            rest + num_parts * (PART_BYTES + 16),
        )


def count_programs(device: torch.device) -> int:
    """Return the number of programs: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def count_shared_bytes(defines: dict[str, int], num_queries: int) -> int:
    """Return an upper bound of a program's shared memory in bytes, without its ring's parts."""
    tokens = defines["TOKENS"]
    shares = 32 * WARPS // (TILE_ROWS * tokens)
    sums = 2 * WARPS * (tokens * (TILE_ROWS + 4) + 32 // shares)
    sums = max(sums, WARPS * num_queries * (defines["HEAD_WIDTH"] + 2))
    of_token = 2 * WARPS + 1 + 2 * defines["OWN_ROWS"] + 3
    of_token += defines["NUM_LAYERS"] + defines["HEAD_WIDTH"]
    numbers = sums + tokens * of_token + 9 * defines["NUM_LAYERS"] + defines["NUM_ROUTES"]
    return 4 * numbers + 256


@functools.cache
def read_source(name: str) -> str:
    """Return a kernel's source, with what it shares with others."""
    folder = Path(__file__).parent
    return "".join((folder / part).read_text() for part in ("hopper.cuh", "ring.cuh", name))


def compile_stream(
    defines: dict[str, int | str], device: torch.device, shared_bytes: int
) -> nvrtc.Launch:
    return nvrtc.compile_kernel(
        read_source("stream.cu"),
        "stream",
        tuple(sorted(defines.items())),
        device,
        num_threads=32 * (WARPS + 1),
        shared_bytes=shared_bytes,
    )
