"""The row kernels of a packed step: who is kept, norms, products and updates of those who are.

A packed step computes T tokens of several sequences, one after the other, cut into C chunks of
consecutive tokens of one sequence. Inside a block some of them are kept, and these stand in places
0 to count - 1, in order: `index` names the token of each place, and what it holds beyond the count
means nothing. Owns what treats each token by itself. How many are kept is read on the device, so
that a launch can be captured and replayed: programs beyond the count end at once. All tensors are
contiguous. Knows nothing of attention, of pages and of models.
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

from depthmix.kernels.compiling import jit
from depthmix.kernels.decode.plan import pick_size
from depthmix.kernels.decode.stages import ROUTER_EPS, apply_gate, gelu

# programs of a kernel that goes through rows: about what an H200 holds at a time. More of them
# would take time to start, even where there is nothing to do.
PROGRAMS = 2048
# chunks that a program looks at
BLOCKS_CHUNKS = (128, 1024)
# processors of an H200, and registers of one
PROCESSORS, REGISTERS = 132, 65536
# columns of a program that activates
BLOCK_HIDDEN = 1024
# tokens of a program that packs, and those before them that it counts at a time
BLOCK_PACKED, BLOCK_COUNTED = 1024, 4096


class PlaceTuning(NamedTuple):
    """How `multiply_places` cuts up a product; results differ by rounding only."""

    block_m: int
    """Places of a tile, a power of two and at least 16; 64 where a warp group multiplies."""
    block_n: int
    """Rows of weights of a tile, a power of two and at least 16."""
    block_k: int = 64
    """Columns that are loaded at a time, a power of two and at least 16."""
    num_warps: int = 4
    num_stages: int = 4
    """Blocks of columns that are here or under way."""
    group: int = 8
    """Row blocks that go through all weights together."""
    splits: int = 1
    """Parts that the columns of a tile are cut into, of which programs take equal numbers."""
    programs: int = PROCESSORS
    """As many as there is room for at a time."""


class TimedTile(NamedTuple):
    """A tile that `choose_tuning` may take, and what it takes in microseconds."""

    tuning: PlaceTuning
    start: float
    each: float
    """A block of columns of a tile, where a program has a processor for itself."""
    together: float
    """The same where two programs share one."""
    tile: float
    """Beginning with a tile."""
    tell: float
    """Telling others of a part's sum."""
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
"""Tiles for numbers of 16 bits: the four of eight that together lose least on an H200, with times
fitted to 124 measurements of each (`benchmarks/places.py --save`), 10 % off on average. What they
choose is 1.8 % slower than the best of all 40 ways to do each of 25 products."""
TILE_FLOAT32 = PlaceTuning(64, 64, 32, 8, 2, programs=2 * PROCESSORS)
"""The tile for numbers of 32 bits, which are multiplied in registers."""
SPLITS = (1, 2, 3, 4)


@jit
def _find_token(index, place):
    """The token of a place, which without an index is its number."""
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
):
    """One row after the other: norm x, or its sum with an update."""
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
):
    """Parts of rows, those of one row side by side."""
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
def _add_update(x, index, count, gate, update, more, width: tl.constexpr, block: tl.constexpr):
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
):
    """Tiles of source · weightᵀ, whose columns are cut into `splits` parts.

    Parts are numbered without gaps: those of a tile first, then row blocks, so that neighbours read
    the same weights. Every program has as many as any other, side by side. Who comes last of those
    that share a tile adds their sums up, always in the same order. With `described`, the matrices
    are tensor descriptors: a copy engine reads tiles, and zeros beyond the last row and column.
    """
    # divisors that the launch does not see by itself: what they divide is read 16 bytes at a time
    if unit < 16:
        width = width // unit * unit
    if unit_out < 16:
        num_out = num_out // unit_out * unit_out
    program = tl.program_id(0)
    num_kept = tl.load(count)
    blocks_m = tl.cdiv(num_kept, block_m)
    blocks_n = tl.cdiv(num_out, block_n)
    blocks_k = tl.cdiv(width, block_k)
    # blocks of columns of a part
    length = tl.cdiv(blocks_k, splits)
    num_parts = blocks_m * blocks_n * splits
    share = tl.cdiv(num_parts, tl.num_programs(0))
    begin = program * share
    end = tl.minimum(begin + share, num_parts)
    # nothing is computed ahead of all tiles: there are not registers enough to hold it
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
            # rows beyond the last one have sums of their own, which nobody stores
            for block in range(start, stop):
                given = source.load([at_m, block * block_k])
                matrix = weight.load([at_n, block * block_k])
                total = tl.dot(given, matrix.T, total)
        else:
            lane = tl.arange(0, block_k)
            # rows beyond the last are it once more, so that loads need no mask for them
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
            # a program shares two tiles at most: one that others begin, and one that it begins
            slot = program * 2 + (begin < origin).to(tl.int32)
            # whole tiles: what is beyond the last row is a row, and masks take registers
            tl.store(partial + slot * size + within, total)
            first = origin // share
            last = (origin + splits - 1) // share
            # all threads have stored before the first one says so
            tl.debug_barrier()
            if tl.atomic_add(arrivals + first, 1, sem="acq_rel", scope="gpu") == last - first:
                tl.debug_barrier()
                slot = first * 2 + (first * share < origin).to(tl.int32)
                # other programs wrote it: the first-level cache is not asked
                whole = tl.load(partial + slot * size + within, cache_modifier=".cg")
                for other in range(first + 1, last + 1):
                    whole += tl.load(partial + other * 2 * size + within, cache_modifier=".cg")
                tl.store(to, whole.to(out.dtype.element_ty), mask=real)
                # as the next launch finds it
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
):
    """Both scores of some tokens, the predictor's from its units before their norm."""
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
    """1 where a token is kept."""
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
):
    """Places of some tokens, after all those that are kept before them.

    Those are counted here once more: nobody waits for anybody, and to look at a few thousand
    tokens takes less time than to hear from another program.
    """
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
    # kept tokens before each one, for the chunks below
    tl.store(before + token, place)
    scores = tl.load(score + token, mask=token < num_real, other=0.0)
    weight = tl.where(token < num_real, apply_gate(scores, gate_kind), 0.0)
    tl.store(gate + token, weight, mask=here)
    # nobody, but for chunks of one token
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
    # what begins behind the last token belongs to the last program
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
    """A program has one chunk and every so manieth token."""
    program = tl.program_id(0)
    for chunk in range(program, num_chunks, tl.num_programs(0)):
        home = tl.load(chunk_row + chunk)
        start = tl.load(begin + chunk)
        # one that is empty, or nobody's, begins nothing
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
    """A program has one layer."""
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
    """The norm of each kept token, times the weight."""
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
    """The norm of each kept token's sum with its update, times the weight.

    `keep` writes the sum to x. The norm is that of the sum before it is rounded.
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
    )


def _count_warps(block: int) -> int:
    """Warps for a row of so many columns: 16 of them for each thread, 32 bytes of bf16."""
    return min(16, max(1, block // 512))


def add_update(
    x: Float[Tensor, "T D"],
    index: Int[Tensor, " P"] | None,
    count: Int[Tensor, "1"],
    gate: Float[Tensor, " T"] | None,
    update: Float[Tensor, "P D"] | None,
    more: Float[Tensor, "P D"],
) -> None:
    """x += gate · (update + more) for each kept token; without a gate, that is 1."""
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
        hidden, count, out, parts, width, kind, block=block, num_warps=4
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
    """source · weightᵀ for the places that are taken, summed in float32.

    `expected` is the host's guess of the count, by which the tile is picked: where it was wrong,
    the product takes longer than it could. Splits count arrivals in a tensor that all calls on a
    device share: these must not run side by side, and the first one must not be captured.
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
    # whole tiles leave nothing behind, and take the same kernel
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
    # so that as many programs as there are fit into the processors' registers
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
    )


def can_describe(matrix: Tensor) -> bool:
    """Whether the copy engine reads a matrix's tiles, for products of 16 bits."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    aligned = matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0
    return matrix.element_size() == 2 and aligned and matrix.numel() > 0


@functools.cache
def _find_arrivals(device: torch.device, size: int) -> Tensor:
    """Zeros, which every launch leaves as it finds them."""
    return torch.zeros(size, device=device, dtype=torch.int32)


@functools.cache
def choose_tuning(expected: int, num_out: int, width: int, dtype: torch.dtype) -> PlaceTuning:
    """The tile, and the parts of it, that should take the least time on so many rows.

    Time is that of the busiest processor. A large tile reads less for each product, but too few
    tiles leave processors idle, and so does one more than they can share evenly; to cut tiles into
    parts mends both, and has sums written and read again.
    """
    if dtype == torch.float32:
        return TILE_FLOAT32

    def estimate(shape: TimedTile, splits: int) -> float:
        block_m, block_n, block_k = shape.tuning[:3]
        num_tiles = triton.cdiv(max(expected, 1), block_m) * triton.cdiv(num_out, block_n)
        # parts of tiles that a program has
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
    """The router's score of each token and the predictor's, or the same twice without one."""
    most_tokens, width = x.shape
    assert x.is_contiguous()
    # (W·x) / rms(x) is W·(x / rms(x)): the product needs no normed copy of x
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
    """Give places to tokens whose wish is positive, or that are among the first of their sequence.

    Who left before does not return, where `previous_slot` says who did. `slot` is a token's place
    or -1, `taken` whether it has one, `first` the place of each chunk's first kept token and in the
    end the count, `gate` what multiplies a token's update, 0 beyond the last token. `kept_row` is
    the row of a place's token where that is its chunk's only one, else -1.
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
    """Empty the rows of sequences that begin; look tokens up, which may be a row's newest.

    A token that is given as a negative number is the newest of its row, and 0 without a row.
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
    """Add to each row's lengths what its chunk stored: its kept tokens, or all where dense.

    A row has one chunk at most. `route_of_layer` is a layer's row of `firsts`, -1 where dense.
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
