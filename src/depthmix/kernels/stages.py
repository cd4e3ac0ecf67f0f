"""The stages of `decode`: products that many programs share, and attention over pages.

Each stage reads what others wrote before a barrier and writes what others read after the next one.
Owns how work is cut up between the programs. Knows nothing of blocks and of their order.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

# the router's and the predictor's own norm
ROUTER_EPS = tl.constexpr(1e-6)
# neighbours in a row that one thread sums by itself: 16 bytes of bf16
GROUP = tl.constexpr(8)
# elements that one lane asks for ahead of time
AHEAD_GROUP = tl.constexpr(128)


class Cut(NamedTuple):
    """How the programs cut up a matrix; all is stored, since Triton drops properties."""

    num_rows: int
    """Rows that are shared out; of two partners, the first one counts."""
    width: int
    """Length of a row."""
    rows: int
    """Rows of a tile, a power of two."""
    columns: int
    """Columns of a tile, a power of two and at least 16."""
    partner: int
    """Distance to the row that is summed beside a row, as SwiGLU's gate and up rows are; or 0."""
    num_programs: int
    """Programs that share the rows."""
    step: int
    """Rows of a tile, partners not counted."""
    padded: int
    """Columns of all tiles of a row."""


class Heads(NamedTuple):
    """The shape of attention and of its pages."""

    num_heads: int
    num_kv_heads: int
    width: int
    page_size: int
    chunk: int
    """Tokens that are attended to at a time, a power of two."""
    max_splits: int
    """Parts of the context that may be attended to side by side, a power of two."""
    num_programs: int
    group: int
    """Query heads of a key/value head."""
    members: int
    """The same, up to a power of two."""


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` of the function itself: a type checker's wrapper hides the names it uses."""
    return triton.jit(inspect.unwrap(function))


@jit
def arrive(counter):
    """Tell the others that this program's part of a stage is written."""
    # all threads have stored before the first one says so
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@jit
def wait(counter, target):
    """Go on when `target` arrivals were counted."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
        pass
    tl.debug_barrier()


@jit
def share_rows(cut: tl.constexpr):
    """First and end of this program's rows: contiguous, and as many as the others have."""
    program = tl.program_id(0)
    first = program * cut.num_rows // cut.num_programs
    return first, (program + 1) * cut.num_rows // cut.num_programs


@jit
def load_tile(weight, row, end, column, cut: tl.constexpr):
    """Rows from `row` on that come before `end`; where they have partners, half as many of each."""
    place = tl.arange(0, cut.rows)
    lane = column + tl.arange(0, cut.columns)
    inside = row + place % cut.step < end
    place = place % cut.step + place // cut.step * cut.partner
    mask = inside[:, None] & (lane < cut.width)[None, :]
    weight += tl.cast(row, tl.int64) * cut.width
    return tl.load(weight + place[:, None] * cut.width + lane[None, :], mask=mask, other=0.0)


@jit
def load_first_tile(weight, cut: tl.constexpr):
    first, end = share_rows(cut)
    return load_tile(weight, first, end, 0, cut)


@jit
def _sum_rows(tile, weight, row, end, x, x_more, norm, cut: tl.constexpr):
    """Products of a tile's rows with (x + x_more) · norm; x's sum of squares; the next tile.

    `tile` is the first one of these rows. The tile after it is under way while one is summed, and
    the last one that is asked for belongs to the rows that come next.
    """
    rows: tl.constexpr = cut.rows
    columns: tl.constexpr = cut.columns
    groups: tl.constexpr = columns // GROUP
    total = tl.zeros((rows, groups), dtype=tl.float32)
    square = tl.zeros((columns,), dtype=tl.float32)
    for column in range(0, cut.padded, columns):
        after = column + columns
        next_row = row + after // cut.padded * cut.step
        # said aloud, or the mask is taken for one of any shape, and elements are loaded one by one
        next_column = tl.multiple_of(after % cut.padded, columns)
        following = load_tile(weight, next_row, end, next_column, cut)
        lane = column + tl.arange(0, columns)
        inside = lane < cut.width
        # other programs wrote it: the first-level cache may hold what was there before
        vector = tl.load(x + lane, mask=inside, other=0.0, cache_modifier=".cg")
        if x_more is not None:
            vector += tl.load(x_more + lane, mask=inside, other=0.0, cache_modifier=".cg")
        square += vector * vector
        if norm is not None:
            vector *= tl.load(norm + lane, mask=inside, other=0.0).to(tl.float32)
        product = tile.to(tl.float32) * vector[None, :]
        # first inside each thread: a whole tile of sums would fill its registers
        total += tl.sum(tl.reshape(product, (rows, groups, GROUP)), axis=2)
        tile = following
    return tl.sum(total, axis=1), tl.sum(square), tile


@jit
def _prefetch(pointer, wanted, num_elements: tl.constexpr):
    """Bring `num_elements` from each wanted pointer into the second-level cache."""
    num_bytes: tl.constexpr = num_elements * pointer.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred wanted;
            setp.ne.s32 wanted, $2, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [pointer.to(tl.int64), wanted.to(tl.int32), tl.full(wanted.shape, num_bytes, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def prefetch_rows(weight, cut: tl.constexpr, ahead: tl.constexpr):
    """The first `ahead` elements of this program's rows of a matrix."""
    if ahead > 0:
        first, end = share_rows(cut)
        weight += tl.cast(first, tl.int64) * cut.width
        offset = tl.arange(0, ahead // AHEAD_GROUP) * AHEAD_GROUP
        wanted = offset + AHEAD_GROUP <= (end - first) * cut.width
        _prefetch(weight + offset, wanted, AHEAD_GROUP)
        if cut.partner > 0:
            _prefetch(weight + cut.partner * cut.width + offset, wanted, AHEAD_GROUP)


@jit
def prefetch_pages(key_pages, value_pages, table, length, heads: tl.constexpr, ahead: tl.constexpr):
    """The first keys and values that this program will attend to."""
    if ahead > 0:
        num_splits, span = _split_context(length + 1, heads)
        head = tl.program_id(0) // num_splits
        token = tl.program_id(0) % num_splits * span + tl.arange(0, heads.chunk)
        wanted = (head < heads.num_kv_heads) & (token < length)
        place = _find_slots(table, token, wanted, head, heads) * heads.width
        _prefetch(key_pages + place, wanted, heads.width)
        _prefetch(value_pages + place, wanted, heads.width)


@jit
def score_token(x, weight, width: tl.constexpr, block: tl.constexpr, normalize: tl.constexpr):
    """The router's score w·x, or w·x / rms(x)."""
    total = tl.zeros((block,), dtype=tl.float32)
    square = tl.zeros((block,), dtype=tl.float32)
    for column in range(0, width, block):
        lane = column + tl.arange(0, block)
        inside = lane < width
        vector = tl.load(x + lane, mask=inside, other=0.0, cache_modifier=".cg")
        total += vector * tl.load(weight + lane, mask=inside, other=0.0)
        square += vector * vector
    score = tl.sum(total)
    if normalize:
        score *= tl.rsqrt(tl.sum(square) / width + ROUTER_EPS)
    return score


@jit
def apply_gate(score, gate: tl.constexpr):
    """What multiplies a kept token's update."""
    if gate == "raw":
        weight = score
    elif gate == "sigmoid":
        weight = tl.sigmoid(score)
    elif gate == "tanh1":
        # 1 + tanh(r)
        weight = 2.0 * tl.sigmoid(2.0 * score)
    else:
        weight = score * 0.0 + 1.0
    return weight


@jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@jit
def project(tile, weight, x, norm, out, eps, cut: tl.constexpr):
    """This program's rows of weight · norm(x): queries, keys and values, or logits."""
    first, end = share_rows(cut)
    for row in range(first, end, cut.step):
        total, square, tile = _sum_rows(tile, weight, row, end, x, None, norm, cut)
        place = row + tl.arange(0, cut.step)
        tl.store(out + place, total * tl.rsqrt(square / cut.width + eps), mask=place < end)


@jit
def foresee(weight, x, out, cut: tl.constexpr):
    """This program's hidden units of the predictor: gelu(weight · x / rms(x))."""
    first, end = share_rows(cut)
    tile = load_tile(weight, first, end, 0, cut)
    for row in range(first, end, cut.step):
        total, square, tile = _sum_rows(tile, weight, row, end, x, None, None, cut)
        total = _gelu(total * tl.rsqrt(square / cut.width + ROUTER_EPS))
        place = row + tl.arange(0, cut.step)
        tl.store(out + place, total, mask=place < end)


@jit
def decide(foreseen, weight, bias, num_units: tl.constexpr, block: tl.constexpr):
    """1 where the predictor's logit is positive."""
    unit = tl.arange(0, block)
    inside = unit < num_units
    value = tl.load(foreseen + unit, mask=inside, other=0.0, cache_modifier=".cg")
    logit = tl.sum(value * tl.load(weight + unit, mask=inside, other=0.0).to(tl.float32))
    return (logit + tl.load(bias).to(tl.float32) > 0).to(tl.int32)


@jit
def mix_heads(tile, weight, mixed, update, cut: tl.constexpr):
    """This program's rows of the attention's update."""
    first, end = share_rows(cut)
    for row in range(first, end, cut.step):
        total, _, tile = _sum_rows(tile, weight, row, end, mixed, None, None, cut)
        place = row + tl.arange(0, cut.step)
        tl.store(update + place, total, mask=place < end)


@jit
def activate(tile, weight, x, update, norm, hidden, eps, cut: tl.constexpr):
    """This program's hidden units of the MLP: SwiGLU where rows have partners, else GELU."""
    step: tl.constexpr = cut.step
    first, end = share_rows(cut)
    for row in range(first, end, cut.step):
        total, square, tile = _sum_rows(tile, weight, row, end, x, update, norm, cut)
        total *= tl.rsqrt(square / cut.width + eps)
        if cut.partner > 0:
            gate, up = tl.split(tl.permute(tl.reshape(total, (2, step)), (1, 0)))
            active = gate * tl.sigmoid(gate) * up
        else:
            active = _gelu(total)
        place = row + tl.arange(0, cut.step)
        tl.store(hidden + place, active, mask=place < end)


@jit
def add_update(tile, weight, hidden, update, gate, x, cut: tl.constexpr):
    """x ← x + gate · (a + MLP) in this program's rows, which nobody else reads in this stage."""
    first, end = share_rows(cut)
    for row in range(first, end, cut.step):
        total, _, tile = _sum_rows(tile, weight, row, end, hidden, None, None, cut)
        place = row + tl.arange(0, cut.step)
        inside = place < end
        total += tl.load(update + place, mask=inside, other=0.0, cache_modifier=".cg")
        old = tl.load(x + place, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(x + place, old + gate * total, mask=inside)


@jit
def _turn(head, phase, norm, layer, eps, width: tl.constexpr):
    """The heads that begin at these pointers: normalised where the model does, and rotated."""
    half: tl.constexpr = width // 2
    lane = tl.arange(0, width)[None, :]
    # the other one of each pair (x_i, x_{i + H/2}), see `reference.rotate_heads`
    other = lane ^ half
    here = tl.load(head + lane, cache_modifier=".cg")
    there = tl.load(head + other, cache_modifier=".cg")
    if norm is not None:
        scale = tl.rsqrt(tl.sum(here * here, axis=1) / width + eps)[:, None]
        norm += layer * width
        here *= scale * tl.load(norm + lane).to(tl.float32)
        there *= scale * tl.load(norm + other).to(tl.float32)
    cos = tl.load(phase + lane % half)
    sin = tl.load(phase + half + lane % half)
    return here * cos + there * tl.where(lane < half, -sin, sin)


@jit
def _split_context(num_tokens, heads: tl.constexpr):
    """Number of parts of the context, none of them empty, and the tokens of each."""
    span = tl.cdiv(tl.cdiv(num_tokens, heads.max_splits), heads.chunk) * heads.chunk
    return tl.cdiv(num_tokens, span), span


@jit
def _find_slots(table, token, wanted, head, heads: tl.constexpr):
    """Where a head's keys and values of these tokens stand, counted in heads."""
    page = tl.load(table + token // heads.page_size, mask=wanted, other=0).to(tl.int64)
    return (page * heads.num_kv_heads + head) * heads.page_size + token % heads.page_size


@jit
def attend(
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

    A piece of work is a key/value head and a part of the context. Whoever finishes a head's last
    part joins them all.
    """
    members: tl.constexpr = heads.members
    width: tl.constexpr = heads.width
    member = tl.arange(0, members)
    lane = tl.arange(0, width)
    num_tokens = length + 1
    num_splits, span = _split_context(num_tokens, heads)
    for item in range(tl.program_id(0), heads.num_kv_heads * num_splits, heads.num_programs):
        head = item // num_splits
        split = item % num_splits
        # members that are not there repeat the last one, and are not stored
        query = head * heads.group + tl.minimum(member, heads.group - 1)
        query_MH = _turn(qkv + query[:, None] * width, phase, norm_query, layer, eps, width)
        query_MH *= width**-0.5
        new_key = qkv + (heads.num_heads + head) * width
        new_key_1H = _turn(new_key, phase, norm_key, layer, eps, width)
        new_value = new_key + heads.num_kv_heads * width
        new_value_1H = tl.load(new_value + lane, cache_modifier=".cg")[None, :]

        top_M = tl.full((members,), float("-inf"), dtype=tl.float32)
        sum_M = tl.zeros((members,), dtype=tl.float32)
        out_MH = tl.zeros((members, width), dtype=tl.float32)
        end = tl.minimum(split * span + span, num_tokens)
        for start in range(split * span, end, heads.chunk):
            token_S = start + tl.arange(0, heads.chunk)
            stored_S = token_S < length
            slot_S = _find_slots(table, token_S, stored_S, head, heads)
            place_SH = slot_S[:, None] * width + lane[None, :]
            stored_S1 = stored_S[:, None]
            key_SH = tl.load(key_pages + place_SH, mask=stored_S1, other=0.0).to(tl.float32)
            value_SH = tl.load(value_pages + place_SH, mask=stored_S1, other=0.0).to(tl.float32)
            # the newest is not read from its page, where somebody is writing it
            newest_S1 = (token_S == length)[:, None]
            key_SH = tl.where(newest_S1, new_key_1H, key_SH)
            value_SH = tl.where(newest_S1, new_value_1H, value_SH)
            score_MS = tl.sum(query_MH[:, None, :] * key_SH[None, :, :], axis=2)
            score_MS = tl.where((token_S < num_tokens)[None, :], score_MS, float("-inf"))
            # never -inf: a chunk has at least one token
            new_top_M = tl.maximum(top_M, tl.max(score_MS, axis=1))
            weight_MS = tl.exp(score_MS - new_top_M[:, None])
            fade_M = tl.exp(top_M - new_top_M)
            sum_M = sum_M * fade_M + tl.sum(weight_MS, axis=1)
            added_MH = tl.sum(weight_MS[:, :, None] * value_SH[None, :, :], axis=1)
            out_MH = out_MH * fade_M[:, None] + added_MH
            top_M = new_top_M

        if split == num_splits - 1:
            place_1H = _find_slots(table, length, True, head, heads) * width + lane[None, :]
            tl.store(key_pages + place_1H, new_key_1H.to(key_pages.dtype.element_ty))
            tl.store(value_pages + place_1H, new_value_1H.to(value_pages.dtype.element_ty))

        here_M = member < heads.group
        if num_splits == 1:
            place_MH = query[:, None] * width + lane[None, :]
            tl.store(mixed + place_MH, out_MH / sum_M[:, None], mask=here_M[:, None])
        else:
            part_M = query * heads.max_splits + split
            place_MH = part_M[:, None] * width + lane[None, :]
            tl.store(part_top + part_M, top_M, mask=here_M)
            tl.store(part_sum + part_M, sum_M, mask=here_M)
            tl.store(part_out + place_MH, out_MH, mask=here_M[:, None])
            tl.debug_barrier()
            if tl.atomic_add(arrivals + head, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.debug_barrier()
                for joined in range(head * heads.group, (head + 1) * heads.group):
                    _join_parts(joined, num_splits, mixed, part_top, part_sum, part_out, heads)
                # nobody counts this head before the next block
                tl.store(arrivals + head, 0)


@jit
def _join_parts(query, num_splits, mixed, part_top, part_sum, part_out, heads: tl.constexpr):
    """One query head's attention over the whole context from those over its parts."""
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
