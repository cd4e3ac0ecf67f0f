"""A routed block for few kept tokens, with weights prefetched from launch to launch.

Owns the constants and arguments of two kernels: see `decide.cu` and `prefetch.cu`. Knows nothing of
models: it takes stacked tensors and numbers.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels import nvrtc
from depthmix.kernels.compiling import is_ahead
from depthmix.kernels.decode import stream
from depthmix.kernels.decode.plan import Places, Rules, Weights, find_room
from depthmix.kernels.decode.stages import GATES
from depthmix.kernels.decode.stream import PART_BYTES, PIECE, TILE_ROWS, WARPS

# tokens that are processed at a time, and programs that share them when scores are computed
TOKENS, CLUSTER = 16, 8
# in the order of prefetch.cu
KINDS = ("project", "out", "in", "back")
# longer vectors do not fit into registers
MOST_COLUMNS = 4 * PIECE
# parts of the ring: more are no faster, with fewer a launch waits for the memory
MOST_PARTS = 4

_PLACES = ("index", "count", "gate", "slot", "first", "taken", "alone")


class PrefetchTask(ctypes.Structure):
    """The argument of `prefetch.cu`; pointers that a product does not need are null."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("weight", "source", "norm", "index", "count", "gate")),
        *((name, ctypes.c_void_p) for name in ("x", "update", "result")),
        *((name, ctypes.c_void_p) for name in ("row", "position", "previous", "score", "wish")),
        *((name, ctypes.c_void_p) for name in ("slot", "first", "taken", "alone")),
        *((name, ctypes.c_int) for name in ("num_tokens", "first_tokens")),
        ("norm_eps", ctypes.c_float),
    )


class DecideTask(ctypes.Structure):
    """The argument of `decide.cu`; pointers that a model or a call does not need are null."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "more", "row", "router")),
        *((f"predictor_{name}", ctypes.c_void_p) for name in ("in", "out", "bias")),
        *((name, ctypes.c_void_p) for name in ("score", "wish")),
        ("num_tokens", ctypes.c_int),
    )


def find_obstacle(weights: Weights, rules: Rules, num_rows: int) -> str | None:
    """Say why the kernels do not support these weights; None if they do."""
    tensors = [
        t for name, t in weights._asdict().items() if t is not None and name != "phase_table"
    ]
    dtype, device = weights.embedding.dtype, weights.embedding.device
    if dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != dtype for t in tensors):
        return "its weights are not all bf16, or all fp16"
    sizes = find_sizes(weights)
    widths = [columns for _, columns in sizes.values()]
    if any(width % 64 for width in widths):
        return "its widths are not multiples of 64"
    if max(sizes[kind][1] for kind in KINDS[:3]) > MOST_COLUMNS:
        return f"it is wider than {MOST_COLUMNS:,}"
    obstacle = nvrtc.find_obstacle(device)
    if obstacle is None:
        room = find_room(device)
        needed = (count_decide_bytes(weights, rules), count_rest(num_rows) + 2 * (PART_BYTES + 16))
        if max(needed) > room:
            return f"it needs {max(needed):,} bytes of shared memory, and the device has {room:,}"
    return obstacle


def find_sizes(weights: Weights) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each product's matrix, before gate and up rows are paired."""
    width, mlp_width = weights.embedding.shape[1], weights.w_mlp_out.shape[2]
    return {
        "project": (weights.w_qkv.shape[1], width),
        "out": (width, weights.w_attn_out.shape[2]),
        "in": (mlp_width, width),
        "back": (width, mlp_width),
    }


class Prefetched:
    """Routed blocks whose tokens are few. Suitable for capture; launches must not overlap."""

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        update: Float[Tensor, "P D"],
        sums: Float[Tensor, "P D"],
        hidden: Float[Tensor, "P F"],
        score: Float[Tensor, " P"],
        wish: Float[Tensor, " P"],
    ) -> None:
        """Buffers hold attention's update, its sum with x, the MLP's hidden vectors, and scores."""
        self.weights, self.rules = weights, rules
        self.update, self.sums, self.hidden = update, sums, hidden
        self.asks = rules.selector == "predictor"
        self.score, self.wish = score, wish if self.asks else score
        self.device, dtype = weights.embedding.device, weights.embedding.dtype
        self.num_programs = stream.count_programs(self.device)
        num_rows = sums.shape[0]
        num_parts = count_parts(self.device, num_rows)
        self.shared_bytes = count_rest(num_rows) + num_parts * (PART_BYTES + 16)
        self.common = {
            "IS_BF16": int(dtype == torch.bfloat16),
            "TOKENS": TOKENS,
            "NUM_WARPS": WARPS,
            "PARTS": num_parts,
        }
        self.defines: dict[str, Any] = {
            "IS_SWIGLU": int(weights.w_in.shape[1] == 2 * weights.w_mlp_out.shape[2]),
            "KEEPS_ALL": int(rules.selector == "all"),
            "GATE": GATES.index(rules.gate),
            "MOST_TOKENS": num_rows,
            **self.common,
        }
        self.sizes = find_sizes(weights)
        self.kernels: dict[tuple[str, bool], nvrtc.Launch] = {}

    def decide_and_project(
        self,
        x: Float[Tensor, "T D"],
        layer: int,
        position: Int[Tensor, " T"],
        row: Int[Tensor, " T"],
        previous: Int[Tensor, " T"] | None,
        places: Places,
        qkv: Float[Tensor, "P width"],
        more: Float[Tensor, "T D"] | None,
    ) -> None:
        """Choose tokens, each of them alone in its row, and compute their queries, keys and values.

        `row` is -1 where there is no token; `previous` holds the last routed block's slots, for
        models in which a token that left does not return. `more`, if given, is added to x first.
        """
        weights, num_tokens = self.weights, x.shape[0]
        route = self.rules.routed_layers.index(layer)
        assert x.is_contiguous()
        assert num_tokens <= self.sums.shape[0]
        assert more is None or more.is_contiguous()
        assert weights.router is not None
        tensors: dict[str, Tensor | None] = {"x": x, "more": more, "row": row}
        tensors |= {"score": self.score, "wish": self.wish, "router": weights.router[route]}
        if self.asks:
            for name in ("predictor_in", "predictor_out", "predictor_bias"):
                tensors[name] = getattr(weights, name)[route]
        num_groups = -(-num_tokens // TOKENS)
        task = DecideTask(num_tokens=num_tokens)
        self._launch("decide", False, task, tensors, CLUSTER * num_groups)
        given = {"row": row, "position": position, "previous": previous}
        given |= {"score": self.score, "wish": self.wish}
        given |= {name: getattr(places, name) for name in _PLACES}
        self.project(x, layer, places, qkv, given)

    def project(
        self,
        x: Float[Tensor, "T D"],
        layer: int,
        places: Places,
        qkv: Float[Tensor, "P width"],
        deciding: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        """Queries, keys and values of each place's token of x, with the block's norm.

        With `deciding`, places are given first.
        """
        assert x.is_contiguous()
        assert qkv.is_contiguous()
        weights = self.weights
        tensors: dict[str, Tensor | None] = {"source": x, "result": qkv}
        tensors |= {"weight": weights.w_qkv[layer], "norm": weights.norm_attention[layer]}
        tensors |= {"index": places.index, "count": places.count, **(deciding or {})}
        self._multiply("project", tensors, x.shape[0], decides=deciding is not None)

    def finish(
        self,
        x: Float[Tensor, "T D"],
        layer: int,
        mixed: Float[Tensor, "P mixed"],
        places: Places,
    ) -> None:
        """Finish a block after attention: output projection, MLP, and the update of x.

        `places` and x must be written before the launch that wrote `mixed` starts: what is read of
        them may be read before that one ends.
        """
        assert x.is_contiguous()
        assert mixed.is_contiguous()
        assert mixed.shape[0] <= self.update.shape[0]
        weights = self.weights
        given = {"index": places.index, "count": places.count, "gate": places.gate}
        given |= {"x": x, "update": self.update}
        products: tuple[tuple[str, dict[str, Tensor]], ...] = (
            ("out", {"weight": weights.w_attn_out, "source": mixed, "result": self.sums}),
            ("in", {"weight": weights.w_in, "source": self.sums, "result": self.hidden}),
            ("back", {"weight": weights.w_mlp_out, "source": self.hidden}),
        )
        for kind, own in products:
            tensors: dict[str, Tensor | None] = {**given, **own, "weight": own["weight"][layer]}
            if kind == "in":
                tensors["norm"] = weights.norm_mlp[layer]
            self._multiply(kind, tensors, x.shape[0])

    def _multiply(
        self,
        kind: str,
        tensors: Mapping[str, Tensor | None],
        num_tokens: int,
        *,
        decides: bool = False,
    ) -> None:
        rules = self.rules
        task = PrefetchTask(
            num_tokens=num_tokens, first_tokens=rules.first_tokens, norm_eps=rules.norm_eps
        )
        self._launch(kind, decides, task, tensors, self.num_programs)

    def _launch(
        self,
        kind: str,
        decides: bool,
        task: ctypes.Structure,
        tensors: Mapping[str, Tensor | None],
        num_programs: int,
    ) -> None:
        kernel = self.kernels.get((kind, decides))
        if kernel is None:
            kernel = self.kernels[kind, decides] = self._compile(kind, decides)
        if is_ahead():
            return
        for name, tensor in tensors.items():
            setattr(task, name, None if tensor is None else tensor.data_ptr())
        kernel(task, num_programs)

    def _compile(self, kind: str, decides: bool) -> nvrtc.Launch:
        if kind == "decide":
            defines = define_decide(self.weights, self.rules)
            shared_bytes = count_decide_bytes(self.weights, self.rules)
            return compile_prefetched(
                "decide", {**self.common, **defines}, self.device, 32 * WARPS, shared_bytes
            )
        num_rows, num_columns = self.sizes[kind]
        defines = {"KIND": KINDS.index(kind), "NUM_ROWS": num_rows, "NUM_COLUMNS": num_columns}
        defines = {**self.defines, **defines, "DECIDES": int(decides)}
        return compile_prefetched(
            "prefetch", defines, self.device, 32 * (WARPS + 1), self.shared_bytes
        )


def count_rest(num_rows: int) -> int:
    """Return an upper bound of a program's shared memory in bytes, without its ring's parts."""
    sums = 2 * (TOKENS * (TILE_ROWS + 4) + 32)
    return 4 * (WARPS * (sums + TOKENS + 1) + TOKENS + 1 + num_rows) + 256


def count_parts(device: torch.device, num_rows: int) -> int:
    """Return the number of parts of a program's ring."""
    return min(MOST_PARTS, (find_room(device) - count_rest(num_rows)) // (PART_BYTES + 16))


def define_decide(weights: Weights, rules: Rules) -> dict[str, int]:
    asks, heads = rules.selector == "predictor", weights.predictor_in
    return {
        "WIDTH": weights.embedding.shape[1],
        "NUM_UNITS": heads.shape[1] if asks and heads is not None else 1,
        "ASKS_PREDICTOR": int(asks),
        "NORMALIZES": int(rules.normalize),
        "CLUSTER": CLUSTER,
    }


def count_decide_bytes(weights: Weights, rules: Rules) -> int:
    """Return an upper bound of the shared memory of a program of `decide.cu`, in bytes."""
    defines = define_decide(weights, rules)
    num_chunks = -(-defines["WIDTH"] // (64 * CLUSTER))
    num_tiles = -(-defines["NUM_UNITS"] // 16) * defines["ASKS_PREDICTOR"]
    numbers = 2 * TOKENS + WARPS + num_tiles * 16 * TOKENS * (1 + num_chunks) + 2
    return TOKENS * (128 * num_chunks + 64) + 4 * numbers + 256


def compile_prefetched(
    name: str,
    defines: Mapping[str, int],
    device: torch.device,
    num_threads: int,
    shared_bytes: int,
) -> nvrtc.Launch:
    return nvrtc.compile_kernel(
        stream.read_source(f"{name}.cu"),
        name,
        tuple(sorted(defines.items())),
        device,
        num_threads=num_threads,
        shared_bytes=shared_bytes,
        overlaps=True,
    )
