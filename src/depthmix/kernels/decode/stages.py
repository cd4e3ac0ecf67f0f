"""The stages of `decode`: products that many programs share, and the barrier between them.

Each stage reads what others wrote before a barrier and writes what others read after the next one.
Owns how work is cut up between the programs. Knows nothing of blocks and of their order.
"""

from typing import NamedTuple

import triton.language as tl

from depthmix.kernels.compiling import INTERPRETED, jit

# the router's and the predictor's own norm
ROUTER_EPS = tl.constexpr(1e-6)
# neighbours in a row that one thread sums by itself: 16 bytes of bf16
GROUP = tl.constexpr(8)
# what `apply_gate` knows
GATES = ("raw", "sigmoid", "tanh1", "unit")
# below the rank of everything
LOWEST_RANK = tl.constexpr(-(2**63))


class Cut(NamedTuple):
    """How the programs cut up a matrix; all is stored, since Triton drops properties."""

    num_rows: int
    """Rows that are shared out; of two partners, the first one counts."""
    width: int
    """Length of a row."""
    rows: int
    """Rows of half a tile, a power of two."""
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


@jit
def arrive(counter):
    """Tell the others that this program's part of a stage is written."""
    # all threads have stored before the first one says so
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@jit
def wait(counter, target):
    """Go on when `target` arrivals were counted."""
    # the interpreter runs programs one after another, so nobody is to be waited for
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
    if not INTERPRETED:
        # made anew each time: else what follows from it is computed for all stages before the
        # first one, and there are not registers enough to hold it
        program = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1
        )
    first = program * cut.num_rows // cut.num_programs
    return first, (program + 1) * cut.num_rows // cut.num_programs


@jit
def load_tile(weight, row, end, column, cut: tl.constexpr):
    """Rows from `row` on that come before `end`, in two halves; of partners, a half of each.

    Numbers of 16 bits come packed: alone, they would be sorted anew into registers at the end of
    each turn of a loop, and that waits for what should be under way.
    """
    upper = _load_half(weight, row, end, column, 0, cut)
    return upper, _load_half(weight, row, end, column, 1, cut)


@jit
def _load_half(weight, row, end, column, half: tl.constexpr, cut: tl.constexpr):
    place = tl.arange(0, cut.rows)
    lane = column // cut.pack + tl.arange(0, cut.columns // cut.pack)
    if cut.partner > 0:
        inside = row + place < end
        place += half * cut.partner
    else:
        place += half * cut.rows
        inside = row + place < end
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
def unpack(packed, source, pack: tl.constexpr):
    """Numbers of `source` as float32: the even and the odd ones, or where not packed all, twice."""
    if pack == 1:
        low = packed.to(tl.float32)
        high = low
    elif source.dtype.element_ty == tl.bfloat16:
        # a bf16 is the upper half of a float32
        low = (packed << 16).to(tl.float32, bitcast=True)
        high = (packed & -65536).to(tl.float32, bitcast=True)
    else:
        low = packed.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (packed >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@jit
def halve(vector, size: tl.constexpr, pack: tl.constexpr):
    """A vector as `unpack` gives what it is multiplied with."""
    if pack == 1:
        even, odd = vector, vector
    else:
        even, odd = tl.split(tl.reshape(vector, (size // 2, 2)))
    return even, odd


@jit
def _sum_inside(half, vector, weight, cut: tl.constexpr):
    """Products of half a tile with a vector, summed as far as a thread can by itself."""
    rows: tl.constexpr = cut.rows
    groups: tl.constexpr = cut.columns // GROUP
    low, high = unpack(half, weight, cut.pack)
    even, odd = halve(vector, cut.columns, cut.pack)
    product = low * even[None, :]
    if cut.pack == 2:
        product += high * odd[None, :]
    return tl.sum(tl.reshape(product, (rows, groups, GROUP // cut.pack)), axis=2)


@jit
def _sum_rows(tile, vector, weight, row, end, x, x_more, norm, cut: tl.constexpr):
    """Products of a tile's rows with (x + x_more) · norm; the next tile and its vector.

    `tile` and `vector` are the first ones of these rows. Each half of the next tile is asked for
    into the registers of the last one's, as soon as that is summed: any other register would have
    to be copied, and a copy waits. So one half is under way while the other is summed. The last
    tile that is asked for belongs to the rows that come next.
    """
    rows: tl.constexpr = cut.rows
    columns: tl.constexpr = cut.columns
    upper = tl.zeros((rows,), dtype=tl.float32)
    lower = tl.zeros((rows,), dtype=tl.float32)
    num_blocks: tl.constexpr = cut.padded // columns
    for block in range(num_blocks):
        next_row = row + (block + 1) // num_blocks * cut.step
        # visibly a multiple, or the mask is taken for one of any shape and nothing is vectorised
        next_column = (block + 1) % num_blocks * columns
        part_upper = _sum_inside(tile[0], vector, weight, cut)
        # no load moves up across this
        tl.debug_barrier()
        next_upper = _load_half(weight, next_row, end, next_column, 0, cut)
        part_lower = _sum_inside(tile[1], vector, weight, cut)
        tl.debug_barrier()
        tile = (next_upper, _load_half(weight, next_row, end, next_column, 1, cut))
        if num_blocks > 1:
            vector = _load_vector(x, x_more, next_column, cut)
            if norm is not None:
                lane = next_column + tl.arange(0, columns)
                vector *= tl.load(norm + lane, mask=lane < cut.width, other=0.0).to(tl.float32)
        # threads meet while both halves are under way
        upper += tl.sum(part_upper, axis=1)
        lower += tl.sum(part_lower, axis=1)
    total = tl.reshape(tl.permute(tl.join(upper, lower), (1, 0)), (2 * rows,))
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
        total += vector * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
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
        # one that is added elsewhere and forgotten here must not count as another
        tl.static_assert(gate == "unit")
        weight = score * 0.0 + 1.0
    return weight


@jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@jit
def project(tile, weight, x, stream, square, scale_D, norm, out, eps, cut: tl.constexpr):
    """This program's rows of weight · norm(x), and the rank of the largest, see `_rank`."""
    step: tl.constexpr = cut.step
    first, end = share_rows(cut)
    vector = stream * scale_D.to(tl.float32)
    scale = tl.rsqrt(square + eps)
    best = tl.full((step,), LOWEST_RANK, dtype=tl.int64)
    for row in range(first, end, step):
        total, tile, vector = _sum_rows(tile, vector, weight, row, end, x, None, norm, cut)
        total *= scale
        place = row + tl.arange(0, step)
        tl.store(out + place, total, mask=place < end)
        best = tl.maximum(best, tl.where(place < end, _rank(total, place), LOWEST_RANK))
    return best


@jit
def _rank(value, index):
    """A number that is larger for a larger value, and for an earlier one of two that are equal."""
    bits = value.to(tl.int32, bitcast=True)
    # floats are in the order of their bits, but negative ones the other way round
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@jit
def find_ranked(rank):
    """The index that a rank was made of."""
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


@jit
def load_unit(weight, row, end, column, cut: tl.constexpr):
    """A tile's columns of one row, where that comes before `end`; packed, see `load_tile`."""
    lane = column // cut.pack + tl.arange(0, cut.columns // cut.pack)
    weight += tl.cast(row, tl.int64) * cut.width
    if cut.pack == 2:
        weight = weight.to(tl.pointer_type(tl.int32))
    size = tl.where(row < end, cut.width // cut.pack, 0)
    return tl.load(weight + lane, mask=lane < size, other=0)


@jit
def _sum_unit(unit, vector, weight, cut: tl.constexpr):
    low, high = unpack(unit, weight, cut.pack)
    even, odd = halve(vector, cut.columns, cut.pack)
    product = low * even
    if cut.pack == 2:
        product += high * odd
    return tl.sum(product)


@jit
def foresee(unit, weight, x, stream, square, out, cut: tl.constexpr):
    """This program's hidden units of the predictor: gelu(weight · x / rms(x)).

    They are few, most programs have one or none: `unit` is the first one's row.
    """
    columns: tl.constexpr = cut.columns
    first, end = share_rows(cut)
    scale = tl.rsqrt(square + ROUTER_EPS)
    for row in range(first, end):
        total = _sum_unit(unit, stream, weight, cut)
        for column in range(columns, cut.padded, columns):
            vector = _load_vector(x, None, column, cut)
            total += _sum_unit(load_unit(weight, row, end, column, cut), vector, weight, cut)
        tl.store(out + row, gelu(total * scale))
        unit = load_unit(weight, row + 1, end, 0, cut)


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
            active = gelu(total)
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
