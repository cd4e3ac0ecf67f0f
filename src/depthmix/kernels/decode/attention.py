"""Attention for `step`: one token of one sequence over its pages, divided among programs.

Owns how heads and contexts are split. Knows nothing of blocks and their order.
"""

from typing import NamedTuple

import triton.language as tl

from depthmix.kernels.compiling import jit
from depthmix.kernels.decode.stages import halve, unpack


class Heads(NamedTuple):
    """The shape of attention and of its pages."""

    num_heads: int
    num_kv_heads: int
    width: int
    page_size: int
    chunk: int
    """Tokens read at a time, a power of two."""
    max_splits: int
    """Most parts of the context that are processed in parallel, a power of two."""
    num_programs: int
    group: int
    """Query heads per key/value head."""
    pack: int
    """As `stages.Cut.pack`, for the pages."""


@jit
def _turn(head, phase, norm, layer, eps, width: tl.constexpr):
    """Load the head at this pointer, normalise it if the model does, and rotate it."""
    half: tl.constexpr = width // 2
    lane = tl.arange(0, width)
    # the other element of each pair (x_i, x_{i + H/2}), see `reference.rotate_heads`
    other = lane ^ half
    here = tl.load(head + lane, cache_modifier=".cg")
    there = tl.load(head + other, cache_modifier=".cg")
    if norm is not None:
        scale = tl.rsqrt(tl.sum(here * here) / width + eps)
        norm += layer * width
        here *= scale * tl.load(norm + lane).to(tl.float32)
        there *= scale * tl.load(norm + other).to(tl.float32)
    cos = tl.load(phase + lane % half)
    sin = tl.load(phase + half + lane % half)
    return here * cos + there * tl.where(lane < half, -sin, sin)


@jit
def _split_context(num_tokens, heads: tl.constexpr):
    """Return the number of parts of the context, none of them empty, and the tokens of each."""
    # a multiple of eight tokens, or of the chunk if that is smaller
    unit = 8 if heads.chunk > 8 else heads.chunk
    span = tl.cdiv(tl.cdiv(num_tokens, heads.max_splits), unit) * unit
    return tl.cdiv(num_tokens, span), span


@jit
def _find_pages(table, start, end, heads: tl.constexpr):
    """Load the pages of the chunk of tokens from `start` on, up to `end`."""
    token_S = start + tl.arange(0, heads.chunk)
    return tl.load(table + token_S // heads.page_size, mask=token_S < end, other=0)


@jit
def _find_slot(page, token, head, heads: tl.constexpr):
    """Offset of a token's key and value for a head, in units of heads."""
    first = (page.to(tl.int64) * heads.num_kv_heads + head) * heads.page_size
    return first + token % heads.page_size


@jit
def _load_chunk(key_pages, value_pages, page_S, start, end, head, heads: tl.constexpr):
    """Load a head's stored keys and values for the chunk of tokens from `start` up to `end`."""
    token_S = start + tl.arange(0, heads.chunk)
    stored_S = token_S < end
    slot_S = _find_slot(page_S, token_S, head, heads)
    size: tl.constexpr = heads.width // heads.pack
    place_SH = slot_S[:, None] * size + tl.arange(0, size)[None, :]
    if heads.pack == 2:
        key_pages = key_pages.to(tl.pointer_type(tl.int32))
        value_pages = value_pages.to(tl.pointer_type(tl.int32))
    key_SH = tl.load(key_pages + place_SH, mask=stored_S[:, None], other=0)
    return key_SH, tl.load(value_pages + place_SH, mask=stored_S[:, None], other=0)


@jit
def load_nothing(pages, heads: tl.constexpr):
    """A placeholder for a chunk of keys or values that is not loaded yet."""
    chunk: tl.constexpr = heads.chunk
    size: tl.constexpr = heads.width // heads.pack
    if heads.pack == 2:
        nothing = tl.zeros((chunk, size), dtype=tl.int32)
    else:
        nothing = tl.zeros((chunk, size), dtype=pages.dtype.element_ty)
    return nothing


@jit
def find_context(table, length, wanted, heads: tl.constexpr):
    """Find this program's first work item, if `wanted`: its pages, tokens and head."""
    num_splits, span = _split_context(length + 1, heads)
    program = tl.program_id(0)
    head = tl.minimum(program // num_splits, heads.num_heads - 1) // heads.group
    start = program % num_splits * span
    end = tl.minimum(start + span, tl.where(wanted, length, 0))
    return _find_pages(table, start, end, heads), start, end, head


@jit
def load_context(key_pages, value_pages, context, heads: tl.constexpr):
    """Load the keys and values located by `find_context`."""
    page_S, start, end, head = context
    return _load_chunk(key_pages, value_pages, page_S, start, end, head, heads)


@jit
def attend(
    key_SH,
    value_SH,
    qkv,
    phase,
    norm_query,
    norm_key,
    layer,
    eps,
    key_pages,
    value_pages,
    table,
    length,
    mixed,
    part_top,
    part_sum,
    part_out,
    arrivals,
    heads: tl.constexpr,
):
    """Store the token's key and value, and mix the values of all tokens up to it.

    A work item is a query head and a part of the context; `key_SH` and `value_SH` are the first
    chunk of this program's first item. The program that finishes a head's last part combines them.
    Heads that share keys and values read them from the L2 cache, except for the first such head.
    """
    chunk: tl.constexpr = heads.chunk
    width: tl.constexpr = heads.width
    pack: tl.constexpr = heads.pack
    lane = tl.arange(0, width)
    num_tokens = length + 1
    num_splits, span = _split_context(num_tokens, heads)
    for item in range(tl.program_id(0), heads.num_heads * num_splits, heads.num_programs):
        query = item // num_splits
        head = query // heads.group
        split = item % num_splits
        query_H = _turn(qkv + query * width, phase, norm_query, layer, eps, width) * width**-0.5
        new_key = qkv + (heads.num_heads + head) * width
        new_key_H = _turn(new_key, phase, norm_key, layer, eps, width)
        new_value = new_key + heads.num_kv_heads * width
        new_value_H = tl.load(new_value + lane, cache_modifier=".cg")
        query_low, query_high = halve(query_H, width, pack)
        new_low, new_high = halve(new_value_H, width, pack)

        # Each place in a chunk keeps its own softmax, so that threads synchronize only at the end.
        # The first place starts with the newest token, whose page is still being written; the
        # others start from a maximum below any score, but finite: -inf would give NaN without
        # tokens.
        last = split == num_splits - 1
        newest_S = (tl.arange(0, chunk) == 0) & last
        top_S = tl.where(newest_S, tl.sum(query_H * new_key_H), -1e30)
        sum_S = tl.where(newest_S, 1.0, 0.0)
        out_low_SH = tl.where(newest_S[:, None], new_low[None, :], 0.0)
        out_high_SH = tl.where(newest_S[:, None], new_high[None, :], 0.0)
        end = tl.minimum(split * span + span, length)
        if item != tl.program_id(0):
            page_S = _find_pages(table, split * span, end, heads)
            key_SH, value_SH = _load_chunk(
                key_pages, value_pages, page_S, split * span, end, head, heads
            )
        for start in range(split * span, end, chunk):
            next_page_S = _find_pages(table, start + chunk, end, heads)
            token_S = start + tl.arange(0, chunk)
            low_SH, high_SH = unpack(key_SH, key_pages, pack)
            product_SH = query_low[None, :] * low_SH
            if pack == 2:
                product_SH += query_high[None, :] * high_SH
            score_S = tl.where(token_S < end, tl.sum(product_SH, axis=1), float("-inf"))
            new_top_S = tl.maximum(top_S, score_S)
            weight_S = tl.exp(score_S - new_top_S)
            fade_S = tl.exp(top_S - new_top_S)
            sum_S = sum_S * fade_S + weight_S
            low_SH, high_SH = unpack(value_SH, value_pages, pack)
            out_low_SH = out_low_SH * fade_S[:, None] + weight_S[:, None] * low_SH
            if pack == 2:
                out_high_SH = out_high_SH * fade_S[:, None] + weight_S[:, None] * high_SH
            top_S = new_top_S
            # into the same registers, see `stages._sum_rows`
            tl.debug_barrier()
            key_SH, value_SH = _load_chunk(
                key_pages, value_pages, next_page_S, start + chunk, end, head, heads
            )
        top = tl.max(top_S, axis=0)
        share_S = tl.exp(top_S - top)
        total = tl.sum(sum_S * share_S, axis=0)
        out_H = tl.sum(out_low_SH * share_S[:, None], axis=0)
        if pack == 2:
            high_H = tl.sum(out_high_SH * share_S[:, None], axis=0)
            out_H = tl.reshape(tl.join(out_H, high_H), (width,))

        if last & (query % heads.group == 0):
            page = tl.load(table + length // heads.page_size)
            place_H = _find_slot(page, length, head, heads) * width + lane
            tl.store(key_pages + place_H, new_key_H.to(key_pages.dtype.element_ty))
            tl.store(value_pages + place_H, new_value_H.to(value_pages.dtype.element_ty))

        if num_splits == 1:
            tl.store(mixed + query * width + lane, out_H / total)
        else:
            part = query * heads.max_splits + split
            tl.store(part_top + part, top)
            tl.store(part_sum + part, total)
            tl.store(part_out + part * width + lane, out_H)
            tl.debug_barrier()
            if tl.atomic_add(arrivals + query, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.debug_barrier()
                _join_parts(query, num_splits, mixed, part_top, part_sum, part_out, heads)
                # this head is not counted again before the next block
                tl.store(arrivals + query, 0)


@jit
def _join_parts(query, num_splits, mixed, part_top, part_sum, part_out, heads: tl.constexpr):
    """Combine one query head's attention over the parts of the context."""
    split = tl.arange(0, heads.max_splits)
    lane = tl.arange(0, heads.width)
    there = split < num_splits
    part = query * heads.max_splits + split
    place = part[:, None] * heads.width + lane[None, :]
    top = tl.load(part_top + part, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(part_sum + part, mask=there, other=0.0, cache_modifier=".cg")
    out = tl.load(part_out + place, mask=there[:, None], other=0.0, cache_modifier=".cg")
    weight = tl.exp(top - tl.max(top))
    whole = tl.sum(weight[:, None] * out, axis=0)
    tl.store(mixed + query * heads.width + lane, whole / tl.sum(weight * total))
