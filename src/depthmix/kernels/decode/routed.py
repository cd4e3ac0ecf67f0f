"""A block for few tokens: who takes part in it, and products that read each weight once.

Few rows leave a block bound by reading its weights and by what lies between kernels. Here it is one
kernel that decides, and four products that read each weight once for up to 16 rows, with what
follows from a product in the same kernel. A product's programs have equally many rows of weights,
and all of them fit on the device at once: else some processors would read while others are done.
How many rows are kept is known on the device alone: products beyond them end at once. What a
product multiplies stands ready in the weights' type, so that its loop only loads and multiplies.
Knows nothing of models: it takes stacked tensors and numbers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from depthmix.kernels.compiling import jit
from depthmix.kernels.decode.plan import Rules, Weights, find_room, pick_size
from depthmix.kernels.decode.stages import ROUTER_EPS, apply_gate, gelu

# rows of a matrix product: the fewest that it takes, and those of a larger step
BLOCK_ROWS, MANY_ROWS = tl.constexpr(16), 64
# parts of the predictor's units that are added up at a time, and the most units of a product
SUMMED, MOST_UNITS = tl.constexpr(8), 64
# rows that are decided on together
BLOCKS_DECIDED = (32, 256)
# processors where nobody knows their number, as in the interpreter
FEW_PROCESSORS = 3


class RowTuning(NamedTuple):
    """How a kernel cuts up its weights; results differ by rounding only."""

    most_rows: int = 16
    """Rows of weights of a program, at most, a power of two; of partners, of each."""
    block: int = 256
    """Columns that are loaded at a time, a power of two; a quarter of them where numbers have 32
    bits, which are multiplied in registers. A device reads at its full rate while about 40 KiB of
    weights are under way on each of its processors."""
    num_warps: int = 4
    """Each of them multiplies columns of its own, at least 16, and they are summed at the end."""
    num_stages: int = 4
    """One more than the blocks of columns that shared memory holds."""


TUNINGS = {
    "decide": RowTuning(num_stages=1),
    "plain": RowTuning(most_rows=32),
    "project": RowTuning(most_rows=32, block=256, num_stages=3),
    "swiglu": RowTuning(),
    "gelu": RowTuning(num_stages=5),
    "store": RowTuning(num_stages=7),
    "update": RowTuning(block=512, num_warps=8, num_stages=7),
}
"""By kernel, who decides and the kinds of `_multiply`: the fastest of `benchmarks/rows.py` on an
H200 at width 2,048, but for `gelu`, which was not tried. Of who decides, only the block of columns
and the warps count."""


@jit
def _spread_columns(block: tl.constexpr, slices: tl.constexpr):
    """The numbers of a block's columns, as (slices, 1, columns of each).

    A product of as many matrices as there are warps gives each warp one, so that the warps share
    out the columns of a small product: none of them computes what another does.
    """
    each: tl.constexpr = block // slices
    lane = tl.arange(0, slices)[:, None] * each + tl.arange(0, each)[None, :]
    return lane[:, None, :]


@jit
def _load_if(wanted: tl.constexpr, pointer, inside):
    """What stands inside, where it is wanted."""
    return tl.load(pointer, mask=inside, other=0.0) if wanted else 0.0


@jit
def _judge_rows(
    part_square,
    part_score,
    part_unit,
    w_out,
    bias,
    score,
    wish,
    group,
    row,
    real,
    width: tl.constexpr,
    num_units: tl.constexpr,
    normalize: tl.constexpr,
    parts: tl.constexpr,
    passes: tl.constexpr,
    block_units: tl.constexpr,
    block_parts: tl.constexpr,
):
    """The scores of sixteen rows from the sums over parts of their columns."""
    number = tl.arange(0, block_parts)[None, :]
    at = row[:, None] * parts + number
    there = real[:, None] & (number < parts)
    # other programs wrote it: the first-level cache is not asked
    squares = tl.load(part_square + at, mask=there, other=0.0, cache_modifier=".cg")
    scores = tl.load(part_score + at, mask=there, other=0.0, cache_modifier=".cg")
    invert = tl.rsqrt(tl.sum(squares, axis=1) / width + ROUTER_EPS)
    total = tl.sum(scores, axis=1)
    if normalize:
        total *= invert
    tl.store(score + row, total, mask=real)
    if part_unit is not None:
        size: tl.constexpr = block_units * BLOCK_ROWS
        unit = tl.arange(0, block_units)
        within = unit[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        some = tl.arange(0, SUMMED)[:, None, None]
        logit = tl.zeros((BLOCK_ROWS,), tl.float32)
        for own in tl.static_range(passes):
            units = tl.zeros((block_units, BLOCK_ROWS), tl.float32)
            for begin in range(0, parts, SUMMED):
                place = ((group * parts + begin + some) * passes + own) * size
                sums = tl.load(
                    part_unit + place + within[None, :, :],
                    mask=begin + some < parts,
                    other=0.0,
                    cache_modifier=".cg",
                )
                units += tl.sum(sums, axis=0)
            there_unit = own * block_units + unit < num_units
            weight = tl.load(w_out + own * block_units + unit, mask=there_unit, other=0.0)
            hidden = gelu(units * invert[None, :])
            logit += tl.sum(hidden * weight.to(tl.float32)[:, None], axis=0)
        tl.store(wish + row, logit + tl.load(bias).to(tl.float32), mask=real)


@jit
def _give_places(
    wish,
    score,
    gate,
    index,
    slot,
    first,
    taken,
    kept_row,
    count,
    home,
    forced,
    stayed,
    num_rows,
    keep_all: tl.constexpr,
    gate_kind: tl.constexpr,
    block_rows: tl.constexpr,
):
    """Keep the rows that wish for it, or must be kept; their places are in order."""
    row = tl.arange(0, block_rows)
    there = row < num_rows
    wishes = tl.load(wish + row, mask=there, other=0.0, cache_modifier=".cg")
    scores = tl.load(score + row, mask=there, other=0.0, cache_modifier=".cg")
    kept = (home >= 0) & stayed
    if not keep_all:
        kept = kept & ((wishes > 0) | forced)
    place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    num_kept = tl.sum(kept.to(tl.int32))
    tl.store(slot + row, tl.where(kept, place, -1), mask=there)
    tl.store(taken + row, kept.to(tl.uint8), mask=there)
    # every row is a chunk of its own
    tl.store(first + row, place + 1 - kept.to(tl.int32), mask=there)
    tl.store(first + num_rows, num_kept)
    tl.store(gate + row, apply_gate(scores, gate_kind), mask=there)
    nobody = tl.full((block_rows,), -1, tl.int32)
    tl.store(kept_row + row, nobody, mask=there & (row >= num_kept))
    tl.store(kept_row + place, home, mask=kept)
    tl.store(index + place, row, mask=kept)
    tl.store(count, num_kept)


@jit(
    do_not_specialize=[
        "cache_row",
        "previous",
        "position",
        "bias",
        "slot",
        "first",
        "taken",
        "kept_row",
        "count",
        "num_rows",
        "first_tokens",
    ]
)
def _decide(
    x,
    cache_row,
    previous,
    position,
    router,
    w_in,
    w_out,
    bias,
    norm,
    shaped,
    part_square,
    part_score,
    part_unit,
    score,
    wish,
    gate,
    index,
    slot,
    first,
    taken,
    kept_row,
    count,
    arrivals,
    num_rows,
    first_tokens,
    width: tl.constexpr,
    num_units: tl.constexpr,
    keep_all: tl.constexpr,
    gate_kind: tl.constexpr,
    normalize: tl.constexpr,
    parts: tl.constexpr,
    passes: tl.constexpr,
    overlaps: tl.constexpr,
    block_units: tl.constexpr,
    block_parts: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Score rows; whoever comes last keeps some, in order, and gives them places.

    A program has sixteen rows and a part of their columns, so that nobody reads for long. Who comes
    last of those that share rows adds their sums up, and the last of these decides. Without a
    predictor the router's score decides. Rows may also be `shaped`: stored times the norm's
    weights, but for their rms, which nobody knows yet: who multiplies them divides by it.
    """
    if overlaps:
        # the product that is launched `beside` this one
        gdc_launch_dependents()
    group = tl.program_id(0)
    part = tl.program_id(1)
    row = group * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < num_rows
    column = part * block + tl.arange(0, block)
    inside = column < width
    unit = tl.arange(0, block_units)
    # asked for before the sums: threads meet there, and nothing is asked for across that
    scale = _load_if(shaped is not None, norm + column, inside)
    judge = tl.load(router + column, mask=inside, other=0.0).to(tl.float32)
    everyone = tl.arange(0, block_rows)
    there = everyone < num_rows
    home = tl.load(cache_row + everyone, mask=there, other=-1)
    forced = tl.load(position + everyone, mask=there, other=0) < first_tokens
    stayed = home >= 0
    if previous is not None:
        stayed = tl.load(previous + everyone, mask=there, other=-1) >= 0
    tile = judge
    if w_in is not None:
        # units beyond the last are it once more, and weigh nothing
        w_in += column[None, :]
        at = tl.minimum(unit, num_units - 1)[:, None] * width
        tile = tl.load(w_in + at, mask=inside[None, :], other=0.0)
    at_x = row[:, None].to(tl.int64) * width + column[None, :]
    mask = real[:, None] & inside[None, :]
    given = tl.load(x + at_x, mask=mask, other=0.0)
    vector = given.to(tl.float32)
    tl.store(part_square + row * parts + part, tl.sum(vector * vector, axis=1), mask=real)
    tl.store(part_score + row * parts + part, tl.sum(vector * judge[None, :], axis=1), mask=real)
    size: tl.constexpr = block_units * BLOCK_ROWS
    within = unit[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    if w_in is not None:
        given = tl.trans(given.to(tile.dtype))
        for number in tl.static_range(passes):
            if number > 0:
                at = tl.minimum(number * block_units + unit, num_units - 1)[:, None] * width
                tile = tl.load(w_in + at, mask=inside[None, :], other=0.0)
            units = tl.dot(tile, given, input_precision="ieee")
            to = part_unit + ((group * parts + part) * passes + number) * size
            tl.store(to + within, units)
    # all threads have stored before the first one says so
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + 1 + group, 1, sem="acq_rel", scope="gpu")
    if shaped is not None:
        # nobody waits for this one
        ready = vector * scale.to(tl.float32)[None, :]
        tl.store(shaped + at_x, ready.to(shaped.dtype.element_ty), mask=mask)
    if arrived == parts - 1:
        tl.debug_barrier()
        tl.store(arrivals + 1 + group, 0)
        _judge_rows(
            part_square,
            part_score,
            None if w_in is None else part_unit,
            w_out,
            bias,
            score,
            wish,
            group,
            row,
            real,
            width,
            num_units,
            normalize,
            parts,
            passes,
            block_units,
            block_parts,
        )
        tl.debug_barrier()
        num_groups = tl.num_programs(0)
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_groups - 1:
            tl.debug_barrier()
            tl.store(arrivals, 0)
            _give_places(
                score if w_in is None else wish,
                score,
                gate,
                index,
                slot,
                first,
                taken,
                kept_row,
                count,
                home,
                forced,
                stayed,
                num_rows,
                keep_all,
                gate_kind,
                block_rows,
            )


@jit(do_not_specialize=["index", "count", "num_first"])
def _multiply(
    source,
    weight,
    out,
    index,
    count,
    x,
    gate,
    norm,
    more,
    shaped,
    given_square,
    part_square,
    num_first,
    eps,
    num_programs: tl.constexpr,
    width: tl.constexpr,
    num_out: tl.constexpr,
    kind: tl.constexpr,
    gathers: tl.constexpr,
    prepares: tl.constexpr,
    parts: tl.constexpr,
    block_parts: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    beside: tl.constexpr,
    block: tl.constexpr,
    slices: tl.constexpr,
):
    """weight · source for the kept rows, and what follows from it.

    `plain` is the product, of rows by `index` where it `gathers`. `store` keeps it as `more` in
    float32, and prepares the sum s of x and it for the next product: s · norm, and the sum of
    squares over this program's part of s. `swiglu` pairs gate and up rows, `gelu` has one of each.
    `update` adds gate · (more + product) to x, and where it `prepares`, treats that as `store`
    does. Rows that were prepared in `parts` are divided by their rms only after the product, which
    comes to the same.
    """
    paired: tl.constexpr = kind == "swiglu"
    program = tl.program_id(0)
    lane_out = program * num_out // num_programs + tl.arange(0, block_out)
    own = lane_out < (program + 1) * num_out // num_programs
    inside_out, loaded = own[:, None], own[None, :, None]
    lane = _spread_columns(block, slices)
    weight += lane_out[None, :, None].to(tl.int64) * width + lane
    partner = weight + num_out * width
    # volatile, or it would be read after the number of rows; beyond that they are any rows
    number_row = tl.arange(0, block_rows)
    row = tl.load(index + number_row, mask=number_row < num_first, other=0, volatile=True)
    num_kept = tl.load(count)
    scales: tl.constexpr = parts > 0
    stores: tl.constexpr = kind == "store" or prepares
    for first in range(0, num_kept, block_rows):
        place = first + tl.arange(0, block_rows)
        real = place < num_kept
        next_place = place + block_rows
        next_row = tl.load(index + next_place, mask=next_place < num_kept, other=0)
        inside = real[None, :] & inside_out
        at = place[None, :] * num_out + lane_out[:, None]
        at_x = row[None, :].to(tl.int64) * num_out + lane_out[:, None]
        origin = row if gathers else place
        # what follows the product is asked for before it, and has arrived when the loop ends
        old = _load_if(kind == "store" or kind == "update", x + at_x, inside)
        scale = _load_if(stores, norm + lane_out, own)
        before = _load_if(kind == "update", more + at, inside)
        factor = _load_if(kind == "update", gate + row, real)
        number = tl.arange(0, block_parts)[:, None]
        there = real[None, :] & (number < parts)
        squares = _load_if(scales, given_square + origin[None, :] * parts + number, there)

        rows = source + origin[None, :, None].to(tl.int64) * width + lane
        total = tl.zeros((slices, block_out, block_rows), tl.float32)
        second = tl.zeros((slices, block_out, block_rows), tl.float32)
        for column in range(0, width, block):
            wanted, given_there = loaded, real[None, :, None]
            if width % block != 0:
                within = lane + column < width
                wanted, given_there = wanted & within, given_there & within
            tile = tl.load(weight + column, mask=wanted, other=0.0)
            other = tl.load(partner + column, mask=wanted, other=0.0) if paired else tile
            given = tl.load(rows + column, mask=given_there, other=0.0)
            given = tl.permute(given, (0, 2, 1))
            total = tl.dot(tile, given, total, input_precision="ieee")
            if paired:
                second = tl.dot(other, given, second, input_precision="ieee")

        total = tl.sum(total, axis=0)
        if paired:
            second = tl.sum(second, axis=0)
        if scales:
            invert = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)[None, :]
            total *= invert
            if paired:
                second *= invert
        if kind == "swiglu":
            total = total * tl.sigmoid(total) * second
        elif kind == "gelu":
            total = gelu(total)
        new = total
        if kind == "store":
            new = old.to(tl.float32) + total
        elif kind == "update":
            total = old.to(tl.float32) + factor[None, :] * (before + total)
            new = total
        if stores:
            new = tl.where(inside, new, 0.0)
            ready = new * scale.to(tl.float32)[:, None]
            tl.store(shaped + at, ready.to(shaped.dtype.element_ty), mask=inside)
            square = tl.sum(new * new, axis=0)
            tl.store(part_square + place * num_programs + program, square, mask=real)
        to = at_x if kind == "update" else at
        tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)
        row = next_row
    if beside:
        # the next kernel waits for this one alone, so this one must not end before the last one
        gdc_wait()


class Places(NamedTuple):
    """Who takes part in a block: its tokens stand in places, in order."""

    index: Int[Tensor, " P"]
    """Token of each place."""
    count: Int[Tensor, " 1"]
    """Places that are taken."""
    gate: Float[Tensor, " T"]
    """What multiplies a token's update."""
    slot: Int[Tensor, " T"]
    """A token's place, -1 where it passes by."""
    first: Int[Tensor, " chunks_and_one"]
    """Place of each chunk's first token, and in the end the count."""
    taken: Int[Tensor, " T"]
    """1 where a token takes part, as a byte for the host."""
    alone: Int[Tensor, " alone"]
    """Row of a place whose token is alone in its row, else -1."""


class FewRows:
    """Blocks of steps of up to `num_rows` tokens; made to be captured."""

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        num_rows: int,
        tunings: Mapping[str, RowTuning] | None = None,
    ) -> None:
        """`tunings` take the place of some of `TUNINGS`."""
        self.weights, self.rules, self.num_rows = weights, rules, num_rows
        device, dtype = weights.embedding.device, weights.embedding.dtype
        chosen, room = {**TUNINGS, **(tunings or {})}, find_room(device)
        self.tunings = {kind: limit_stages(kind, t, room) for kind, t in chosen.items()}
        self.width, self.mlp_width = weights.embedding.shape[1], weights.w_mlp_out.shape[2]
        self.kind_in = "swiglu" if weights.w_in.shape[1] == 2 * self.mlp_width else "gelu"
        self.num_processors, self.overlaps = FEW_PROCESSORS, False
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_processors = properties.multi_processor_count
            # kernels that begin before the last one is done: from Hopper on
            self.overlaps = properties.major >= 9
        w_in = weights.predictor_in if rules.selector == "predictor" else None
        self.num_units = 0 if w_in is None else w_in.shape[1]

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        # programs that share out a row: its columns, its norm's parts, its update's
        tuning = self.tunings["decide"]
        self.decided = _fit_columns(tuning, self.width, weights.embedding.element_size())["block"]
        self.parts = triton.cdiv(self.width, self.decided)
        self.block_units = min(MOST_UNITS, max(16, triton.next_power_of_2(self.num_units)))
        self.passes = triton.cdiv(self.num_units, self.block_units)
        self.num_parts = {
            kind: self.count_programs(kind, self.width) for kind in ("store", "update")
        }
        num_groups = triton.cdiv(num_rows, BLOCK_ROWS.value)
        size = self.passes * self.block_units * BLOCK_ROWS.value
        self.part_unit = make(num_groups * self.parts * size)
        self.part_score = make(num_rows, self.parts)
        self.given_square = make(num_rows, self.parts)
        self.part_square = make(num_rows * max(self.num_parts.values()))
        self.score, self.wish = make(num_rows), make(num_rows)
        # of all, and of those that share rows: every launch leaves zeros
        self.arrivals = make(1 + num_groups, dtype=torch.int32)
        self.shaped = make(num_rows, self.width, dtype=dtype)
        self.more = make(num_rows, self.width)
        self.hidden = make(num_rows, self.mlp_width, dtype=dtype)

    def decide(
        self,
        x: Float[Tensor, "B D"],
        layer: int,
        position: Int[Tensor, " B"],
        row: Int[Tensor, " B"],
        previous: Int[Tensor, " B"] | None,
        places: Places,
        shaped: Float[Tensor, "B D"] | None = None,
    ) -> None:
        """Choose rows and give them `places`.

        `row` is -1 where there is no token; `previous` are the last routed block's slots, where who
        left does not return. `shaped` gets rows times the norm's weights, see `multiply`.
        """
        weights, rules, num_rows = self.weights, self.rules, x.shape[0]
        route = rules.routed_layers.index(layer)
        assert weights.router is not None
        assert num_rows <= self.num_rows
        heads = [weights.predictor_in, weights.predictor_out, weights.predictor_bias]
        w_in, w_out, bias = (t[route] if t is not None and self.num_units else None for t in heads)
        _decide[(triton.cdiv(num_rows, BLOCK_ROWS.value), self.parts)](
            x,
            row,
            previous,
            position,
            weights.router[route],
            w_in,
            w_out,
            bias,
            weights.norm_attention[layer],
            shaped,
            self.given_square,
            self.part_score,
            self.part_unit,
            self.score,
            self.wish,
            places.gate,
            places.index,
            places.slot,
            places.first,
            places.taken,
            places.alone,
            places.count,
            self.arrivals,
            num_rows,
            rules.first_tokens,
            self.width,
            self.num_units,
            rules.selector == "all",
            rules.gate,
            rules.normalize,
            self.parts,
            self.passes,
            self.overlaps,
            block_units=self.block_units,
            block_parts=triton.next_power_of_2(self.parts),
            block_rows=pick_size(num_rows, BLOCKS_DECIDED),
            block=self.decided,
            num_warps=self.tunings["decide"].num_warps,
        )

    def count_programs(self, kind: str, num_out: int) -> int:
        """Programs of a product: on each processor one, or as many as on the others."""
        num_programs, num_processors = triton.cdiv(num_out, self.tunings[kind].most_rows), 1
        if num_programs > self.num_processors:
            num_processors = self.num_processors
        return triton.cdiv(num_programs, num_processors) * num_processors

    def multiply(
        self,
        kind: str,
        source: Float[Tensor, "P K"],
        weight: Float[Tensor, "N K"],
        out: Float[Tensor, "P N"],
        places: Places,
        *,
        x: Float[Tensor, "T D"] | None = None,
        norm: Float[Tensor, " D"] | None = None,
        prepared: str | None = None,
        gathers: bool = False,
        beside: bool = False,
    ) -> None:
        """One of a block's products for the places that are taken, see `_multiply`.

        `prepared` names who prepared the source: `decide`, or a kind. An `update` with a `norm`
        prepares x for a product that follows. With `beside` the product begins with `decide`, which
        was launched just before, where the device can, and reads each weight once for 64 rows.
        """
        block_rows, tuned = BLOCK_ROWS.value, kind
        if beside and source.shape[0] > block_rows:
            block_rows, tuned = MANY_ROWS, "project"
        beside, tuning = beside and self.overlaps, self.tunings[tuned]
        num_out, width = out.shape[1], weight.shape[1]
        assert source.is_contiguous()
        assert out.is_contiguous()
        x = out if x is None else x
        parts, given_square = 0, self.part_square
        if prepared == "decide":
            parts, given_square = self.parts, self.given_square
        elif prepared is not None:
            parts = self.num_parts[prepared]
        columns = _fit_columns(tuning, width, weight.element_size())
        num_programs = self.count_programs(tuned, num_out)
        block_out = triton.next_power_of_2(triton.cdiv(num_out, num_programs))
        _multiply[(num_programs,)](
            source,
            weight,
            out,
            places.index,
            places.count,
            x,
            places.gate,
            self.weights.norm if norm is None else norm,
            self.more,
            self.shaped,
            given_square,
            self.part_square,
            min(block_rows, places.index.shape[0]),
            self.rules.norm_eps,
            num_programs,
            width,
            num_out,
            kind,
            gathers,
            prepares=kind == "update" and norm is not None,
            parts=parts,
            block_parts=triton.next_power_of_2(max(1, parts)),
            block_rows=block_rows,
            # a matrix product takes no fewer
            block_out=max(16, block_out),
            beside=beside,
            launch_pdl=beside,
            **columns,
        )

    def finish_block(
        self,
        x: Float[Tensor, "T D"],
        layer: int,
        mixed: Float[Tensor, "P mixed"],
        places: Places,
        next_norm: Float[Tensor, " D"] | None = None,
    ) -> None:
        """What follows attention in a block: its output, the MLP, and the update of x.

        With the norm of what follows the block, x is prepared for it in `shaped`.
        """
        weights = self.weights
        norm = weights.norm_mlp[layer]
        w_in, w_mlp_out = weights.w_in[layer], weights.w_mlp_out[layer]
        self.multiply("store", mixed, weights.w_attn_out[layer], self.more, places, x=x, norm=norm)
        self.multiply(self.kind_in, self.shaped, w_in, self.hidden, places, prepared="store")
        self.multiply("update", self.hidden, w_mlp_out, x, places, norm=next_norm)


def limit_stages(kind: str, tuning: RowTuning, room: int) -> RowTuning:
    """The same with no more blocks of columns than a program's shared memory of `room` bytes holds.

    Those of an H200 hold 227 KiB, those of a desktop card 99.
    """
    num_rows = max(16, tuning.most_rows) * (2 if kind == "swiglu" else 1)
    num_rows += MANY_ROWS if kind == "project" else BLOCK_ROWS.value
    # 16 bits each; where numbers have more, a block has fewer columns. The router has 32.
    num_bytes = 2 * tuning.block * (num_rows + (2 if kind == "decide" else 0))
    return tuning._replace(num_stages=min(tuning.num_stages, 1 + room // num_bytes))


def _fit_columns(tuning: RowTuning, width: int, element_size: int) -> dict[str, int]:
    """A launch's columns: no more than there are, but 16 for each warp at least."""
    block = min(tuning.block * 4 // element_size**2, triton.next_power_of_2(width))
    return {
        "block": max(block, 16 * tuning.num_warps),
        "slices": tuning.num_warps,
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
    }
