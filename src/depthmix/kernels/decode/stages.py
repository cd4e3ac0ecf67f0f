"""The stages of `step`: products that many programs share, and the barrier between them.

Each stage reads what other programs wrote before a barrier, and writes what they read after the
next one. Owns how work is divided among programs. Knows nothing of blocks and their order.
"""

from typing import NamedTuple

import triton.language as tl

from depthmix.kernels.compiling import INTERPRETED, jit

# epsilon of the router's and the predictor's own norm
ROUTER_EPS = tl.constexpr(1e-6)
# neighbours in a row that are summed within one thread: 16 bytes of bf16
GROUP = tl.constexpr(8)
# the gates that `apply_gate` implements
GATES = ("raw", "sigmoid", "tanh1", "unit")
# below any rank
LOWEST_RANK = tl.constexpr(-(2**63))


class Cut(NamedTuple):
    """How a matrix is divided among programs; all fields, since Triton drops properties."""

    num_rows: int
    """Rows divided among the programs; partners count once."""
    width: int
    """Length of a row."""
    rows: int
    """Rows of half a tile, a power of two."""
    columns: int
    """Columns of a tile, a power of two and at least 16."""
    partner: int
    """Distance to the row summed together with a row, as in SwiGLU's gate and up rows; or 0."""
    num_programs: int
    """Programs that share the rows."""
    step: int
    """Rows of a tile, without partners."""
    padded: int
    """Total columns of a row's tiles."""
    pack: int
    """Neighbours read as one int32: 2 for 16-bit types, else 1."""


@jit
def arrive(counter):
    """Signal that this program's part of a stage is written."""
    # all threads must have stored before the arrival is counted
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@jit
def wait(counter, target):
    """Wait until `target` arrivals are counted."""
    # the interpreter runs programs one after another, so there is nothing to wait for
    if not INTERPRETED:
        # one thread polls with plain loads: polling by all threads, or atomics, delays arrivals
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
    """Return first and end of this program's rows: contiguous, and evenly divided."""
    program = tl.program_id(0)
    if not INTERPRETED:
        # opaque to the compiler, which would otherwise compute everything derived from it for all
        # stages before the first one, with too few registers to hold it
        program = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1
        )
    first = program * cut.num_rows // cut.num_programs
    return first, (program + 1) * cut.num_rows // cut.num_programs


@jit
def load_tile(weight, row, end, column, cut: tl.constexpr):
    """Load rows from `row` up to `end`, in two halves; with partners, one half of each.

    16-bit numbers stay packed: otherwise they would be rearranged in registers at the end of each
    loop iteration, which waits for loads that should stay in flight.
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
        # rows are 16-byte aligned: a hint, because the compiler does not always infer it
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
    """Load a norm's weights for the first tile's columns, if `wanted`."""
    lane = tl.arange(0, cut.columns)
    return tl.load(norm + lane, mask=lane < tl.where(wanted, cut.width, 0), other=0.0)


@jit
def _load_vector(x, x_more, column, cut: tl.constexpr):
    """x + x_more in a tile's columns."""
    lane = column + tl.arange(0, cut.columns)
    inside = lane < cut.width
    # written by other programs: bypass the L1 cache, which may be stale
    vector = tl.load(x + lane, mask=inside, other=0.0, cache_modifier=".cg")
    if x_more is not None:
        vector += tl.load(x_more + lane, mask=inside, other=0.0, cache_modifier=".cg")
    return vector


@jit
def load_stream(x, x_more, cut: tl.constexpr):
    """x + x_more in the first tile's columns, and the mean square over all columns.

    Read once for everything a stage computes from it: every read waits for the L2 cache, and all
    programs together read megabytes.
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
    """Unpack numbers of `source` to float32: even and odd ones; if not packed, all, twice."""
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
    """Split a vector into even and odd elements, to match the output of `unpack`."""
    if pack == 1:
        even, odd = vector, vector
    else:
        even, odd = tl.split(tl.reshape(vector, (size // 2, 2)))
    return even, odd


@jit
def _sum_inside(half, vector, weight, cut: tl.constexpr):
    """Products of half a tile with a vector, summed as far as possible within a thread."""
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

    `tile` and `vector` are the first ones of these rows. Each half of the next tile is loaded into
    the registers of the previous one's half, as soon as that is summed: other registers would
    have to be copied, and a copy waits for the load. So one half is in flight while the other is
    summed. The last tile loaded belongs to the next rows.
    """
    rows: tl.constexpr = cut.rows
    columns: tl.constexpr = cut.columns
    upper = tl.zeros((rows,), dtype=tl.float32)
    lower = tl.zeros((rows,), dtype=tl.float32)
    num_blocks: tl.constexpr = cut.padded // columns
    for block in range(num_blocks):
        next_row = row + (block + 1) // num_blocks * cut.step
        # visibly a multiple, or the compiler assumes an arbitrary mask and does not vectorise
        next_column = (block + 1) % num_blocks * columns
        part_upper = _sum_inside(tile[0], vector, weight, cut)
        # prevents the compiler from moving loads up across this point
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
        # threads synchronize while both halves are in flight
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
    """The factor of a kept token's update."""
    if gate == "raw":
        weight = score
    elif gate == "sigmoid":
        weight = tl.sigmoid(score)
    elif gate == "tanh1":
        # 1 + tanh(r)
        weight = 2.0 * tl.sigmoid(2.0 * score)
    else:
        # fail if a new gate is not implemented here, instead of applying another
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
    """A number that grows with the value; of equal values, the earlier ranks higher."""
    bits = value.to(tl.int32, bitcast=True)
    # floats sort like their bits, except that negative ones are reversed
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@jit
def find_ranked(rank):
    """Extract the index from a rank."""
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


@jit
def load_unit(weight, row, end, column, cut: tl.constexpr):
    """Load a tile's columns of one row, if it lies before `end`; packed, see `load_tile`."""
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

    They are few, and most programs have at most one: `unit` is the row of the first.
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
    """Load the predictor's output weights and bias."""
    unit = tl.arange(0, block)
    weight_P = tl.load(weight + unit, mask=unit < num_units, other=0.0).to(tl.float32)
    return weight_P, tl.load(bias).to(tl.float32)


@jit
def decide(foreseen, weight_P, bias, num_units: tl.constexpr, block: tl.constexpr):
    """1 if the predictor's logit is positive, else 0."""
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
    """x ← x + gate · (a + MLP) in this program's rows, which no other reads in this stage."""
    first, end = share_rows(cut)
    vector = _load_vector(hidden, None, 0, cut)
    for row in range(first, end, cut.step):
        total, tile, vector = _sum_rows(tile, vector, weight, row, end, hidden, None, None, cut)
        place = row + tl.arange(0, cut.step)
        inside = place < end
        total += tl.load(update + place, mask=inside, other=0.0, cache_modifier=".cg")
        old = tl.load(x + place, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(x + place, old + gate * total, mask=inside)
