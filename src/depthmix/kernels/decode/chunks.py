"""Keys and values of a packed step: rotated, stored in pages, and attended to.

A packed step concatenates tokens of several sequences, divided into chunks: a chunk has
consecutive tokens of one sequence. A block keeps some of them, which occupy places, in order.
Here each kept token's queries and keys are rotated, its keys and values are appended to its row,
and its queries attend to all of them up to its own. Which tokens are kept, and how many, is read
on the device, so that a launch can be captured and replayed. Owns how a chunk is divided into
blocks of queries. Knows nothing of models or of routing decisions, and does not change `lengths`:
they count what was stored before the step, until a later kernel adds the new tokens.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels import paged_triton
from depthmix.kernels.compiling import INTERPRETED, await_turn, jit, overlap
from depthmix.kernels.decode.plan import SHARED_BYTES, find_room, pick_size

# elements in one half of the heads that a program rotates: 8 per thread of 4 warps, which is one
# 16-byte load in bf16
BLOCK_ROTATED = 1024
# number of chunks that a program searches for its own, as compiled sizes
BLOCKS_CHUNKS = (32, 256)
# about one program per multiprocessor of an H200
PROGRAMS = 128


class ChunkTuning(NamedTuple):
    """How attention is divided; this affects results only by rounding."""

    block_m: int
    """Queries per program, a power of two, at least 16."""
    block_n: int
    """Keys per iteration, a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """At 3, keys and values are prefetched one block ahead and their page numbers two; at 5, two
    and four; 4 acts like 3. At 2, the loop waits for page numbers."""
    split: bool = False
    """Whether blocks of keys visible to all queries get their own loop. If not, one loop checks for
    each block whether to mask it: that has a single prologue and takes fewer registers."""


@jit(do_not_specialize=["count", "row", "position", "chunk", "first", "lengths"])
def _rotate_and_store(
    qkv,
    given,
    index,
    count,
    row,
    position,
    chunk,
    first,
    phase_table,
    norm_query,
    norm_key,
    bias,
    eps,
    key_pages,
    value_pages,
    table,
    lengths,
    qkv_place,
    page_head,
    page_page,
    most_pages,
    num_heads: tl.constexpr,
    num_groups: tl.constexpr,
    head_width: tl.constexpr,
    page_size: tl.constexpr,
    by_token: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Some heads of one place; a thread holds both elements of each rotated pair."""
    await_turn(overlaps)
    place = tl.program_id(0).to(tl.int64)
    # volatile, so that it is not loaded after the count; past the count it may be any token
    token = tl.load(index + place, volatile=True)
    if place >= tl.load(count):
        return
    home = tl.load(row + token).to(tl.int64)
    if home < 0:
        return
    half: tl.constexpr = head_width // 2
    num_turned: tl.constexpr = num_heads + num_groups
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    lane = tl.arange(0, block_half)
    here = lane < half
    inside = (head < num_turned + num_groups)[:, None] & here[None, :]
    at = head[:, None] * head_width + lane[None, :]
    qkv += place * qkv_place
    given += tl.where(by_token, token.to(tl.int64), place) * qkv_place
    low = tl.load(given + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(given + at + half, mask=inside, other=0.0).to(tl.float32)
    turn = phase_table + tl.load(position + token) * (2 * half) + lane
    cos = tl.load(turn, mask=here, other=0.0)[None, :]
    sin = tl.load(turn + half, mask=here, other=0.0)[None, :]
    # rounds wherever torch would round
    dtype = qkv.dtype.element_ty
    if bias is not None:
        low += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + at + half, mask=inside, other=0.0).to(tl.float32)
        low = low.to(dtype).to(tl.float32)
        high = high.to(dtype).to(tl.float32)
    is_query = (head < num_heads)[:, None]
    turned_low, turned_high = low, high
    if norm_query is not None:
        square = tl.sum(low * low + high * high, axis=1) / head_width
        invert = tl.rsqrt(square + eps)[:, None]
        of_query = tl.load(norm_query + lane, mask=here, other=0.0).to(tl.float32)[None, :]
        of_key = tl.load(norm_key + lane, mask=here, other=0.0).to(tl.float32)[None, :]
        turned_low = low * invert * tl.where(is_query, of_query, of_key)
        of_query = tl.load(norm_query + half + lane, mask=here, other=0.0).to(tl.float32)[None, :]
        of_key = tl.load(norm_key + half + lane, mask=here, other=0.0).to(tl.float32)[None, :]
        turned_high = high * invert * tl.where(is_query, of_query, of_key)
        turned_low = turned_low.to(dtype).to(tl.float32)
        turned_high = turned_high.to(dtype).to(tl.float32)
    # values are not rotated
    is_turned = (head < num_turned)[:, None]
    low = tl.where(is_turned, turned_low * cos - turned_high * sin, low)
    high = tl.where(is_turned, turned_high * cos + turned_low * sin, high)
    tl.store(qkv + at, low.to(dtype), mask=inside & is_query)
    tl.store(qkv + at + half, high.to(dtype), mask=inside & is_query)
    if (tl.program_id(1) + 1) * block_heads > num_heads:
        slot = tl.load(lengths + home) + place - tl.load(first + tl.load(chunk + token))
        page = tl.load(table + home * most_pages + slot // page_size).to(tl.int64)
        to = page * page_page + slot % page_size * head_width
        is_key = inside & is_turned & (head >= num_heads)[:, None]
        is_value = inside & (head >= num_turned)[:, None]
        new_low = low.to(key_pages.dtype.element_ty)
        new_high = high.to(key_pages.dtype.element_ty)
        group = (head - num_heads)[:, None].to(tl.int64)
        new = key_pages + to + group * page_head + lane[None, :]
        tl.store(new, new_low, mask=is_key)
        tl.store(new + half, new_high, mask=is_key)
        new = value_pages + to + (group - num_groups) * page_head + lane[None, :]
        tl.store(new, new_low, mask=is_value)
        tl.store(new + half, new_high, mask=is_value)


@jit
def _load_heads(pages, at, column, head_width: tl.constexpr, block_width: tl.constexpr):
    """Load a head's keys, or values, starting at `at`; columns past its width are zero."""
    where = pages + (at[:, None] + column[None, :])
    if head_width == block_width:
        loaded = tl.load(where)
    else:
        loaded = tl.load(where, mask=(column < head_width)[None, :], other=0.0)
    return loaded


@jit
def _multiply(a, b, sums):
    """a · b + sums."""
    if INTERPRETED:
        # the interpreter multiplies bf16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@jit
def _attend_slots(
    q,
    top,
    weight,
    sums,
    start,
    full,
    stop,
    last_seen,
    keys,
    values,
    pages,
    page_page,
    scale,
    kind: tl.constexpr,
    head_width: tl.constexpr,
    page_size: tl.constexpr,
    block_n: tl.constexpr,
    block_width: tl.constexpr,
):
    """Attend from a block of queries to slots start .. stop - 1; return the updated softmax state.

    `kind` is `seen` if every query sees whole blocks, `masked` if not, and `mixed` if the blocks
    before `full` are seen and the others masked.
    """
    column = tl.arange(0, block_width)
    for begin in range(start, stop, block_n):
        slot = begin + tl.arange(0, block_n)
        real = slot
        if kind != "seen":
            # slots past the last repeat it with zero weight, so loads need no mask
            real = tl.minimum(slot, stop - 1)
        page = tl.load(pages + real // page_size).to(tl.int64)
        at = page * page_page + real % page_size * head_width
        k = _load_heads(keys, at, column, head_width, block_width)
        score = _multiply(q, tl.trans(k), None)
        if kind == "masked" or (kind == "mixed" and begin >= full):
            score = tl.where(slot[None, :] <= last_seen[:, None], score, float("-inf"))
        # never -inf: the first block has slot 0, which every query sees
        new_top = tl.maximum(top, tl.max(score, axis=1) * scale)
        share = tl.exp2(score * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        weight = weight * shrink + tl.sum(share, axis=1)
        sums = sums * shrink[:, None]
        v = _load_heads(values, at, column, head_width, block_width)
        sums = _multiply(share.to(v.dtype), v, sums)
        top = new_top
    return top, weight, sums


@jit(do_not_specialize=["first", "chunk_row", "lengths", "num_chunks"])
def _attend_chunks(
    qkv,
    out,
    first,
    chunk_row,
    lengths,
    key_pages,
    value_pages,
    table,
    qkv_place,
    out_place,
    page_head,
    page_page,
    most_pages,
    num_chunks,
    scale,
    heads_each: tl.constexpr,
    head_width: tl.constexpr,
    page_size: tl.constexpr,
    block_chunks: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_width: tl.constexpr,
    split: tl.constexpr,
    overlaps: tl.constexpr,
):
    """One head of a block of queries of one chunk; `scale` is for base-2 exponentials."""
    await_turn(overlaps)
    head = tl.program_id(0)
    chunk = tl.arange(0, block_chunks)
    there = chunk < num_chunks
    starts = tl.load(first + chunk, mask=there, other=0)
    sizes = tl.load(first + chunk + 1, mask=there, other=0) - starts
    rows = tl.load(chunk_row + chunk, mask=there, other=-1)
    blocks = tl.where(rows >= 0, (sizes + block_m - 1) // block_m, 0)
    # start with the last block: it sees the most keys of its chunk, and long work starts early
    block = -1 - tl.program_id(1) + tl.sum(blocks, axis=0)
    if block < 0:
        return
    is_before = tl.cumsum(blocks, axis=0) <= block
    own = tl.sum(is_before.to(tl.int32), axis=0)
    begin = (block - tl.sum(tl.where(is_before, blocks, 0), axis=0)) * block_m
    place = tl.load(first + own)
    size = tl.load(first + own + 1) - place
    row = tl.load(chunk_row + own).to(tl.int64)
    length = tl.load(lengths + row)

    number = begin + tl.arange(0, block_m)
    column = tl.arange(0, block_width)
    inside = (number < size)[:, None] & (column < head_width)[None, :]
    place += begin
    line = tl.arange(0, block_m)[:, None]
    qkv += place.to(tl.int64) * qkv_place + head * head_width
    q = tl.load(qkv + line * qkv_place + column[None, :], mask=inside, other=0.0)
    q = q.to(key_pages.dtype.element_ty)
    group = (head // heads_each).to(tl.int64)
    keys = key_pages + group * page_head
    values = value_pages + group * page_head
    pages = table + row * most_pages

    top = tl.full((block_m,), float("-inf"), tl.float32)
    weight = tl.zeros((block_m,), tl.float32)
    sums = tl.zeros((block_m, block_width), tl.float32)
    last_seen = length + number
    # the first query of the block, and so every other, sees these blocks of keys in full
    full = (length + begin + 1) // block_n * block_n
    stop = length + tl.minimum(begin + block_m, size)
    if split:
        top, weight, sums = _attend_slots(
            q,
            top,
            weight,
            sums,
            0,
            full,
            full,
            last_seen,
            keys,
            values,
            pages,
            page_page,
            scale,
            "seen",
            head_width,
            page_size,
            block_n,
            block_width,
        )
    top, weight, sums = _attend_slots(
        q,
        top,
        weight,
        sums,
        full if split else 0,
        full,
        stop,
        last_seen,
        keys,
        values,
        pages,
        page_page,
        scale,
        "masked" if split else "mixed",
        head_width,
        page_size,
        block_n,
        block_width,
    )
    sums = sums / weight[:, None]
    out += place.to(tl.int64) * out_place + head * head_width
    to = out + line * out_place + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: Float[Tensor, "P width"],
    index: Int[Tensor, " places"],
    count: Int[Tensor, " 1"],
    row: Int[Tensor, " T"],
    position: Int[Tensor, " T"],
    chunk: Int[Tensor, " T"],
    first: Int[Tensor, " ends"],
    phase_table: Float[Tensor, "positions 2 half"],
    norm_query: Float[Tensor, " H"] | None,
    norm_key: Float[Tensor, " H"] | None,
    bias: Float[Tensor, " width"] | None,
    eps: float,
    key_pages: Float[Tensor, "G pages page H"],
    value_pages: Float[Tensor, "G pages page H"],
    table: Int[Tensor, "rows most"],
    lengths: Int[Tensor, " rows"],
    *,
    num_heads: int,
    given: Float[Tensor, "T width"] | None = None,
) -> None:
    """Rotate the queries of the first `count` places in `qkv`; store keys and values in pages.

    A place holds query heads, then key heads, then value heads; with `given`, they are read from
    there instead, indexed by token. `index` is the token of a place, `row` its cache row (-1: the
    token is skipped), `chunk` its chunk, and `first` the place of a chunk's first token: a key is
    stored at its row's `lengths` plus the distance of its place from that. First, if given, the
    bias is added to all heads, and the norms are applied to queries and keys.
    """
    num_places = qkv.shape[0]
    num_groups, head_width, page_size = key_pages.shape[0], key_pages.shape[3], key_pages.shape[2]
    num_all = num_heads + 2 * num_groups
    check_pages(qkv, key_pages, value_pages, num_heads)
    assert index.shape[0] >= num_places
    assert head_width % 2 == 0
    assert phase_table.shape[1:] == (2, head_width // 2)
    assert phase_table.is_contiguous()
    assert (norm_query is None) == (norm_key is None)
    if num_places == 0:
        return
    block_half = triton.next_power_of_2(head_width // 2)
    block_heads = min(max(1, BLOCK_ROTATED // block_half), triton.next_power_of_2(num_all))
    assert given is None or (given.stride() == qkv.stride() and given.dtype == qkv.dtype)
    _rotate_and_store[(num_places, triton.cdiv(num_all, block_heads))](
        qkv,
        qkv if given is None else given,
        index,
        count,
        row,
        position,
        chunk,
        first,
        phase_table,
        norm_query,
        norm_key,
        bias,
        eps,
        key_pages,
        value_pages,
        table,
        lengths,
        qkv.stride(0),
        key_pages.stride(0),
        key_pages.stride(1),
        table.shape[1],
        num_heads,
        num_groups,
        head_width,
        page_size,
        given is not None,
        block_heads,
        block_half,
        num_warps=4,
        **overlap(qkv.device),
    )


def attend_chunks(
    qkv: Float[Tensor, "P width"],
    out: Float[Tensor, "P mixed"],
    first: Int[Tensor, " ends"],
    chunk_row: Int[Tensor, " C"],
    lengths: Int[Tensor, " rows"],
    key_pages: Float[Tensor, "G pages page H"],
    value_pages: Float[Tensor, "G pages page H"],
    table: Int[Tensor, "rows most"],
    *,
    num_heads: int,
    first_chunk: int,
    max_places: int,
    expected: int | None = None,
    tuning: ChunkTuning | None = None,
) -> None:
    """Causal attention for the chunks from `first_chunk` on, after `rotate_and_store`.

    A chunk's queries occupy places `first[c]` up to `first[c + 1]`, and see what its row stored
    before the step, and the chunk's own tokens up to theirs. `out` is written in those places
    only. `max_places` is the most that these chunks can have together, `expected` the usual
    number; a chunk whose row is -1 has none.
    """
    num_chunks = chunk_row.shape[0] - first_chunk
    num_groups, head_width, page_size = key_pages.shape[0], key_pages.shape[3], key_pages.shape[2]
    check_pages(qkv, key_pages, value_pages, num_heads)
    assert first_chunk >= 0
    assert first.shape[0] == chunk_row.shape[0] + 1
    assert out.shape[1] == num_heads * head_width
    assert out.stride(1) == 1
    if num_chunks <= 0 or max_places == 0:
        return
    if tuning is None:
        num_places = max_places if expected is None else expected
        room = find_room(qkv.device)
        tuning = choose_tuning(key_pages.dtype, head_width, num_heads, num_places, room)
    # each chunk may have one partial block, but no block is empty
    num_blocks = min(triton.cdiv(max_places, tuning.block_m) + num_chunks, max_places)
    # heads vary fastest, so that long blocks start early in all of them
    _attend_chunks[(num_heads, num_blocks)](
        qkv,
        out,
        first[first_chunk:],
        chunk_row[first_chunk:],
        lengths,
        key_pages,
        value_pages,
        table,
        qkv.stride(0),
        out.stride(0),
        key_pages.stride(0),
        key_pages.stride(1),
        table.shape[1],
        num_chunks,
        head_width**-0.5 / math.log(2),
        num_heads // num_groups,
        head_width,
        page_size,
        pick_size(num_chunks, BLOCKS_CHUNKS),
        tuning.block_m,
        tuning.block_n,
        # a matrix product needs at least 16 columns
        max(16, triton.next_power_of_2(head_width)),
        tuning.split,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **overlap(qkv.device),
    )


def attend_tokens(
    qkv: Float[Tensor, "P width"],
    out: Float[Tensor, "P mixed"],
    place_row: Int[Tensor, " places"],
    lengths: Int[Tensor, " rows"],
    key_pages: Float[Tensor, "G pages page H"],
    value_pages: Float[Tensor, "G pages page H"],
    table: Int[Tensor, "rows most"],
    *,
    num_heads: int,
    busy: int | None,
    num_places: int,
    count: Int[Tensor, " 1"] | None = None,
) -> None:
    """Attention for the first `num_places` places, each alone in its row, after `rotate_and_store`.

    `place_row` is -1 for a place without such a query, where `out` is left unchanged, since the
    place may hold a chunk's query. `busy` is how many places usually have a query; with `count`,
    no place from `count` on has one.
    """
    head_width = key_pages.shape[3]
    check_pages(qkv, key_pages, value_pages, num_heads)
    assert place_row.shape[0] >= num_places
    if num_places == 0:
        return
    heads = qkv[:num_places].unflatten(1, (-1, head_width))
    paged_triton.attend_rows(
        heads[:, :num_heads],
        place_row,
        key_pages,
        value_pages,
        table,
        lengths,
        out[:num_places],
        count=count,
        extra=1,
        clear_empty=False,
        busy=None if busy is None else max(1, busy),
    )


def choose_tuning(
    dtype: torch.dtype, head_width: int, num_heads: int, num_places: int, room: int = SHARED_BYTES
) -> ChunkTuning:
    """Return the fastest tuning on an H200 for this many queries (benchmarks/chunks.py).

    `room` is the shared memory available to a program, in bytes.
    """
    narrow = dtype in (torch.bfloat16, torch.float16)
    # as large as keeps all multiprocessors busy: a block reads all keys, whatever its size
    block_m = 128 if narrow else 32
    # only two sizes, because each is compiled
    if num_places * num_heads < PROGRAMS * block_m:
        block_m = 64 if narrow else 16
    if not narrow:
        # multiplied in registers
        block_n, num_warps = 16 if head_width > 128 else 32, 8 if block_m == 32 else 4
        return ChunkTuning(block_m, block_n, num_warps, num_stages=2)
    num_warps = 8 if block_m == 128 else 4
    # more stages than blocks in shared memory: loading via the page table takes two iterations
    tunings = [ChunkTuning(block_m, 64, num_warps, 5), ChunkTuning(block_m, 64, num_warps, 3)]
    if block_m == 128:
        tunings.insert(0, ChunkTuning(block_m, 128, num_warps, 5))
    width = max(16, triton.next_power_of_2(head_width))

    def count_bytes(tuning: ChunkTuning) -> int:
        num_blocks = max(1, (tuning.num_stages + 1) // 2)
        return 2 * width * (block_m + (2 * num_blocks) * tuning.block_n) + 2048

    fits = [tuning for tuning in tunings if count_bytes(tuning) <= room]
    return fits[0] if fits else ChunkTuning(min(block_m, 64), 32, 4, 2)


def check_pages(qkv: Tensor, key_pages: Tensor, value_pages: Tensor, num_heads: int) -> None:
    num_groups, head_width = key_pages.shape[0], key_pages.shape[3]
    assert qkv.shape[1] == (num_heads + 2 * num_groups) * head_width
    assert num_heads % num_groups == 0
    assert qkv.stride(1) == 1
    assert key_pages.stride() == value_pages.stride()
    # a page's tokens are contiguous for each head
    assert key_pages.stride()[2:] == (head_width, 1)
