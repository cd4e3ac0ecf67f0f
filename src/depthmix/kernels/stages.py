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
# there programs come one after another, so nobody is to be waited for
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
    pack: int
    """Neighbours that are read as one int32: 2 of 16 bits, else 1."""


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
    if not INTERPRETED:
        # one thread looks, by reading: a poll by all threads, or by atomics, delays the arrivals
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred %others, %early;
                .reg .s32 %thread, %count;
                mov.u32 %thread, %tid.x;
                setp.ne.s32 %others, %thread, 0;
                @%others bra passed;
            look:
                ld.acquire.gpu.global.s32 %count, [$1];
                setp.lt.s32 %early, %count, $2;
                @%early bra look;
            passed:
                mov.s32 $0, 0;
            }
            """,
            "=r,l,r",
            [counter, target],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@jit
def share_rows(cut: tl.constexpr):
    """First and end of this program's rows: contiguous, and as many as the others have."""
    program = tl.program_id(0)
    first = program * cut.num_rows // cut.num_programs
    return first, (program + 1) * cut.num_rows // cut.num_programs


@jit
def load_tile(weight, row, end, column, cut: tl.constexpr):
    """Rows from `row` on that come before `end`; where they have partners, half as many of each.

    Numbers of 16 bits come packed: alone, they would be sorted anew into registers at the end of
    each turn of a loop, and that waits for what should be under way.
    """
    place = tl.arange(0, cut.rows)
    lane = column // cut.pack + tl.arange(0, cut.columns // cut.pack)
    inside = row + place % cut.step < end
    place = place % cut.step + place // cut.step * cut.partner
    mask = inside[:, None]
    if cut.padded != cut.width:
        mask = mask & (lane < cut.width // cut.pack)[None, :]
    weight += tl.cast(row, tl.int64) * cut.width
    if cut.width % 8 == 0:
        # rows of whole 16 bytes: said aloud, because it is not always found out
        weight = tl.multiple_of(weight, 16)
    if cut.pack == 2:
        weight = weight.to(tl.pointer_type(tl.int32))
    at = place[:, None] * (cut.width // cut.pack) + lane[None, :]
    return tl.load(weight + at, mask=mask, other=0)


@jit
def load_first_tile(weight, cut: tl.constexpr):
    first, end = share_rows(cut)
    return load_tile(weight, first, end, 0, cut)


@jit
def load_norm(norm, wanted, cut: tl.constexpr):
    """A norm's weights in the first tile's columns, where they are wanted."""
    lane = tl.arange(0, cut.columns)
    return tl.load(norm + lane, mask=lane < tl.where(wanted, cut.width, 0), other=0.0)


@jit
def _load_vector(x, x_more, column, cut: tl.constexpr):
    """x + x_more in a tile's columns."""
    lane = column + tl.arange(0, cut.columns)
    inside = lane < cut.width
    # other programs wrote it: the first-level cache may hold what was there before
    vector = tl.load(x + lane, mask=inside, other=0.0, cache_modifier=".cg")
    if x_more is not None:
        vector += tl.load(x_more + lane, mask=inside, other=0.0, cache_modifier=".cg")
    return vector


@jit
def load_stream(x, x_more, cut: tl.constexpr):
    """x + x_more in the first tile's columns, and the mean square of all of it.

    Read once for all that a stage makes of it: every reading waits for the second-level cache, and
    all programs together read megabytes.
    """
    columns: tl.constexpr = cut.columns
    first = _load_vector(x, x_more, 0, cut)
    square = first * first
    for column in range(columns, cut.padded, columns):
        vector = _load_vector(x, x_more, column, cut)
        square += vector * vector
    return first, tl.sum(square) / cut.width


@jit
def _sum_tile(tile, vector, weight, cut: tl.constexpr):
    """Products of a tile's rows with a vector."""
    rows: tl.constexpr = cut.rows
    groups: tl.constexpr = cut.columns // GROUP
    if cut.pack == 2:
        even, odd = tl.split(tl.reshape(vector, (cut.columns // 2, 2)))
        if weight.dtype.element_ty == tl.bfloat16:
            # a bf16 is the upper half of a float32
            low = (tile << 16).to(tl.float32, bitcast=True)
            high = (tile & -65536).to(tl.float32, bitcast=True)
        else:
            low = tile.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (tile >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        product = low * even[None, :] + high * odd[None, :]
    else:
        product = tile.to(tl.float32) * vector[None, :]
    # first inside each thread: a whole tile of products would fill its registers
    return tl.sum(tl.sum(tl.reshape(product, (rows, groups, GROUP // cut.pack)), axis=2), axis=1)


@jit
def _sum_rows(tile, vector, weight, row, end, x, x_more, norm, cut: tl.constexpr):
    """Products of a tile's rows with (x + x_more) · norm; the next tile and its vector.

    `tile` and `vector` are the first ones of these rows. The next tile is asked for into the
    registers of the last, as soon as that is summed: any other register would have to be copied,
    and a copy waits. Meanwhile the processor's other program sums. The last tile that is asked for
    belongs to the rows that come next.
    """
    rows: tl.constexpr = cut.rows
    columns: tl.constexpr = cut.columns
    total = tl.zeros((rows,), dtype=tl.float32)
    num_blocks: tl.constexpr = cut.padded // columns
    for block in range(num_blocks):
        total += _sum_tile(tile, vector, weight, cut)
        # no load moves up across this, and no sum across threads down
        tl.debug_barrier()
        next_row = row + (block + 1) // num_blocks * cut.step
        # visibly a multiple, or the mask is taken for one of any shape and nothing is vectorised
        next_column = (block + 1) % num_blocks * columns
        tile = load_tile(weight, next_row, end, next_column, cut)
        if num_blocks > 1:
            vector = _load_vector(x, x_more, next_column, cut)
            if norm is not None:
                lane = next_column + tl.arange(0, columns)
                vector *= tl.load(norm + lane, mask=lane < cut.width, other=0.0).to(tl.float32)
    return total, tile, vector


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
def project(tile, weight, x, stream, square, scale_D, norm, out, eps, cut: tl.constexpr):
    """This program's rows of weight · norm(x): queries, keys and values, or logits."""
    first, end = share_rows(cut)
    vector = stream * scale_D.to(tl.float32)
    scale = tl.rsqrt(square + eps)
    for row in range(first, end, cut.step):
        total, tile, vector = _sum_rows(tile, vector, weight, row, end, x, None, norm, cut)
        place = row + tl.arange(0, cut.step)
        tl.store(out + place, total * scale, mask=place < end)


@jit
def foresee(tile, weight, x, stream, square, out, cut: tl.constexpr):
    """This program's hidden units of the predictor: gelu(weight · x / rms(x))."""
    first, end = share_rows(cut)
    vector = stream
    scale = tl.rsqrt(square + ROUTER_EPS)
    for row in range(first, end, cut.step):
        total, tile, vector = _sum_rows(tile, vector, weight, row, end, x, None, None, cut)
        total = _gelu(total * scale)
        place = row + tl.arange(0, cut.step)
        tl.store(out + place, total, mask=place < end)


@jit
def load_decider(weight, bias, num_units: tl.constexpr, block: tl.constexpr):
    """What the predictor sums its hidden units with."""
    unit = tl.arange(0, block)
    weight_P = tl.load(weight + unit, mask=unit < num_units, other=0.0).to(tl.float32)
    return weight_P, tl.load(bias).to(tl.float32)


@jit
def decide(foreseen, weight_P, bias, num_units: tl.constexpr, block: tl.constexpr):
    """1 where the predictor's logit is positive."""
    unit = tl.arange(0, block)
    value = tl.load(foreseen + unit, mask=unit < num_units, other=0.0, cache_modifier=".cg")
    return (tl.sum(value * weight_P) + bias > 0).to(tl.int32)


@jit
def mix_heads(tile, weight, mixed, update, cut: tl.constexpr):
    """This program's rows of the attention's update."""
    first, end = share_rows(cut)
    vector = _load_vector(mixed, None, 0, cut)
    for row in range(first, end, cut.step):
        total, tile, vector = _sum_rows(tile, vector, weight, row, end, mixed, None, None, cut)
        place = row + tl.arange(0, cut.step)
        tl.store(update + place, total, mask=place < end)


@jit
def activate(tile, weight, x, update, scale_D, norm, hidden, eps, cut: tl.constexpr):
    """This program's hidden units of the MLP: SwiGLU where rows have partners, else GELU."""
    step: tl.constexpr = cut.step
    first, end = share_rows(cut)
    stream, square = load_stream(x, update, cut)
    vector = stream * scale_D.to(tl.float32)
    scale = tl.rsqrt(square + eps)
    for row in range(first, end, cut.step):
        total, tile, vector = _sum_rows(tile, vector, weight, row, end, x, update, norm, cut)
        total *= scale
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
    vector = _load_vector(hidden, None, 0, cut)
    for row in range(first, end, cut.step):
        total, tile, vector = _sum_rows(tile, vector, weight, row, end, hidden, None, None, cut)
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
    # whole quarters of a chunk
    unit = (heads.chunk + 3) // 4
    span = tl.cdiv(tl.cdiv(num_tokens, heads.max_splits), unit) * unit
    return tl.cdiv(num_tokens, span), span


@jit
def _find_slots(table, token, wanted, head, heads: tl.constexpr):
    """Where a head's keys and values of these tokens stand, counted in heads."""
    page = tl.load(table + token // heads.page_size, mask=wanted, other=0).to(tl.int64)
    return (page * heads.num_kv_heads + head) * heads.page_size + token % heads.page_size


@jit
def _load_chunk(key_pages, value_pages, table, start, end, head, heads: tl.constexpr):
    """A head's stored keys and values of the chunk of tokens from `start` on, up to `end`."""
    token_S = start + tl.arange(0, heads.chunk)
    stored_S = token_S < end
    slot_S = _find_slots(table, token_S, stored_S, head, heads)
    place_SH = slot_S[:, None] * heads.width + tl.arange(0, heads.width)[None, :]
    key_SH = tl.load(key_pages + place_SH, mask=stored_S[:, None], other=0.0)
    return key_SH, tl.load(value_pages + place_SH, mask=stored_S[:, None], other=0.0)


@jit
def load_nothing(pages, heads: tl.constexpr):
    """What stands in for a chunk of keys or values before there is one."""
    chunk: tl.constexpr = heads.chunk
    width: tl.constexpr = heads.width
    return tl.zeros((chunk, width), dtype=pages.dtype.element_ty)


@jit
def load_context(key_pages, value_pages, table, length, heads: tl.constexpr):
    """The first stored keys and values that this program will attend to."""
    num_splits, span = _split_context(length + 1, heads)
    program = tl.program_id(0)
    head = tl.minimum(program // num_splits, heads.num_heads - 1) // heads.group
    start = program % num_splits * span
    end = tl.minimum(start + span, length)
    return _load_chunk(key_pages, value_pages, table, start, end, head, heads)


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

    A piece of work is a query head and a part of the context; `key_SH` and `value_SH` are the first
    ones of this program's first piece. Whoever finishes a head's last part joins them all. Heads
    that share keys and values read them from the second-level cache, but for the first.
    """
    chunk: tl.constexpr = heads.chunk
    width: tl.constexpr = heads.width
    lane = tl.arange(0, width)
    num_tokens = length + 1
    num_splits, span = _split_context(num_tokens, heads)
    for item in range(tl.program_id(0), heads.num_heads * num_splits, heads.num_programs):
        query = item // num_splits
        head = query // heads.group
        split = item % num_splits
        query_1H = _turn(qkv + query * width, phase, norm_query, layer, eps, width) * width**-0.5
        new_key = qkv + (heads.num_heads + head) * width
        new_key_1H = _turn(new_key, phase, norm_key, layer, eps, width)
        new_value = new_key + heads.num_kv_heads * width
        new_value_1H = tl.load(new_value + lane, cache_modifier=".cg")[None, :]

        # each place in a chunk is a softmax of its own, so that threads meet only at the end; its
        # largest score begins below all others, but finite, or a place without a token would be nan
        top_S = tl.full((chunk,), -1e30, dtype=tl.float32)
        sum_S = tl.zeros((chunk,), dtype=tl.float32)
        out_SH = tl.zeros((chunk, width), dtype=tl.float32)
        end = tl.minimum(split * span + span, num_tokens)
        stored_end = tl.minimum(end, length)
        if item != tl.program_id(0):
            key_SH, value_SH = _load_chunk(
                key_pages, value_pages, table, split * span, stored_end, head, heads
            )
        for start in range(split * span, end, chunk):
            # the next ones are under way while these are looked at
            next_key_SH, next_value_SH = _load_chunk(
                key_pages, value_pages, table, start + chunk, stored_end, head, heads
            )
            token_S = start + tl.arange(0, chunk)
            # the newest is not read from its page, where somebody is writing it
            newest_S1 = (token_S == length)[:, None]
            wide_key_SH = tl.where(newest_S1, new_key_1H, key_SH.to(tl.float32))
            wide_value_SH = tl.where(newest_S1, new_value_1H, value_SH.to(tl.float32))
            score_S = tl.sum(query_1H * wide_key_SH, axis=1)
            score_S = tl.where(token_S < end, score_S, float("-inf"))
            new_top_S = tl.maximum(top_S, score_S)
            weight_S = tl.exp(score_S - new_top_S)
            fade_S = tl.exp(top_S - new_top_S)
            sum_S = sum_S * fade_S + weight_S
            out_SH = out_SH * fade_S[:, None] + weight_S[:, None] * wide_value_SH
            top_S = new_top_S
            key_SH, value_SH = next_key_SH, next_value_SH
        top = tl.max(top_S, axis=0)
        share_S = tl.exp(top_S - top)
        total = tl.sum(sum_S * share_S, axis=0)
        out_H = tl.sum(out_SH * share_S[:, None], axis=0)

        if (split == num_splits - 1) & (query % heads.group == 0):
            place_1H = _find_slots(table, length, True, head, heads) * width + lane[None, :]
            tl.store(key_pages + place_1H, new_key_1H.to(key_pages.dtype.element_ty))
            tl.store(value_pages + place_1H, new_value_1H.to(value_pages.dtype.element_ty))

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
                # nobody counts this head before the next block
                tl.store(arrivals + query, 0)


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
