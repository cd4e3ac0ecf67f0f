"""The Triton versions of what `paged` does: small kernels that never ask the host.

A row's context is cut into parts that are read side by side, because one program cannot read a
long context fast enough; with few rows there are more parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.kernels.stages import jit

# programs that keep an H200 busy reading: about eight on each of its multiprocessors
PROGRAMS = 1024
MOST_PARTS = 32
BLOCK_TOKENS, BLOCK_TOKENS_ALONE = 64, 16
# blocks of keys and values that are here or under way
NUM_STAGES_ALONE = 2


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
        # nobody else looks at this row before the next kernel
        tl.store(lengths + row, length + 1)


@jit
def _store(
    key,
    value,
    valid,
    row,
    key_pages,
    value_pages,
    table,
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
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(valid + slot):
        page = tl.load(table + tl.load(row) * most_pages + slot // page_size).to(tl.int64)
        head = tl.arange(0, block_heads)[:, None]
        column = tl.arange(0, block_width)[None, :]
        inside = (head < num_heads) & (column < head_width)
        to = head * page_head + page * page_page + (slot % page_size) * page_token + column
        new = tl.load(key + slot * key_place + head * key_head + column, mask=inside)
        tl.store(key_pages + to, new.to(key_pages.dtype.element_ty), mask=inside)
        new = tl.load(value + slot * value_place + head * value_head + column, mask=inside)
        tl.store(value_pages + to, new.to(value_pages.dtype.element_ty), mask=inside)


@jit
def _find_part(length, part, num_parts: tl.constexpr, block_tokens: tl.constexpr):
    """First and end of a part of the context: whole blocks, as many as the others have."""
    each = tl.cdiv(tl.cdiv(length, block_tokens), num_parts) * block_tokens
    start = part * each
    return start, tl.minimum(start + each, length)


@jit
def _find_elements(page, slot, group, page_head, page_page, page_token, page_size, column):
    """Where the elements of a head's keys, or values, of these tokens stand."""
    at = group * page_head + page * page_page + slot % page_size * page_token
    return at[:, None] + column[None, :]


@jit
def _attend_alone(
    query,
    query_row,
    key_pages,
    value_pages,
    table,
    lengths,
    mixed,
    largest,
    total,
    query_place,
    query_head,
    page_head,
    page_page,
    page_token,
    most_pages,
    num_groups,
    head_width: tl.constexpr,
    scale,
    num_parts: tl.constexpr,
    page_size: tl.constexpr,
    block_tokens: tl.constexpr,
    block_width: tl.constexpr,
    num_stages: tl.constexpr,
):
    """One part of one row's context, for the one query of a key head.

    Every place in a block keeps a softmax of its own over the tokens that come to stand there, so
    that nothing is summed across threads before the end but the products of a query and a key.
    """
    place = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(query_row + place)
    to = (place * num_groups + group) * num_parts + part
    start = 0
    stop = 0
    if row >= 0:
        start, stop = _find_part(tl.load(lengths + row), part, num_parts, block_tokens)
    if start >= stop:
        # an empty place, or more parts than there are blocks: it weighs nothing
        tl.store(largest + to, float("-inf"))
        return
    column = tl.arange(0, block_width)
    inside = column < head_width
    pages = table + row * most_pages
    q = tl.load(query + place * query_place + group * query_head + column, mask=inside, other=0.0)
    q = q.to(tl.float32) * scale
    top = tl.full((block_tokens,), float("-inf"), tl.float32)
    weight = tl.zeros((block_tokens,), tl.float32)
    sums = tl.zeros((block_tokens, block_width), tl.float32)
    # said aloud: where there is no matrix product, Triton fetches ahead only when it is told to
    for first in tl.range(start, stop, block_tokens, num_stages=num_stages):
        slot = first + tl.arange(0, block_tokens)
        real = slot < stop
        page = tl.load(pages + slot // page_size, mask=real, other=0).to(tl.int64)
        at = _find_elements(page, slot, group, page_head, page_page, page_token, page_size, column)
        mask = real[:, None] & inside[None, :]
        k = tl.load(key_pages + at, mask=mask, other=0.0)
        v = tl.load(value_pages + at, mask=mask, other=0.0)
        score = tl.sum(k.to(tl.float32) * q[None, :], axis=1)
        score = tl.where(real, score, float("-inf"))
        # finite, or a place that has seen no token would be inf - inf
        new_top = tl.maximum(tl.maximum(top, score), -1e30)
        share = tl.exp(score - new_top)
        shrink = tl.exp(top - new_top)
        sums = sums * shrink[:, None] + share[:, None] * v.to(tl.float32)
        weight = weight * shrink + share
        top = new_top
    best = tl.max(top, axis=0)
    factor = tl.exp(top - best)
    tl.store(largest + to, best)
    tl.store(total + to, tl.sum(weight * factor, axis=0))
    tl.store(mixed + to * block_width + column, tl.sum(sums * factor[:, None], axis=0))


@jit
def _attend_grouped(
    query,
    query_row,
    key_pages,
    value_pages,
    table,
    lengths,
    mixed,
    largest,
    total,
    query_place,
    query_head,
    page_head,
    page_page,
    page_token,
    most_pages,
    num_groups,
    head_width: tl.constexpr,
    scale,
    num_parts: tl.constexpr,
    page_size: tl.constexpr,
    block_tokens: tl.constexpr,
    block_width: tl.constexpr,
    heads_each: tl.constexpr,
    block_heads: tl.constexpr,
):
    """The same for the several queries that share a key head: a matrix product."""
    place = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(query_row + place)
    head = tl.arange(0, block_heads)
    column = tl.arange(0, block_width)
    to = ((place * num_groups + group) * heads_each + head) * num_parts + part
    here = head < heads_each
    start = 0
    stop = 0
    if row >= 0:
        start, stop = _find_part(tl.load(lengths + row), part, num_parts, block_tokens)
    if start >= stop:
        tl.store(largest + to, tl.full((block_heads,), float("-inf"), tl.float32), mask=here)
        return
    inside = column < head_width
    pages = table + row * most_pages
    q = tl.load(
        query
        + place * query_place
        + (group * heads_each + head)[:, None] * query_head
        + column[None, :],
        mask=here[:, None] & inside[None, :],
        other=0.0,
    )
    top = tl.full((block_heads,), float("-inf"), tl.float32)
    weight = tl.zeros((block_heads,), tl.float32)
    sums = tl.zeros((block_heads, block_width), tl.float32)
    for first in range(start, stop, block_tokens):
        slot = first + tl.arange(0, block_tokens)
        real = slot < stop
        page = tl.load(pages + slot // page_size, mask=real, other=0).to(tl.int64)
        at = _find_elements(page, slot, group, page_head, page_page, page_token, page_size, column)
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
    tl.store(largest + to, top, mask=here)
    tl.store(total + to, weight, mask=here)
    tl.store(mixed + to[:, None] * block_width + column[None, :], sums, mask=here[:, None])


@jit
def _combine(
    mixed,
    largest,
    total,
    out,
    head_width: tl.constexpr,
    num_parts: tl.constexpr,
    block_parts: tl.constexpr,
    block_width: tl.constexpr,
):
    """The parts of one head of one place; an empty place gives zeros."""
    item = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block_parts)
    column = tl.arange(0, block_width)
    top = tl.load(largest + item * num_parts + part, mask=part < num_parts, other=float("-inf"))
    real = top > float("-inf")
    best = tl.max(top, axis=0)
    factor = tl.where(real, tl.exp(top - tl.where(best > float("-inf"), best, 0.0)), 0.0)
    weight = tl.load(total + item * num_parts + part, mask=real, other=0.0)
    sums = tl.load(
        mixed + (item * num_parts + part)[:, None] * block_width + column[None, :],
        mask=real[:, None],
        other=0.0,
    )
    whole = tl.sum(weight * factor, axis=0)
    result = tl.sum(sums * factor[:, None], axis=0) / tl.where(whole > 0, whole, 1.0)
    tl.store(
        out + item * head_width + column,
        result.to(out.dtype.element_ty),
        mask=column < head_width,
    )


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
    """See `paged.attend_pages`; `busy` is how many of the places have a query most of the time."""
    num_places, num_heads, head_width = query.shape
    num_keys, num_groups = key.shape[:2]
    heads_each = num_heads // num_groups
    assert key_pages.stride() == value_pages.stride()
    assert key_pages.stride(3) == query.stride(2) == key.stride(2) == value.stride(2) == 1
    page_strides = key_pages.stride()[:3]
    page_strides = (page_strides[0], page_strides[1], page_strides[2])
    # a matrix product takes no less than 16
    block_width = max(16, triton.next_power_of_2(head_width))
    page_size, most_pages = key_pages.shape[2], table.shape[1]
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
        *page_strides,
        most_pages,
        num_groups,
        head_width,
        page_size=page_size,
        block_heads=triton.next_power_of_2(num_groups),
        block_width=block_width,
    )
    num_busy = num_places if busy is None else busy
    num_parts = min(MOST_PARTS, max(1, PROGRAMS // (num_busy * num_groups)))
    parts = (num_places, num_heads, num_parts)
    mixed = torch.empty((*parts, block_width), device=query.device, dtype=torch.float32)
    largest, total = (torch.empty(parts, device=query.device) for _ in range(2))
    arguments = (
        query,
        query_row,
        key_pages,
        value_pages,
        table,
        lengths,
        mixed,
        largest,
        total,
        *query.stride()[:2],
        *page_strides,
        most_pages,
        num_groups,
        head_width,
        head_width**-0.5,
        num_parts,
        page_size,
    )
    grid = (num_places, num_groups, num_parts)
    if heads_each == 1:
        sizes = (BLOCK_TOKENS_ALONE, block_width, NUM_STAGES_ALONE)
        _attend_alone[grid](*arguments, *sizes, num_warps=4)
    else:
        # a matrix product takes no fewer than 16 rows
        block_heads = max(16, triton.next_power_of_2(heads_each))
        sizes = (BLOCK_TOKENS, block_width, heads_each, block_heads)
        _attend_grouped[grid](*arguments, *sizes, num_warps=4)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _combine[(num_places * num_heads,)](
        mixed,
        largest,
        total,
        out,
        head_width,
        num_parts=num_parts,
        block_parts=triton.next_power_of_2(num_parts),
        block_width=block_width,
        num_warps=2,
    )
    return out


def store_prompt(
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    row: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
) -> None:
    """See `paged.store_prompt`."""
    num_tokens, num_groups, head_width = key.shape
    assert key_pages.stride() == value_pages.stride()
    assert key_pages.stride(3) == key.stride(2) == value.stride(2) == 1
    _store[(num_tokens,)](
        key,
        value,
        valid,
        row,
        key_pages,
        value_pages,
        table,
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
