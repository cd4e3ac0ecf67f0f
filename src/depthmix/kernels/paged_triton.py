"""Triton versions of `paged`: small kernels that never synchronize with the host.

A row's context is split into parts that are read in parallel, because one program cannot read a
long context fast enough; the fewer the rows, the more parts.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from depthmix.kernels.compiling import INTERPRETED, jit, overlap

# enough programs to saturate an H200's memory: about eight per multiprocessor
PROGRAMS = 8 if INTERPRETED else 1024
MOST_PARTS = 32
BLOCK_TOKENS = 64
# For one query per key head: tokens per block, and pipeline stages (blocks present or in flight).
# Programs whose rows are not split read for long, and more stages gain 3 % of a step.
ALONE_PARTS, ALONE_WHOLE = (16, 2), (32, 3)
# heads over all places whose parts can be counted without allocating a larger tensor
LEAST_ARRIVALS = 16384


@jit
def _append(
    key,
    value,
    key_row,
    key_pages,
    value_pages,
    table,
    lengths,
    key_place,
    key_head,
    value_place,
    value_head,
    page_head,
    page_page,
    page_token,
    most_pages,
    num_heads,
    head_width: tl.constexpr,
    page_size: tl.constexpr,
    block_heads: tl.constexpr,
    block_width: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(key_row + place)
    if row >= 0:
        length = tl.load(lengths + row)
        page = tl.load(table + row * most_pages + length // page_size).to(tl.int64)
        head = tl.arange(0, block_heads)[:, None]
        column = tl.arange(0, block_width)[None, :]
        inside = (head < num_heads) & (column < head_width)
        to = head * page_head + page * page_page + (length % page_size) * page_token + column
        new = tl.load(key + place * key_place + head * key_head + column, mask=inside)
        tl.store(key_pages + to, new.to(key_pages.dtype.element_ty), mask=inside)
        new = tl.load(value + place * value_place + head * value_head + column, mask=inside)
        tl.store(value_pages + to, new.to(value_pages.dtype.element_ty), mask=inside)
        # no other program reads this row before the next kernel
        tl.store(lengths + row, length + 1)


@jit
def _find_part(lengths, row, part, num_parts, extra: tl.constexpr, block_tokens: tl.constexpr):
    """Return start and end of a part of a row's context, and the number of parts.

    Each part has the same number of whole blocks; the last may be shorter.
    """
    length = tl.load(lengths + row, mask=row >= 0, other=-extra) + extra
    each = tl.cdiv(tl.cdiv(length, block_tokens), num_parts) * block_tokens
    start = part * each
    return start, tl.minimum(start + each, length), tl.cdiv(length, tl.maximum(each, 1))


@jit
def _find_elements(page, slot, group, page_head, page_page, page_token, page_size, column):
    """Offsets of the elements of a head's keys, or values, for these tokens."""
    at = group * page_head + page * page_page + slot % page_size * page_token
    return at[:, None] + column[None, :]


@jit
def _add_parts(
    mixed,
    largest,
    total,
    out,
    item,
    num_parts,
    real_parts,
    head_width: tl.constexpr,
    block_parts: tl.constexpr,
    block_width: tl.constexpr,
):
    """Combine the parts of one head of one place."""
    part = tl.arange(0, block_parts)
    column = tl.arange(0, block_width)
    real = part < real_parts
    # written by other programs: bypass the L1 cache
    at = item * num_parts + part
    top = tl.load(largest + at, mask=real, other=float("-inf"), cache_modifier=".cg")
    weight = tl.load(total + at, mask=real, other=0.0, cache_modifier=".cg")
    sums = tl.load(
        mixed + at[:, None] * block_width + column[None, :],
        mask=real[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    factor = tl.exp(top - tl.max(top, axis=0))
    whole = tl.sum(weight * factor, axis=0)
    result = tl.sum(sums * factor[:, None], axis=0) / whole
    to = out + item * head_width + column
    tl.store(to, result.to(out.dtype.element_ty), mask=column < head_width)


@jit(do_not_specialize=["query_row", "count", "lengths", "num_places", "num_parts"])
def _attend_alone(
    query,
    query_row,
    count,
    key_pages,
    value_pages,
    table,
    lengths,
    mixed,
    largest,
    total,
    arrivals,
    out,
    query_place,
    query_head,
    page_head,
    page_page,
    page_token,
    most_pages,
    num_places,
    num_groups,
    num_parts,
    scale,
    head_width: tl.constexpr,
    page_size: tl.constexpr,
    extra: tl.constexpr,
    clear_empty: tl.constexpr,
    block_parts: tl.constexpr,
    block_tokens: tl.constexpr,
    block_width: tl.constexpr,
    num_stages: tl.constexpr,
    overlaps: tl.constexpr,
):
    """One part of one row's context, with one query per key head.

    Every place in a block has its own softmax over its tokens, so only the products of query and
    key are summed across threads before the end. The last program to finish a head's parts sums
    them, always in the same order.
    """
    if overlaps:
        # the next kernel may be one that loads its weights meanwhile
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(1)
    part = tl.program_id(2)
    column = tl.arange(0, block_width)
    inside = column < head_width
    limit = num_places if count is None else tl.minimum(tl.load(count), num_places)
    for place in range(tl.program_id(0), limit, tl.num_programs(0)):
        row = tl.load(query_row + place).to(tl.int64)
        start, stop, real_parts = _find_part(lengths, row, part, num_parts, extra, block_tokens)
        item = tl.cast(place, tl.int64) * num_groups + group
        if start < stop:
            pages = table + row * most_pages
            q = query + tl.cast(place, tl.int64) * query_place + group * query_head + column
            q = tl.load(q, mask=inside, other=0.0).to(tl.float32) * scale
            top = tl.full((block_tokens,), float("-inf"), tl.float32)
            weight = tl.zeros((block_tokens,), tl.float32)
            sums = tl.zeros((block_tokens, block_width), tl.float32)
            # explicit stages: without a matrix product, Triton does not pipeline loads by itself
            for first in tl.range(start, stop, block_tokens, num_stages=num_stages):
                slot = first + tl.arange(0, block_tokens)
                real = slot < stop
                page = tl.load(pages + slot // page_size, mask=real, other=0).to(tl.int64)
                at = _find_elements(
                    page, slot, group, page_head, page_page, page_token, page_size, column
                )
                mask = real[:, None] & inside[None, :]
                k = tl.load(key_pages + at, mask=mask, other=0.0)
                v = tl.load(value_pages + at, mask=mask, other=0.0)
                score = tl.sum(k.to(tl.float32) * q[None, :], axis=1)
                score = tl.where(real, score, float("-inf"))
                # kept finite, since a place that has seen no token would give inf - inf
                new_top = tl.maximum(tl.maximum(top, score), -1e30)
                share = tl.exp(score - new_top)
                shrink = tl.exp(top - new_top)
                sums = sums * shrink[:, None] + share[:, None] * v.to(tl.float32)
                weight = weight * shrink + share
                top = new_top
            best = tl.max(top, axis=0)
            factor = tl.exp(top - best)
            whole = tl.sum(weight * factor, axis=0)
            result = tl.sum(sums * factor[:, None], axis=0)
            if real_parts == 1:
                to = out + item * head_width + column
                tl.store(to, (result / whole).to(out.dtype.element_ty), mask=inside)
            else:
                own = item * num_parts + part
                tl.store(largest + own, best)
                tl.store(total + own, whole)
                tl.store(mixed + own * block_width + column, result)
                # all threads must have stored before the arrival is counted
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals + item, 1, sem="acq_rel", scope="gpu")
                if arrived == real_parts - 1:
                    tl.debug_barrier()
                    # reset for the next launch
                    tl.store(arrivals + item, 0)
                    _add_parts(
                        mixed,
                        largest,
                        total,
                        out,
                        item,
                        num_parts,
                        real_parts,
                        head_width,
                        block_parts,
                        block_width,
                    )
        elif clear_empty and real_parts == 0 and part == 0:
            nothing = tl.zeros((block_width,), out.dtype.element_ty)
            tl.store(out + item * head_width + column, nothing, mask=inside)


@jit(do_not_specialize=["query_row", "count", "lengths", "num_places", "num_parts"])
def _attend_grouped(
    query,
    query_row,
    count,
    key_pages,
    value_pages,
    table,
    lengths,
    mixed,
    largest,
    total,
    arrivals,
    out,
    query_place,
    query_head,
    page_head,
    page_page,
    page_token,
    most_pages,
    num_places,
    num_groups,
    num_parts,
    scale,
    head_width: tl.constexpr,
    page_size: tl.constexpr,
    extra: tl.constexpr,
    clear_empty: tl.constexpr,
    block_parts: tl.constexpr,
    block_tokens: tl.constexpr,
    block_width: tl.constexpr,
    heads_each: tl.constexpr,
    block_heads: tl.constexpr,
    overlaps: tl.constexpr,
):
    """The same for several queries that share a key head, by matrix products."""
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(1)
    part = tl.program_id(2)
    head = tl.arange(0, block_heads)
    here = head < heads_each
    column = tl.arange(0, block_width)
    inside = column < head_width
    limit = num_places if count is None else tl.minimum(tl.load(count), num_places)
    for place in range(tl.program_id(0), limit, tl.num_programs(0)):
        row = tl.load(query_row + place).to(tl.int64)
        start, stop, real_parts = _find_part(lengths, row, part, num_parts, extra, block_tokens)
        item = (tl.cast(place, tl.int64) * num_groups + group) * heads_each
        to = out + (item + head)[:, None] * head_width + column[None, :]
        mask_out = here[:, None] & inside[None, :]
        if start < stop:
            pages = table + row * most_pages
            own_query = query + tl.cast(place, tl.int64) * query_place + column[None, :]
            own_query += (group * heads_each + head)[:, None] * query_head
            q = tl.load(own_query, mask=mask_out, other=0.0)
            top = tl.full((block_heads,), float("-inf"), tl.float32)
            weight = tl.zeros((block_heads,), tl.float32)
            sums = tl.zeros((block_heads, block_width), tl.float32)
            for first in range(start, stop, block_tokens):
                slot = first + tl.arange(0, block_tokens)
                real = slot < stop
                page = tl.load(pages + slot // page_size, mask=real, other=0).to(tl.int64)
                at = _find_elements(
                    page, slot, group, page_head, page_page, page_token, page_size, column
                )
                mask = real[:, None] & inside[None, :]
                k = tl.load(key_pages + at, mask=mask, other=0.0)
                v = tl.load(value_pages + at, mask=mask, other=0.0)
                score = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee") * scale
                score = tl.where(real[None, :], score, float("-inf"))
                new_top = tl.maximum(top, tl.max(score, axis=1))
                share = tl.exp(score - new_top[:, None])
                shrink = tl.exp(top - new_top)
                added = tl.dot(share.to(v.dtype), v, input_precision="ieee")
                sums = sums * shrink[:, None] + added
                weight = weight * shrink + tl.sum(share, axis=1)
                top = new_top
            if real_parts == 1:
                result = (sums / weight[:, None]).to(out.dtype.element_ty)
                tl.store(to, result, mask=mask_out)
            else:
                own = (item + head) * num_parts + part
                tl.store(largest + own, top, mask=here)
                tl.store(total + own, weight, mask=here)
                at_own = own[:, None] * block_width + column[None, :]
                tl.store(mixed + at_own, sums, mask=here[:, None])
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals + item, 1, sem="acq_rel", scope="gpu")
                if arrived == real_parts - 1:
                    tl.debug_barrier()
                    tl.store(arrivals + item, 0)
                    for number in range(heads_each):
                        _add_parts(
                            mixed,
                            largest,
                            total,
                            out,
                            item + number,
                            num_parts,
                            real_parts,
                            head_width,
                            block_parts,
                            block_width,
                        )
        elif clear_empty and real_parts == 0 and part == 0:
            nothing = tl.zeros((block_heads, block_width), out.dtype.element_ty)
            tl.store(to, nothing, mask=mask_out)


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_row: Tensor,
    key_row: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    busy: int | None = None,
) -> Tensor:
    """See `paged.attend_pages`; `busy` is how many places have a query most of the time."""
    num_keys, num_groups, head_width = key.shape
    assert key_pages.stride() == value_pages.stride()
    assert key_pages.stride(3) == key.stride(2) == value.stride(2) == 1
    _append[(num_keys,)](
        key,
        value,
        key_row,
        key_pages,
        value_pages,
        table,
        lengths,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_pages.stride()[:3],
        table.shape[1],
        num_groups,
        head_width,
        page_size=key_pages.shape[2],
        block_heads=triton.next_power_of_2(num_groups),
        block_width=triton.next_power_of_2(head_width),
    )
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    attend_rows(query, query_row, key_pages, value_pages, table, lengths, out, busy=busy)
    return out


def attend_rows(
    query: Tensor,
    query_row: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    count: Tensor | None = None,
    extra: int = 0,
    clear_empty: bool = True,
    busy: int | None = None,
) -> None:
    """The attention of `attend_pages` alone, over `lengths` + `extra` tokens of each query's row.

    Empty places of `out` are zeroed with `clear_empty`, and left unchanged without. `count`, read
    on the device, limits the number of places; None means all of them. Parts count their arrivals
    in a tensor shared by all calls on a device: these must not run concurrently, and the first one
    must not be captured.
    """
    num_places, num_heads, head_width = query.shape
    num_groups, page_size, most_pages = key_pages.shape[0], key_pages.shape[2], table.shape[1]
    heads_each = num_heads // num_groups
    assert key_pages.stride() == value_pages.stride()
    assert key_pages.stride(3) == query.stride(2) == 1
    assert out.is_contiguous()
    # a matrix product needs at least 16 columns
    block_width = max(16, triton.next_power_of_2(head_width))
    num_busy = num_places if busy is None else min(busy, num_places)
    num_parts = min(MOST_PARTS, max(1, PROGRAMS // (num_busy * num_groups)))
    parts = (num_places, num_heads, num_parts if num_parts > 1 else 0)
    mixed = torch.empty((*parts, block_width), device=query.device, dtype=torch.float32)
    largest, total = (torch.empty(parts, device=query.device) for _ in range(2))
    size = max(LEAST_ARRIVALS, triton.next_power_of_2(num_places * num_heads))
    arguments = (
        query,
        query_row,
        count,
        key_pages,
        value_pages,
        table,
        lengths,
        mixed,
        largest,
        total,
        _find_arrivals(query.device, size),
        out,
        *query.stride()[:2],
        *key_pages.stride()[:3],
        most_pages,
        num_places,
        num_groups,
        num_parts,
        head_width**-0.5,
        head_width,
        page_size,
        extra,
        clear_empty,
        MOST_PARTS,
    )
    grid = (num_busy, num_groups, num_parts)
    if heads_each == 1:
        block_tokens, num_stages = ALONE_WHOLE if num_parts == 1 else ALONE_PARTS
        sizes = (block_tokens, block_width, num_stages)
        _attend_alone[grid](*arguments, *sizes, num_warps=4, **overlap(query.device))
    else:
        # a matrix product needs at least 16 rows
        block_heads = max(16, triton.next_power_of_2(heads_each))
        sizes = (BLOCK_TOKENS, block_width, heads_each, block_heads)
        _attend_grouped[grid](*arguments, *sizes, num_warps=4, **overlap(query.device))


@functools.cache
def _find_arrivals(device: torch.device, size: int) -> Tensor:
    """Return a shared tensor of zeros, which every launch resets after use."""
    return torch.zeros(size, device=device, dtype=torch.int32)
