"""Compile-time configuration of the decoding kernel: a model's tensors and rules, and the tiling.

Owns tile sizes and the validation of the inputs. Knows nothing of the kernel's stages.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels.decode.attention import Heads
from depthmix.kernels.decode.stages import GATES, Cut

# the most shared memory a program can use on an H200
SHARED_BYTES = 227 * 1024
SELECTORS = ("router", "predictor", "all")


class StepPlan(NamedTuple):
    """Compile-time constants of the kernel."""

    num_layers: int
    num_programs: int
    width: int
    block: int
    """Elements of x read at a time by loops over all of x."""
    heads: Heads
    qkv: Cut
    attn_out: Cut
    mlp_in: Cut
    mlp_out: Cut
    head: Cut
    predictor: Cut
    predictor_block: int
    selector: str
    gate: str
    normalize: bool
    early_exit: bool


class Weights(NamedTuple):
    """A model's tensors; those of its L blocks are stacked. V, D, H, F: see `depthmix.nn`."""

    embedding: Float[Tensor, "V D"]
    phase_table: Float[Tensor, "positions 2 half"]
    """Rotary cosines and sines, float32."""
    norm_attention: Float[Tensor, "L D"]
    w_qkv: Float[Tensor, "L heads D"]
    """Rows of the query heads, then of the key heads, then of the value heads."""
    w_attn_out: Float[Tensor, "L D mixed"]
    norm_mlp: Float[Tensor, "L D"]
    w_in: Float[Tensor, "L hidden D"]
    """F gate rows, then F up rows (SwiGLU); or F rows alone (GELU)."""
    w_mlp_out: Float[Tensor, "L D F"]
    norm: Float[Tensor, " D"]
    head: Float[Tensor, "V D"]
    norm_query: Float[Tensor, "L H"] | None = None
    norm_key: Float[Tensor, "L H"] | None = None
    qkv_bias: Float[Tensor, "L heads"] | None = None
    """In the order of `w_qkv`'s rows; not supported by the single-sequence kernel."""
    router: Float[Tensor, "R D"] | None = None
    """One row per routed block, in order."""
    predictor_in: Float[Tensor, "R P D"] | None = None
    predictor_out: Float[Tensor, "R P"] | None = None
    predictor_bias: Float[Tensor, " R"] | None = None


class Rules(NamedTuple):
    """Properties of a model that its tensors do not determine."""

    num_heads: int
    norm_eps: float = 1e-6
    routed_layers: tuple[int, ...] = ()
    """Indices of the routed blocks, in order."""
    selector: str = "all"
    """What makes the routing decisions: `router`, `predictor`, or `all` to run every block."""
    gate: str = "raw"
    """The factor of a routed block's update: raw, sigmoid, tanh1 or unit."""
    normalize: bool = True
    """Whether the router scores x / rms(x) instead of x."""
    first_tokens: int = 0
    """Positions before this one are always kept."""
    early_exit: bool = False
    """A token that skips a routed block skips all later ones."""


class Places(NamedTuple):
    """Which tokens take part in a block: they occupy places, in order."""

    index: Int[Tensor, " P"]
    """Token of each place."""
    count: Int[Tensor, " 1"]
    """Number of occupied places."""
    gate: Float[Tensor, " T"]
    """The factor of a token's update."""
    slot: Int[Tensor, " T"]
    """A token's place, -1 if it skips the block."""
    first: Int[Tensor, " chunks_and_one"]
    """Place of each chunk's first token, followed by the count."""
    taken: Int[Tensor, " T"]
    """1 if a token takes part, as a byte for the host."""
    alone: Int[Tensor, " alone"]
    """Row of a place whose token is alone in its row, else -1."""


class StepTuning(NamedTuple):
    """How the work is divided; this affects results only by rounding."""

    num_programs: int
    """Number of programs; all must be resident on the device at once."""
    num_warps: int = 4
    max_registers: int = 255
    """Per thread: at the maximum, two programs of four warps fit on a multiprocessor."""
    tile: int = 16384
    """Elements of a weight tile: 16,384 of bf16 take 64 registers per thread at 4 warps."""
    min_columns: int = 2048
    """Columns of a tile, if rows are that long; fewer rows per program make it wider."""
    chunk: int = 32
    """Tokens that attention reads at a time."""
    max_splits: int = 16
    """Maximum number of parts of the context that are processed in parallel."""


@functools.cache
def pick_size(number: int, sizes: Sequence[int]) -> int:
    """Pick the first size that is large enough, or the next power of two: each is compiled."""
    return next((size for size in sizes if number <= size), triton.next_power_of_2(number))


def find_room(device: torch.device) -> int:
    """Bytes of shared memory available to a program; the interpreter assumes an H200."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    # not every build of torch has this property
    return getattr(properties, "shared_memory_per_block_optin", 48 * 1024)


def cut_matrix(
    num_rows: int, width: int, dtype: torch.dtype, tuning: StepTuning, *, partner: int = 0
) -> Cut:
    """Tile a matrix: at most as many rows as a program has, and wider if those are few."""
    longest = max(16, triton.next_power_of_2(width))
    # at least two, because a tile is loaded in halves
    own = triton.next_power_of_2(-(-num_rows // tuning.num_programs)) * (2 if partner else 1)
    own = max(2, own)
    columns = min(longest, max(16, tuning.min_columns, tuning.tile // own))
    both = min(own, max(2, tuning.tile // columns))
    step, padded = both // 2 if partner else both, -(-width // columns) * columns
    pack = 2 if dtype.itemsize == 2 and width % 2 == 0 else 1
    rows = both // 2
    return Cut(num_rows, width, rows, columns, partner, tuning.num_programs, step, padded, pack)


def choose_tuning(device: torch.device, width: int, num_heads: int) -> StepTuning:
    """The fastest tuning on an H200 (results/decode.md); one program in the interpreter."""
    if device.type != "cuda":
        # programs run one after another there, so none can wait for another
        return StepTuning(num_programs=1)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    num_programs = 2 * num_processors
    # few enough parts that no program processes a second one while others are idle
    splits = triton.next_power_of_2(max(1, num_programs // num_heads) + 1) // 2
    return StepTuning(num_programs, max_splits=min(splits, 64))


def make_plan(
    weights: Weights, rules: Rules, pages: Float[Tensor, "pages G page_size H"], tuning: StepTuning
) -> StepPlan:
    """Derive the kernel's constants from the shapes of a model's tensors."""
    num_layers, num_projected, width = weights.w_qkv.shape
    num_classes, mlp_width = weights.head.shape[0], weights.w_mlp_out.shape[2]
    dtype = weights.embedding.dtype
    num_units = 1 if weights.predictor_in is None else weights.predictor_in.shape[1]
    partner = mlp_width if weights.w_in.shape[1] == 2 * mlp_width else 0
    _, num_kv_heads, page_size, head_width = pages.shape
    group = rules.num_heads // num_kv_heads
    qkv = cut_matrix(num_projected, width, dtype, tuning)
    # both read the same columns of x
    same = {"columns": qkv.columns, "padded": qkv.padded}
    predictor = cut_matrix(num_units, width, dtype, tuning)._replace(**same)
    heads = Heads(
        num_heads=rules.num_heads,
        num_kv_heads=num_kv_heads,
        width=head_width,
        page_size=page_size,
        chunk=tuning.chunk,
        max_splits=tuning.max_splits,
        num_programs=tuning.num_programs,
        group=group,
        pack=2 if pages.dtype.itemsize == 2 else 1,
    )
    return StepPlan(
        num_layers=num_layers,
        num_programs=tuning.num_programs,
        width=width,
        block=min(triton.next_power_of_2(width), 2048),
        heads=heads,
        qkv=qkv,
        attn_out=cut_matrix(width, weights.w_attn_out.shape[2], dtype, tuning),
        mlp_in=cut_matrix(mlp_width, width, dtype, tuning, partner=partner),
        mlp_out=cut_matrix(width, mlp_width, dtype, tuning),
        head=cut_matrix(num_classes, width, dtype, tuning),
        predictor=predictor,
        predictor_block=triton.next_power_of_2(num_units),
        selector=rules.selector if rules.routed_layers else "all",
        gate=rules.gate,
        normalize=rules.normalize,
        early_exit=rules.early_exit,
    )


def check_plan(
    weights: Weights, rules: Rules, key_pages: Tensor, value_pages: Tensor, tuning: StepTuning
) -> None:
    """Raise ValueError if tensors and numbers are inconsistent."""
    num_kv_heads, head_width = key_pages.shape[1], key_pages.shape[3]
    for name, tensor in (("key_pages", key_pages), ("value_pages", value_pages)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if weights.qkv_bias is not None:
        raise ValueError("this kernel does not support biases of queries, keys and values")
    if head_width < 16 or head_width & (head_width - 1):
        raise ValueError(f"the head width must be a power of two, at least 16, not {head_width}")
    check_model(weights, rules, num_kv_heads, head_width)
    if value_pages.shape != key_pages.shape or value_pages.dtype != key_pages.dtype:
        raise ValueError("value_pages must have the shape and the type of key_pages")
    for name in ("tile", "min_columns", "chunk", "max_splits"):
        value = getattr(tuning, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name} must be a power of two, not {value}")


def check_model(weights: Weights, rules: Rules, num_kv_heads: int, head_width: int) -> None:
    """Raise ValueError if weights and rules are inconsistent, or not supported by any kernel."""
    num_layers, width = weights.norm_attention.shape
    mlp_width = weights.w_mlp_out.shape[2]
    for name, tensor in weights._asdict().items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if rules.num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads = {rules.num_heads} must be a multiple of the pages' {num_kv_heads} heads"
        )
    num_projected = (rules.num_heads + 2 * num_kv_heads) * head_width
    shapes = {
        "phase_table": (weights.phase_table.shape[0], 2, head_width // 2),
        "norm_attention": (num_layers, width),
        "w_qkv": (num_layers, num_projected, width),
        "qkv_bias": (num_layers, num_projected),
        "w_attn_out": (num_layers, width, rules.num_heads * head_width),
        "norm_mlp": (num_layers, width),
        "w_in": (num_layers, (1 if weights.w_in.shape[1] == mlp_width else 2) * mlp_width, width),
        "w_mlp_out": (num_layers, width, mlp_width),
        "norm": (width,),
        "head": tuple(weights.embedding.shape),
        "norm_query": (num_layers, head_width),
        "norm_key": (num_layers, head_width),
        "router": (len(rules.routed_layers), width),
    }
    for name, shape in shapes.items():
        tensor = getattr(weights, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, not {tuple(tensor.shape)}")
    if rules.gate not in GATES:
        raise ValueError(f"there is no gate '{rules.gate}': use one of {', '.join(GATES)}")
    if rules.selector not in SELECTORS:
        raise ValueError(
            f"there is no selector '{rules.selector}': use one of {', '.join(SELECTORS)}"
        )
    if rules.routed_layers and weights.router is None:
        raise ValueError("routed_layers need the router's weights: pass `router`")
    if rules.routed_layers and rules.selector == "predictor" and weights.predictor_in is None:
        raise ValueError(
            "selector 'predictor' needs the predictor's weights: pass them, or use 'router'"
        )
