"""A routed block's products for few kept tokens, with weights prefetched from launch to launch.

Owns the kernel's constants and its argument: see `prefetch.cu`. Knows nothing of models, and not
how tokens are chosen: it takes stacked tensors and places.
"""

import ctypes
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels import nvrtc
from depthmix.kernels.compiling import is_ahead
from depthmix.kernels.decode import stream
from depthmix.kernels.decode.plan import Rules, Weights, find_room
from depthmix.kernels.decode.stream import PART_BYTES, PIECE, TILE_ROWS, WARPS

TOKENS = 16
# in the order of prefetch.cu
KINDS = ("project", "out", "in", "back")
# longer vectors do not fit into registers
MOST_COLUMNS = 4 * PIECE
# parts of the ring: more are no faster, with fewer a launch waits for the memory
MOST_PARTS = 4

_POINTERS = ("weight", "source", "norm", "index", "count", "gate", "x", "update", "result")


class Task(ctypes.Structure):
    """The kernel's argument; pointers that a product does not need are null."""

    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), ("norm_eps", ctypes.c_float))


def find_obstacle(weights: Weights) -> str | None:
    """Say why the kernel does not support these weights; None if it does."""
    used = (weights.w_attn_out, weights.norm_mlp, weights.w_in, weights.w_mlp_out)
    used += (weights.norm_attention, weights.w_qkv)
    dtype = weights.embedding.dtype
    if dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != dtype for t in used):
        return "its weights are not all bf16, or all fp16"
    width, mixed, mlp_width = (t.shape[2] for t in (weights.w_in, weights.w_attn_out, used[3]))
    if width % 64 or mixed % 64 or mlp_width % 64:
        return "its widths are not multiples of 64"
    if max(width, mixed) > MOST_COLUMNS:
        return f"it is wider than {MOST_COLUMNS:,}"
    device = weights.embedding.device
    obstacle = nvrtc.find_obstacle(device)
    if obstacle is None and count_parts(device) < 2:
        return "the device has too little shared memory"
    return obstacle


class Prefetched:
    """The products of routed blocks. Suitable for capture; launches must not overlap."""

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        update: Float[Tensor, "P D"],
        sums: Float[Tensor, "P D"],
        hidden: Float[Tensor, "P F"],
    ) -> None:
        """Buffers hold attention's update, its sum with x, and the MLP's hidden vectors."""
        self.weights, self.rules = weights, rules
        self.update, self.sums, self.hidden = update, sums, hidden
        self.device, dtype = weights.embedding.device, weights.embedding.dtype
        self.num_programs = stream.count_programs(self.device)
        mlp_width, num_in = weights.w_mlp_out.shape[2], weights.w_in.shape[1]
        width = weights.embedding.shape[1]
        num_parts = count_parts(self.device)
        shared = {
            "IS_BF16": int(dtype == torch.bfloat16),
            "IS_SWIGLU": int(num_in == 2 * mlp_width),
            "TOKENS": TOKENS,
            "PARTS": num_parts,
            "NUM_WARPS": WARPS,
        }
        sizes = {
            "project": (weights.w_qkv.shape[1], width),
            "out": (width, weights.w_attn_out.shape[2]),
            "in": (mlp_width, width),
            "back": (width, mlp_width),
        }
        self.defines = {
            kind: {
                **shared,
                "KIND": number,
                "NUM_ROWS": sizes[kind][0],
                "NUM_COLUMNS": sizes[kind][1],
            }
            for number, kind in enumerate(KINDS)
        }
        self.shared_bytes = count_rest() + num_parts * (PART_BYTES + 16)
        self.kernels: dict[str, nvrtc.Launch] = {}

    def project(
        self,
        x: Float[Tensor, "T D"],
        layer: int,
        index: Int[Tensor, " P"],
        count: Int[Tensor, " 1"],
        qkv: Float[Tensor, "P width"],
    ) -> None:
        """Queries, keys and values of each place's token of x, with the block's norm.

        The launch before it may still be running when the weights are read, if it lets this one
        start.
        """
        assert x.is_contiguous()
        assert qkv.is_contiguous()
        weights = self.weights
        tensors = {"weight": weights.w_qkv[layer], "norm": weights.norm_attention[layer]}
        self._launch(
            "project", {**tensors, "source": x, "index": index, "count": count, "result": qkv}
        )

    def finish(
        self,
        x: Float[Tensor, "T D"],
        layer: int,
        mixed: Float[Tensor, "P mixed"],
        index: Int[Tensor, " P"],
        count: Int[Tensor, " 1"],
        gate: Float[Tensor, " T"],
    ) -> None:
        """Finish a block after attention: output projection, MLP, and the update of x.

        `index` has the token of each place. It, `count`, `gate` and `x` must be written before the
        launch that wrote `mixed`: what is read of them may be read before that one ends.
        """
        assert x.is_contiguous()
        assert mixed.is_contiguous()
        assert mixed.shape[0] <= self.update.shape[0]
        weights = self.weights
        given = {"index": index, "count": count, "gate": gate, "x": x, "update": self.update}
        products: tuple[tuple[str, dict[str, Tensor]], ...] = (
            ("out", {"weight": weights.w_attn_out, "source": mixed, "result": self.sums}),
            ("in", {"weight": weights.w_in, "source": self.sums, "result": self.hidden}),
            ("back", {"weight": weights.w_mlp_out, "source": self.hidden}),
        )
        for kind, own in products:
            tensors = {**given, **own, "weight": own["weight"][layer]}
            if kind == "in":
                tensors["norm"] = weights.norm_mlp[layer]
            self._launch(kind, tensors)

    def _launch(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        kernel = self.kernels.get(kind)
        if kernel is None:
            kernel = self.kernels[kind] = compile_prefetch(
                self.defines[kind], self.device, self.shared_bytes
            )
        if is_ahead():
            return
        task = Task(norm_eps=self.rules.norm_eps)
        for name, tensor in tensors.items():
            setattr(task, name, tensor.data_ptr())
        kernel(task, self.num_programs)


def count_rest() -> int:
    """Return an upper bound of a program's shared memory in bytes, without its ring's parts."""
    sums = 2 * (TOKENS * (TILE_ROWS + 4) + 32)
    return 4 * (WARPS * (sums + TOKENS) + TOKENS) + 256


def count_parts(device: torch.device) -> int:
    """Return the number of parts of a program's ring."""
    return min(MOST_PARTS, (find_room(device) - count_rest()) // (PART_BYTES + 16))


def compile_prefetch(
    defines: Mapping[str, int], device: torch.device, shared_bytes: int
) -> nvrtc.Launch:
    return nvrtc.compile_kernel(
        stream.read_source("prefetch.cu"),
        "prefetch",
        tuple(sorted(defines.items())),
        device,
        num_threads=32 * (WARPS + 1),
        shared_bytes=shared_bytes,
        overlaps=True,
    )
