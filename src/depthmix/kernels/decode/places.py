"""The row kernels of a packed step: which tokens are kept, and their norms, products and updates.

A packed step computes T tokens of several sequences, concatenated, divided into C chunks of
consecutive tokens of one sequence. A block keeps some of them, which occupy places 0 to count - 1,
in order: `index` gives the token of each place, and is undefined past the count. Owns everything
that treats tokens independently. The count is read on the device, so that a launch can be captured
and replayed: programs past the count exit at once. All tensors are contiguous. Knows nothing of
attention, pages and models.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from depthmix.kernels.compiling import await_turn, jit, overlap
from depthmix.kernels.decode.plan import pick_size
from depthmix.kernels.decode.stages import ROUTER_EPS, apply_gate, gelu

# programs of a kernel that loops over rows: about as many as an H200 holds at a time. More would
# take time to start, even with nothing to do.
PROGRAMS = 2048
# number of chunks that a program reads, as compiled sizes
BLOCKS_CHUNKS = (128, 1024)
# multiprocessors of an H200, and registers of each
PROCESSORS, REGISTERS = 132, 65536
# columns per program in `_activate`
BLOCK_HIDDEN = 1024
# tokens per program in `_pack`, and the preceding tokens that it counts at a time
BLOCK_PACKED, BLOCK_COUNTED = 1024, 4096


class PlaceTuning(NamedTuple):
    """How `multiply_places` divides a product; this affects results only by rounding."""

    block_m: int
    """Places of a tile, a power of two and at least 16; at least 64 for warp-group products."""
    block_n: int
    """Rows of weights of a tile, a power of two and at least 16."""
    block_k: int = 64
    """Columns loaded at a time, a power of two and at least 16."""
    num_warps: int = 4
    num_stages: int = 4
    """Blocks of columns present or in flight."""
    group: int = 8
    """Row blocks that traverse all weights together."""
    splits: int = 1
    """Parts into which a tile's columns are split; each program takes equally many parts."""
    programs: int = PROCESSORS
    """As many as fit on the device at a time."""


class TimedTile(NamedTuple):
    """A tile that `choose_tuning` may choose, and its costs in microseconds."""

    tuning: PlaceTuning
    start: float
    each: float
    """A block of columns of a tile, if a program has a multiprocessor to itself."""
    together: float
    """The same if two programs share one."""
    tile: float
    """Starting a tile."""
    tell: float
    """Publishing a part's sum."""
    join: float
    """Adding another part's sum."""


TILES = (
    TimedTile(
        PlaceTuning(64, 64, 64, 4, 6, programs=2 * PROCESSORS),
        -2.42,
        0.202,
        0.276,
        4.80,
        3.42,
        0.59,
    ),
    TimedTile(PlaceTuning(64, 128, 64, 4, 8), -2.24, 0.208, 0.208, 5.42, 3.96, 0.73),
    TimedTile(PlaceTuning(128, 128, 64, 8, 6), -1.78, 0.324, 0.324, 6.44, 4.21, 0.91),
    TimedTile(PlaceTuning(128, 256, 64, 8, 4), -2.71, 0.609, 0.609, 8.49, 7.07, 1.19),
)
"""Tiles for 16-bit numbers: the best subset of four out of eight on an H200, with costs fitted to
124 measurements each (`benchmarks/places.py --save`), 10 % off on average. The resulting choices
are 1.8 % slower than the best of all 40 variants of each of 25 products."""
TILE_FLOAT32 = PlaceTuning(64, 64, 32, 8, 2, programs=2 * PROCESSORS)
"""The tile for 32-bit numbers, which are multiplied in registers."""
SPLITS = (1, 2, 3, 4)


@jit
def _find_token(index, place):
    """The token of a place; without an index, the place itself."""
    return tl.cast(place if index is None else tl.load(index + place), tl.int64)


@jit(do_not_specialize=["index", "count"])
def _normalize(
    x,
    index,
    count,
    update,
    weight,
    eps,
    out,
    width: tl.constexpr,
    keep: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Normalize x row by row, or its sum with an update."""
    await_turn(overlaps)
    lane = tl.arange(0, block)
    inside = lane < width
    scale_D = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    num_kept = tl.load(count)
    for place in range(tl.program_id(0), num_kept, tl.num_programs(0)):
        at = tl.cast(place, tl.int64) * width + lane
        at_x = _find_token(index, place) * width + lane
        vector_D = tl.load(x + at_x, mask=inside, other=0.0).to(tl.float32)
        if update is not None:
            vector_D += tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        if keep:
            tl.store(x + at_x, vector_D.to(x.dtype.element_ty), mask=inside)
        invert = tl.rsqrt(tl.sum(vector_D * vector_D) / width + eps)
        normed_D = vector_D * invert * scale_D
        tl.store(out + at, normed_D.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["count", "parts"])
def _activate(
    hidden,
    count,
    out,
    parts,
    width: tl.constexpr,
    kind: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Process parts of rows; the parts of a row are adjacent."""
    await_turn(overlaps)
    num_items = tl.load(count) * parts
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        place = tl.cast(item // parts, tl.int64)
        lane = item % parts * block + tl.arange(0, block)
        inside = lane < width
        if kind == "swiglu":
            given = hidden + place * (2 * width) + lane
            gate_F = tl.load(given, mask=inside, other=0.0).to(tl.float32)
            value_F = tl.load(given + width, mask=inside, other=0.0).to(tl.float32)
            result_F = gate_F * tl.sigmoid(gate_F) * value_F
        else:
            given = hidden + place * width + lane
            result_F = gelu(tl.load(given, mask=inside, other=0.0).to(tl.float32))
        tl.store(out + place * width + lane, result_F.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["index", "count"])
def _add_update(
    x,
    index,
    count,
    gate,
    update,
    more,
    width: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    await_turn(overlaps)
    lane = tl.arange(0, block)
    inside = lane < width
    num_kept = tl.load(count)
    for place in range(tl.program_id(0), num_kept, tl.num_programs(0)):
        token = _find_token(index, place)
        at = tl.cast(place, tl.int64) * width + lane
        at_x = token * width + lane
        vector_D = tl.load(x + at_x, mask=inside, other=0.0).to(tl.float32)
        added_D = tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        if update is not None:
            added_D += tl.load(update + at, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            added_D *= tl.load(gate + token)
        tl.store(x + at_x, (vector_D + added_D).to(x.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["count", "splits"])
def _multiply(
    source,
    weight,
    out,
    count,
    partial,
    arrivals,
    width,
    num_out,
    splits,
    described: tl.constexpr,
    unit: tl.constexpr,
    unit_out: tl.constexpr,
    group: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Tiles of source · weightᵀ, whose columns are split into `splits` parts.

    Parts are numbered consecutively: within a tile first, then over row blocks, so that neighbours
    read the same weights. Programs get equally many consecutive parts. The last program to finish a
    shared tile sums its parts, always in the same order. With `described`, the matrices are tensor
    descriptors: a copy engine reads tiles, with zeros past the last row and column.
    """
    await_turn(overlaps)
    # divisors that the launch does not detect: their multiples are read 16 bytes at a time
    if unit < 16:
        width = width // unit * unit
    if unit_out < 16:
        num_out = num_out // unit_out * unit_out
    program = tl.program_id(0)
    num_kept = tl.load(count)
    blocks_m = tl.cdiv(num_kept, block_m)
    blocks_n = tl.cdiv(num_out, block_n)
    blocks_k = tl.cdiv(width, block_k)
    # blocks of columns per part
    length = tl.cdiv(blocks_k, splits)
    num_parts = blocks_m * blocks_n * splits
    share = tl.cdiv(num_parts, tl.num_programs(0))
    begin = program * share
    end = tl.minimum(begin + share, num_parts)
    # no loop-invariant code motion: there are not enough registers to hold the results
    for tile in tl.range(begin // splits, tl.cdiv(end, splits), disable_licm=True):
        first_m = tile // (group * blocks_n) * group
        each = tl.minimum(blocks_m - first_m, group)
        inner = tile % (group * blocks_n)
        at_m = (first_m + inner % each) * block_m
        at_n = inner // each * block_n
        origin = tile * splits
        start = tl.maximum(begin - origin, 0) * length
        stop = tl.minimum(tl.minimum(end - origin, splits) * length, blocks_k)
        total = tl.zeros((block_m, block_n), tl.float32)
        if described:
            # rows past the last have sums of their own, which are not stored
            for block in range(start, stop):
                given = source.load([at_m, block * block_k])
                matrix = weight.load([at_n, block * block_k])
                total = tl.dot(given, matrix.T, total)
        else:
            lane = tl.arange(0, block_k)
            # rows past the last repeat it, so that loads need no mask for them
            row = tl.minimum(at_m + tl.arange(0, block_m), num_kept - 1)
            rows = source + row.to(tl.int64)[:, None] * width + lane[None, :]
            row = tl.minimum(at_n + tl.arange(0, block_n), num_out - 1)
            columns = weight + row.to(tl.int64)[None, :] * width + lane[:, None]
            for block in range(start, stop):
                column = block * block_k
                inside = lane < width - column
                given = tl.load(rows + column, mask=inside[None, :], other=0.0)
                matrix = tl.load(columns + column, mask=inside[:, None], other=0.0)
                total = tl.dot(given, matrix, total, input_precision="ieee")
        place = at_m + tl.arange(0, block_m)
        lane_out = at_n + tl.arange(0, block_n)
        to = out + place.to(tl.int64)[:, None] * num_out + lane_out[None, :]
        real = (place < num_kept)[:, None] & (lane_out < num_out)[None, :]
        if (begin <= origin) & (end >= origin + splits):
            tl.store(to, total.to(out.dtype.element_ty), mask=real)
        else:
            size: tl.constexpr = block_m * block_n
            within = tl.arange(0, block_m)[:, None] * block_n + tl.arange(0, block_n)[None, :]
            # a program shares at most two tiles: one begun by another, and one that it begins
            slot = program * 2 + (begin < origin).to(tl.int32)
            # whole tiles: the buffer has room for rows past the last, and masks take registers
            tl.store(partial + slot * size + within, total)
            first = origin // share
            last = (origin + splits - 1) // share
            # all threads must have stored before the arrival is counted
            tl.debug_barrier()
            if tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu") == last - first:
                tl.debug_barrier()
                slot = first * 2 + (first * share < origin).to(tl.int32)
                # written by other programs: bypass the L1 cache
                whole = tl.load(partial + slot * size + within, cache_modifier=".cg")
                for other in range(first + 1, last + 1):
                    whole += tl.load(partial + other * 2 * size + within, cache_modifier=".cg")
                tl.store(to, whole.to(out.dtype.element_ty), mask=real)
                # reset for the next launch
                tl.store(arrivals + first, 0)


@jit(do_not_specialize=["bias", "num_tokens"])
def _score(
    x,
    router,
    units,
    w_out,
    bias,
    num_tokens,
    score,
    wish,
    width: tl.constexpr,
    num_units: tl.constexpr,
    normalize: tl.constexpr,
    block_tokens: tl.constexpr,
    block_units: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Both scores of some tokens; the predictor's from its units before normalization."""
    await_turn(overlaps)
    first_token = tl.program_id(0) * block_tokens
    num_real = tl.load(num_tokens)
    if first_token >= num_real:
        return
    token = first_token + tl.arange(0, block_tokens)
    real = token < num_real
    rows = x + token.to(tl.int64)[:, None] * width
    square = tl.zeros((block_tokens, block), tl.float32)
    product = tl.zeros((block_tokens, block), tl.float32)
    for column in range(0, width, block):
        lane = column + tl.arange(0, block)
        inside = lane < width
        vector = tl.load(rows + lane[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        vector = vector.to(tl.float32)
        square += vector * vector
        scale = tl.load(router + lane, mask=inside, other=0.0).to(tl.float32)
        product += vector * scale[None, :]
    invert = tl.rsqrt(tl.sum(square, axis=1) / width + ROUTER_EPS)
    total = tl.sum(product, axis=1)
    if normalize:
        total *= invert
    tl.store(score + token, total, mask=real)
    if units is None:
        tl.store(wish + token, total, mask=real)
    else:
        logit = tl.zeros((block_tokens,), tl.float32)
        for first in range(0, num_units, block_units):
            unit = first + tl.arange(0, block_units)
            at = token.to(tl.int64)[:, None] * num_units + unit[None, :]
            mask = real[:, None] & (unit < num_units)[None, :]
            hidden = tl.load(units + at, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(w_out + unit, mask=unit < num_units, other=0.0).to(tl.float32)
            logit += tl.sum(gelu(hidden * invert[:, None]) * weight[None, :], axis=1)
        tl.store(wish + token, logit + tl.load(bias).to(tl.float32), mask=real)


@jit
def _find_kept(wish, row, position, previous_slot, first_tokens, token, there):
    """1 if a token is kept, else 0."""
    wanted = tl.load(wish + token, mask=there, other=0.0) > 0
    forced = tl.load(position + token, mask=there, other=0) < first_tokens
    kept = there & (wanted | forced) & (tl.load(row + token, mask=there, other=-1) >= 0)
    if previous_slot is not None:
        kept = kept & (tl.load(previous_slot + token, mask=there, other=-1) >= 0)
    return kept.to(tl.int32)


@jit(
    do_not_specialize=[
        "begin",
        "num_tokens",
        "first",
        "count",
        "kept_row",
        "taken",
        "num_chunks",
        "num_alone",
    ]
)
def _pack(
    wish,
    score,
    row,
    position,
    previous_slot,
    begin,
    num_tokens,
    first_tokens,
    index,
    slot,
    first,
    count,
    gate,
    kept_row,
    taken,
    before,
    most_tokens,
    num_chunks,
    num_alone,
    gate_kind: tl.constexpr,
    block_chunks: tl.constexpr,
    block_counted: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Assign places to some tokens, after all tokens kept before them.

    Each program counts those again: no program waits for another, and reading a few thousand
    tokens takes less time than synchronizing with another program.
    """
    await_turn(overlaps)
    start = tl.program_id(0) * block
    last = tl.program_id(0) == tl.num_programs(0) - 1
    num_real = tl.load(num_tokens)
    counted = tl.zeros((block_counted,), tl.int32)
    for begin_counted in range(0, tl.minimum(start, num_real), block_counted):
        token = begin_counted + tl.arange(0, block_counted)
        there = token < tl.minimum(start, num_real)
        counted += _find_kept(wish, row, position, previous_slot, first_tokens, token, there)
    token = start + tl.arange(0, block)
    here = token < most_tokens
    kept = _find_kept(wish, row, position, previous_slot, first_tokens, token, token < num_real)
    sums = tl.cumsum(kept, axis=0)
    num_before = tl.sum(counted)
    num_kept = num_before + tl.sum(kept)
    place = num_before + sums - kept
    is_kept = kept > 0
    tl.store(slot + token, tl.where(is_kept, place, -1), mask=here)
    tl.store(taken + token, kept.to(tl.uint8), mask=here)
    tl.store(index + place, token, mask=is_kept)
    # number of kept tokens before each one, for the chunks below
    tl.store(before + token, place)
    scores = tl.load(score + token, mask=token < num_real, other=0.0)
    weight = tl.where(token < num_real, apply_gate(scores, gate_kind), 0.0)
    tl.store(gate + token, weight, mask=here)
    # -1, except for chunks of one token, which are filled in below
    nobody = tl.full((block,), -1, tl.int32)
    tl.store(kept_row + place, nobody, mask=is_kept & (place < num_alone))
    if last:
        tl.store(count, num_kept)
        for empty in range(0, num_alone, block):
            rest = empty + tl.arange(0, block)
            tl.store(kept_row + rest, nobody, mask=(rest >= num_kept) & (rest < num_alone))
    tl.debug_barrier()
    chunk = tl.arange(0, block_chunks)
    begins = tl.load(begin + chunk, mask=chunk <= num_chunks, other=-1)
    ends = tl.load(begin + chunk + 1, mask=chunk < num_chunks, other=-1)
    # chunks that begin past the last token belong to the last program
    mine = (begins >= start) & (begins < tl.where(last, num_real + 1, start + block))
    within = mine & (begins < start + block)
    reached = tl.load(before + begins, mask=within, other=0)
    tl.store(first + chunk, tl.where(within, reached, num_kept), mask=mine)
    alone = within & (ends - begins == 1) & (begins < num_real)
    own = tl.load(slot + begins, mask=alone, other=-1)
    home = tl.load(row + begins, mask=alone, other=-1)
    tl.store(kept_row + own, home, mask=alone & (own >= 0) & (own < num_alone))


@jit(
    do_not_specialize=[
        "given",
        "row",
        "position",
        "begin",
        "chunk_row",
        "num_tokens",
        "lengths",
        "num_chunks",
        "num_layers",
        "num_rows",
    ]
)
def _begin(
    given,
    newest,
    row,
    position,
    begin,
    chunk_row,
    num_tokens,
    embedding,
    lengths,
    token,
    x,
    num_chunks,
    num_layers,
    num_rows,
    width: tl.constexpr,
    block_layers: tl.constexpr,
    block: tl.constexpr,
):
    """Each program has one chunk, and tokens at a stride of the number of programs."""
    program = tl.program_id(0)
    for chunk in range(program, num_chunks, tl.num_programs(0)):
        home = tl.load(chunk_row + chunk)
        start = tl.load(begin + chunk)
        # a chunk that is empty or has no row starts no sequence
        size = tl.where(home >= 0, tl.load(begin + chunk + 1) - start, 0)
        past = tl.load(position + start, mask=size > 0, other=1)
        layer = tl.arange(0, block_layers)
        nothing = tl.zeros((block_layers,), tl.int32)
        inside = layer < tl.where(past == 0, num_layers, 0)
        tl.store(lengths + layer * num_rows + home, nothing, mask=inside)
    lane = tl.arange(0, block)
    for number in range(program, tl.load(num_tokens), tl.num_programs(0)):
        own = tl.load(given + number).to(tl.int64)
        home = tl.where(own < 0, tl.load(row + number), -1)
        drawn = tl.load(newest + home, mask=home >= 0, other=0).to(tl.int64)
        own = tl.where(own < 0, drawn, own)
        tl.store(token + number, own.to(token.dtype.element_ty))
        vector_D = tl.load(embedding + own * width + lane, mask=lane < width, other=0.0)
        at = tl.cast(number, tl.int64) * width + lane
        tl.store(x + at, vector_D.to(x.dtype.element_ty), mask=lane < width)


@jit(do_not_specialize=["firsts", "begin", "chunk_row", "lengths", "num_chunks", "num_rows"])
def _end(
    firsts,
    begin,
    chunk_row,
    route_of_layer,
    lengths,
    num_chunks,
    num_rows,
    block: tl.constexpr,
):
    """One program per layer."""
    layer = tl.program_id(0)
    route = tl.load(route_of_layer + layer)
    chunk = tl.arange(0, block)
    home = tl.load(chunk_row + chunk, mask=chunk < num_chunks, other=-1)
    real = home >= 0
    if route >= 0:
        begin = firsts + route * (num_chunks + 1)
    added = tl.load(begin + chunk + 1, mask=real, other=0)
    added -= tl.load(begin + chunk, mask=real, other=0)
    to = lengths + layer * num_rows + home
    tl.store(to, tl.load(to, mask=real, other=0) + added, mask=real)


def normalize_places(
    x: Float[Tensor, "T D"],
    index: Int[Tensor, " P"] | None,
    count: Int[Tensor, "1"],
    weight: Float[Tensor, " D"],
    eps: float,
    out: Float[Tensor, "P D"],
) -> None:
    """Normalize each kept token, and multiply by the weight."""
    _launch_norm(x, index, count, None, weight, eps, out, keep=False)


def add_and_normalize(
    x: Float[Tensor, "T D"],
    index: Int[Tensor, " P"] | None,
    count: Int[Tensor, "1"],
    update: Float[Tensor, "P D"],
    weight: Float[Tensor, " D"],
    eps: float,
    out: Float[Tensor, "P D"],
    *,
    keep: bool,
) -> None:
    """Normalize the sum of each kept token and its update, and multiply by the weight.

    `keep` writes the sum to x. The sum is normalized before it is rounded.
    """
    assert update.shape == out.shape
    assert update.is_contiguous()
    _launch_norm(x, index, count, update, weight, eps, out, keep=keep)


def _launch_norm(
    x: Tensor,
    index: Tensor | None,
    count: Tensor,
    update: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    keep: bool,
) -> None:
    num_places, width = out.shape
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert x.shape[1] == width
    assert weight.shape == (width,)
    block = triton.next_power_of_2(width)
    _normalize[(min(PROGRAMS, num_places),)](
        x,
        index,
        count,
        update,
        weight,
        eps,
        out,
        width,
        keep,
        block=block,
        num_warps=_count_warps(block),
        **overlap(x.device),
    )


def _count_warps(block: int) -> int:
    """Warps for a row of `block` columns: 16 columns per thread, 32 bytes of bf16."""
    return min(16, max(1, block // 512))


def add_update(
    x: Float[Tensor, "T D"],
    index: Int[Tensor, " P"] | None,
    count: Int[Tensor, "1"],
    gate: Float[Tensor, " T"] | None,
    update: Float[Tensor, "P D"] | None,
    more: Float[Tensor, "P D"],
) -> None:
    """x += gate · (update + more) for each kept token; the gate defaults to 1."""
    num_places, width = more.shape
    assert x.is_contiguous()
    assert more.is_contiguous()
    assert x.shape[1] == width
    assert update is None or (update.is_contiguous() and update.shape == more.shape)
    block = triton.next_power_of_2(width)
    _add_update[(min(PROGRAMS, num_places),)](
        x,
        index,
        count,
        gate,
        update,
        more,
        width,
        block=block,
        num_warps=_count_warps(block),
        **overlap(x.device),
    )


def activate_places(
    hidden: Float[Tensor, "P F_in"], count: Int[Tensor, "1"], out: Float[Tensor, "P F"], kind: str
) -> None:
    """The MLP's non-linearity: "swiglu" of two halves, or exact "gelu"."""
    num_places, width = out.shape
    if kind not in ("swiglu", "gelu"):
        raise ValueError(f"there is no MLP of kind '{kind}'")
    assert hidden.shape == (num_places, 2 * width if kind == "swiglu" else width)
    assert hidden.is_contiguous()
    assert out.is_contiguous()
    block = min(BLOCK_HIDDEN, triton.next_power_of_2(width))
    parts = triton.cdiv(width, block)
    _activate[(min(PROGRAMS, num_places * parts),)](
        hidden, count, out, parts, width, kind, block=block, num_warps=4, **overlap(out.device)
    )


def multiply_places(
    source: Float[Tensor, "P K"],
    weight: Float[Tensor, "N K"],
    out: Float[Tensor, "P N"],
    count: Int[Tensor, "1"],
    *,
    expected: int,
    tuning: PlaceTuning | None = None,
) -> None:
    """source · weightᵀ for the occupied places, summed in float32.

    `expected` is the host's guess of the count, from which the tile is chosen: a wrong guess only
    costs time. Splits count arrivals in a tensor shared by all calls on a device: these must not
    run concurrently, and the first one must not be captured.
    """
    num_places, width = source.shape
    num_out = weight.shape[0]
    assert weight.shape[1] == width
    assert out.shape == (num_places, num_out)
    assert source.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    assert source.dtype == weight.dtype
    if tuning is None:
        tuning = choose_tuning(min(expected, num_places), num_out, width, source.dtype)
    # without splits there are no partial sums, but the kernel is the same
    num_sums = 2 * tuning.programs if tuning.splits > 1 else 0
    shape = (num_sums, tuning.block_m, tuning.block_n)
    partial = torch.empty(shape, device=out.device, dtype=torch.float32)
    arrivals = _find_arrivals(out.device, triton.next_power_of_2(tuning.programs))
    matrices: list[Tensor | TensorDescriptor] = [source, weight]
    described = can_describe(source) and can_describe(weight)
    if described:
        blocks = ([tuning.block_m, tuning.block_k], [tuning.block_n, tuning.block_k])
        pairs = zip((source, weight), blocks, strict=True)
        matrices = [TensorDescriptor.from_tensor(*pair) for pair in pairs]
    # limits registers, so that all programs fit on the multiprocessors
    threads = 32 * tuning.num_warps * triton.cdiv(tuning.programs, PROCESSORS)
    _multiply[(tuning.programs,)](
        *matrices,
        out,
        count,
        partial,
        arrivals,
        width,
        num_out,
        tuning.splits,
        described,
        unit=math.gcd(width, 16),
        unit_out=math.gcd(num_out, 16),
        group=tuning.group,
        block_m=tuning.block_m,
        block_n=tuning.block_n,
        block_k=tuning.block_k,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=REGISTERS // threads if threads > REGISTERS // 255 else None,
        **overlap(out.device),
    )


def can_describe(matrix: Tensor) -> bool:
    """Whether the copy engine can read a matrix's tiles, for 16-bit products."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    aligned = matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0
    return matrix.element_size() == 2 and aligned and matrix.numel() > 0


@functools.cache
def _find_arrivals(device: torch.device, size: int) -> Tensor:
    """Return a shared tensor of zeros, which every launch resets after use."""
    return torch.zeros(size, device=device, dtype=torch.int32)


@functools.cache
def choose_tuning(expected: int, num_out: int, width: int, dtype: torch.dtype) -> PlaceTuning:
    """Choose the tile and the number of splits estimated to be fastest for this many rows.

    The time is that of the busiest multiprocessor. A large tile reads less per product, but too few
    tiles leave multiprocessors idle, as does one more tile than they can share evenly. Splitting
    tiles remedies both, at the cost of writing and reading partial sums.
    """
    if dtype == torch.float32:
        return TILE_FLOAT32

    def estimate(shape: TimedTile, splits: int) -> float:
        block_m, block_n, block_k = shape.tuning[:3]
        num_tiles = triton.cdiv(max(expected, 1), block_m) * triton.cdiv(num_out, block_n)
        # parts of tiles per program
        share = triton.cdiv(num_tiles * splits, shape.tuning.programs)
        busy = triton.cdiv(num_tiles * splits, share)
        each = shape.each if busy <= PROCESSORS else shape.together
        us = shape.start + each * share * triton.cdiv(triton.cdiv(width, block_k), splits)
        us += shape.tile * triton.cdiv(share, splits)
        if share % splits:
            us += shape.tell + shape.join * triton.cdiv(splits, share)
        return us

    choices = [
        (tile, splits)
        for tile in TILES
        for splits in SPLITS
        if splits == 1 or width >= 2 * splits * tile.tuning.block_k
    ]
    tile, splits = min(choices, key=lambda choice: estimate(*choice))
    return tile.tuning._replace(splits=splits)


def score_tokens(
    x: Float[Tensor, "T D"],
    router: Float[Tensor, " D"],
    w_in: Float[Tensor, "U D"] | None,
    w_out: Float[Tensor, " U"] | None,
    bias: Float[Tensor, ""] | None,
    num_tokens: Int[Tensor, "1"],
    score: Float[Tensor, " T"],
    wish: Float[Tensor, " T"],
    *,
    normalize: bool,
) -> None:
    """Compute each token's router and predictor scores; without a predictor, they are equal."""
    most_tokens, width = x.shape
    assert x.is_contiguous()
    # (W·x) / rms(x) = W·(x / rms(x)): the product needs no normalized copy of x
    units = None if w_in is None else torch.mm(x, w_in.T)
    num_units = 0 if w_in is None else w_in.shape[0]
    block_tokens = 4
    _score[(triton.cdiv(most_tokens, block_tokens),)](
        x,
        router,
        units,
        w_out,
        bias,
        num_tokens,
        score,
        wish,
        width,
        num_units,
        normalize,
        block_tokens=block_tokens,
        block_units=min(128, triton.next_power_of_2(max(1, num_units))),
        block=min(1024, triton.next_power_of_2(width)),
        num_warps=4,
        **overlap(x.device),
    )


def pack_tokens(
    wish: Float[Tensor, " T"],
    score: Float[Tensor, " T"],
    row: Int[Tensor, " T"],
    position: Int[Tensor, " T"],
    previous_slot: Int[Tensor, " T"] | None,
    begin: Int[Tensor, " chunks_and_one"],
    num_tokens: Int[Tensor, "1"],
    first_tokens: int,
    index: Int[Tensor, " P"],
    slot: Int[Tensor, " T"],
    first: Int[Tensor, " chunks_and_one"],
    count: Int[Tensor, "1"],
    gate: Float[Tensor, " T"],
    kept_row: Int[Tensor, " alone"],
    taken: Int[Tensor, " T"],
    *,
    gate_kind: str,
) -> None:
    """Assign places to tokens with a positive wish, or among the first of their sequence.

    With `previous_slot`, tokens that had no place there are not kept. `slot` is a token's place or
    -1, `taken` whether it has one, `first` the place of each chunk's first kept token followed by
    the count, `gate` the factor of a token's update, 0 past the last token. `kept_row` is the row
    of a place's token if that is its chunk's only one, else -1.
    """
    most_tokens, num_chunks = wish.shape[0], begin.shape[0] - 1
    assert index.shape[0] >= most_tokens
    assert first.shape == begin.shape
    num_programs = triton.cdiv(most_tokens, BLOCK_PACKED)
    before = torch.empty(num_programs * BLOCK_PACKED, device=wish.device, dtype=torch.int32)
    _pack[(num_programs,)](
        wish,
        score,
        row,
        position,
        previous_slot,
        begin,
        num_tokens,
        first_tokens,
        index,
        slot,
        first,
        count,
        gate,
        kept_row,
        taken,
        before,
        most_tokens,
        num_chunks,
        kept_row.shape[0],
        gate_kind,
        block_chunks=pick_size(num_chunks + 1, BLOCKS_CHUNKS),
        block_counted=BLOCK_COUNTED,
        block=BLOCK_PACKED,
        num_warps=8,
        **overlap(wish.device),
    )


def begin_step(
    given: Int[Tensor, " T"],
    newest: Int[Tensor, " rows"],
    row: Int[Tensor, " T"],
    position: Int[Tensor, " T"],
    begin: Int[Tensor, " chunks_and_one"],
    chunk_row: Int[Tensor, " chunks"],
    num_tokens: Int[Tensor, "1"],
    embedding: Float[Tensor, "V D"],
    lengths: Int[Tensor, "L rows"],
    token: Int[Tensor, " T"],
    x: Float[Tensor, "T D"],
) -> None:
    """Empty the rows of sequences that start, and embed the step's tokens.

    A negative token stands for the newest one of its row, or for 0 without a row.
    """
    most_tokens, width = x.shape
    assert embedding.is_contiguous()
    assert x.is_contiguous()
    assert lengths.is_contiguous()
    num_layers, num_rows = lengths.shape
    block = triton.next_power_of_2(width)
    _begin[(min(PROGRAMS, max(most_tokens, chunk_row.shape[0])),)](
        given,
        newest,
        row,
        position,
        begin,
        chunk_row,
        num_tokens,
        embedding,
        lengths,
        token,
        x,
        chunk_row.shape[0],
        num_layers,
        num_rows,
        width,
        block_layers=triton.next_power_of_2(num_layers),
        block=block,
        num_warps=_count_warps(block),
    )


def end_step(
    firsts: Int[Tensor, "routes chunks_and_one"],
    begin: Int[Tensor, " chunks_and_one"],
    chunk_row: Int[Tensor, " chunks"],
    route_of_layer: Int[Tensor, " L"],
    lengths: Int[Tensor, "L rows"],
) -> None:
    """Add to each row's lengths what its chunk stored: kept tokens, or all in dense layers.

    A row has at most one chunk. `route_of_layer` is a layer's row of `firsts`, -1 if dense.
    """
    assert firsts.is_contiguous()
    assert lengths.is_contiguous()
    num_layers, num_rows = lengths.shape
    num_chunks = chunk_row.shape[0]
    _end[(num_layers,)](
        firsts,
        begin,
        chunk_row,
        route_of_layer,
        lengths,
        num_chunks,
        num_rows,
        block=pick_size(num_chunks, BLOCKS_CHUNKS),
        num_warps=4,
    )
