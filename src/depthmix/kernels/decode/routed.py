"""A block for few tokens: choosing those that take part, and products that read each weight once.

With few rows, a block is bound by reading its weights and by the gaps between kernels. Here it is
one deciding kernel, and four products that read each weight once for up to 16 rows, each fused with
what follows it. A product's programs have equally many rows of weights, and all of them fit on the
device at once: otherwise some multiprocessors would still read while others are done. The number
of kept rows is known on the device only: products past it exit at once. A product's input is
prepared in the weights' dtype, so that its loop only loads and multiplies.
Knows nothing of models: it takes stacked tensors and numbers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels.compiling import jit
from depthmix.kernels.decode.plan import Places, Rules, Weights, find_room, pick_size
from depthmix.kernels.decode.prefetch import Prefetched, find_obstacle
from depthmix.kernels.decode.stages import ROUTER_EPS, apply_gate, gelu

# rows of a matrix product: the minimum
BLOCK_ROWS = tl.constexpr(16)
# parts of the predictor's units summed at a time, and the most units per product
SUMMED, MOST_UNITS = tl.constexpr(8), 64
# rows decided on together, as compiled sizes
BLOCKS_DECIDED = (32, 256)
# multiprocessors to assume if their number is unknown, as in the interpreter
FEW_PROCESSORS = 3


class RowTuning(NamedTuple):
    """How a kernel divides its weights; this affects results only by rounding."""

    most_rows: int = 16
    """Maximum rows of weights per program, a power of two; with partners, of each."""
    block: int = 256
    """Columns loaded at a time, a power of two; a quarter of that for 32-bit numbers, which are
    multiplied in registers. A device reads at its full rate while about 40 KiB of weights are in
    flight per multiprocessor."""
    num_warps: int = 4
    """Each warp multiplies its own columns, at least 16; they are summed at the end."""
    num_stages: int = 4
    """One more than the blocks of columns held in shared memory."""


TUNINGS = {
    "decide": RowTuning(num_stages=1),
    "plain": RowTuning(most_rows=32),
    "swiglu": RowTuning(),
    "gelu": RowTuning(num_stages=5),
    "store": RowTuning(num_stages=7),
    "update": RowTuning(block=512, num_warps=8, num_stages=7),
}
"""By kernel, `decide` and the kinds of `_multiply`: the fastest in `benchmarks/rows.py` on an H200
at width 2,048, except for `gelu`, which was not tuned. For `decide`, only the block of columns and
the warps matter."""


@jit
def _spread_columns(block: tl.constexpr, slices: tl.constexpr):
    """The indices of a block's columns, as (slices, 1, columns per slice).

    A batched product of as many matrices as warps gives each warp one, so that the warps divide
    the columns of a small product and none repeats another's work.
    """
    each: tl.constexpr = block // slices
    lane = tl.arange(0, slices)[:, None] * each + tl.arange(0, each)[None, :]
    return lane[:, None, :]


@jit
def _load_if(wanted: tl.constexpr, pointer, inside):
    """Load what is inside, if `wanted`."""
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
    """Compute the scores of sixteen rows from sums over parts of their columns."""
    number = tl.arange(0, block_parts)[None, :]
    at = row[:, None] * parts + number
    there = real[:, None] & (number < parts)
    # written by other programs: bypass the L1 cache
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
    """Keep the rows with a positive wish and those that must be kept; places are in order."""
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
    # every row is its own chunk
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
    block_units: tl.constexpr,
    block_parts: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Score rows; the last program to finish decides which are kept, and assigns places in order.

    A program has sixteen rows and a part of their columns, so that no program reads for long. The
    last program to finish a group of rows sums its parts, and the last of these decides. Without a
    predictor the router's score decides. Rows may also be `shaped`: stored times the norm's
    weights but not yet divided by their rms, which is still unknown: the product divides by it.
    """
    group = tl.program_id(0)
    part = tl.program_id(1)
    row = group * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < num_rows
    column = part * block + tl.arange(0, block)
    inside = column < width
    unit = tl.arange(0, block_units)
    # loaded before the sums: threads synchronize there, and loads do not move across that
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
        # units past the last repeat it with zero weight
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
    # all threads must have stored before the arrival is counted
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + 1 + group, 1, sem="acq_rel", scope="gpu")
    if shaped is not None:
        # after the arrival, because no program waits for this store
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
    block_out: tl.constexpr,
    block: tl.constexpr,
    slices: tl.constexpr,
):
    """weight · source for the kept rows, fused with what follows.

    `plain` is the product alone, of rows by `index` if it `gathers`. `store` keeps it as `more` in
    float32, and prepares its sum s with x for the next product: s · norm, and the sum of squares
    over this program's part of s. `swiglu` pairs gate and up rows, `gelu` has single rows.
    `update` adds gate · (more + product) to x and, if it `prepares`, prepares the result as `store`
    does. Rows prepared in `parts` are divided by their rms only after the product, which is
    equivalent.
    """
    paired: tl.constexpr = kind == "swiglu"
    program = tl.program_id(0)
    lane_out = program * num_out // num_programs + tl.arange(0, block_out)
    own = lane_out < (program + 1) * num_out // num_programs
    inside_out, loaded = own[:, None], own[None, :, None]
    lane = _spread_columns(block, slices)
    weight += lane_out[None, :, None].to(tl.int64) * width + lane
    partner = weight + num_out * width
    # volatile, so that it is not loaded after the count; past the count they may be any rows
    number_row = tl.arange(0, BLOCK_ROWS)
    row = tl.load(index + number_row, mask=number_row < num_first, other=0, volatile=True)
    num_kept = tl.load(count)
    scales: tl.constexpr = parts > 0
    stores: tl.constexpr = kind == "store" or prepares
    for first in range(0, num_kept, BLOCK_ROWS):
        place = first + tl.arange(0, BLOCK_ROWS)
        real = place < num_kept
        next_place = place + BLOCK_ROWS
        next_row = tl.load(index + next_place, mask=next_place < num_kept, other=0)
        inside = real[None, :] & inside_out
        at = place[None, :] * num_out + lane_out[:, None]
        at_x = row[None, :].to(tl.int64) * num_out + lane_out[:, None]
        origin = row if gathers else place
        # the epilogue's operands are loaded before the product, and have arrived when it ends
        old = _load_if(kind == "store" or kind == "update", x + at_x, inside)
        scale = _load_if(stores, norm + lane_out, own)
        before = _load_if(kind == "update", more + at, inside)
        factor = _load_if(kind == "update", gate + row, real)
        number = tl.arange(0, block_parts)[:, None]
        there = real[None, :] & (number < parts)
        squares = _load_if(scales, given_square + origin[None, :] * parts + number, there)

        rows = source + origin[None, :, None].to(tl.int64) * width + lane
        total = tl.zeros((slices, block_out, BLOCK_ROWS), tl.float32)
        second = tl.zeros((slices, block_out, BLOCK_ROWS), tl.float32)
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


class FewRows:
    """Blocks of steps of up to `num_rows` tokens; suitable for capture."""

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        num_rows: int,
        tunings: Mapping[str, RowTuning] | None = None,
    ) -> None:
        """`tunings` override entries of `TUNINGS`."""
        self.weights, self.rules, self.num_rows = weights, rules, num_rows
        device, dtype = weights.embedding.device, weights.embedding.dtype
        chosen, room = {**TUNINGS, **(tunings or {})}, find_room(device)
        self.tunings = {kind: limit_stages(kind, t, room) for kind, t in chosen.items()}
        self.width, self.mlp_width = weights.embedding.shape[1], weights.w_mlp_out.shape[2]
        self.kind_in = "swiglu" if weights.w_in.shape[1] == 2 * self.mlp_width else "gelu"
        self.num_processors = FEW_PROCESSORS
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_processors = properties.multi_processor_count
        w_in = weights.predictor_in if rules.selector == "predictor" else None
        self.num_units = 0 if w_in is None else w_in.shape[1]

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        # programs that share a row: its columns, the parts of its norm, those of its update
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
        # of all groups of rows, and of the programs in each group: every launch resets them to zero
        self.arrivals = make(1 + num_groups, dtype=torch.int32)
        self.shaped = make(num_rows, self.width, dtype=dtype)
        self.more = make(num_rows, self.width)
        self.hidden = make(num_rows, self.mlp_width, dtype=dtype)
        self.prefetched = None
        if rules.routed_layers and find_obstacle(weights, rules, num_rows) is None:
            scores = (self.score, self.wish)
            self.prefetched = Prefetched(
                weights, rules, self.more, self.shaped, self.hidden, *scores
            )

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
        """Choose rows and assign them `places`.

        `row` is -1 where there is no token; `previous` holds the last routed block's slots, for
        models in which a token that left does not return. `shaped` receives rows times the norm's
        weights, see `multiply`.
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
            block_units=self.block_units,
            block_parts=triton.next_power_of_2(self.parts),
            block_rows=pick_size(num_rows, BLOCKS_DECIDED),
            block=self.decided,
            num_warps=self.tunings["decide"].num_warps,
        )

    def count_programs(self, kind: str, num_out: int) -> int:
        """Count a product's programs: at most one per multiprocessor, or equally many on each."""
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
    ) -> None:
        """One of a block's products for the occupied places, see `_multiply`.

        `prepared` names the step that prepared the source: `decide`, or a kind. An `update` with a
        `norm` prepares x for a following product.
        """
        num_out, width = out.shape[1], weight.shape[1]
        assert source.is_contiguous()
        assert out.is_contiguous()
        x = out if x is None else x
        parts, given_square = 0, self.part_square
        if prepared == "decide":
            parts, given_square = self.parts, self.given_square
        elif prepared is not None:
            parts = self.num_parts[prepared]
        columns = _fit_columns(self.tunings[kind], width, weight.element_size())
        num_programs = self.count_programs(kind, num_out)
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
            min(BLOCK_ROWS.value, places.index.shape[0]),
            self.rules.norm_eps,
            num_programs,
            width,
            num_out,
            kind,
            gathers,
            prepares=kind == "update" and norm is not None,
            parts=parts,
            block_parts=triton.next_power_of_2(max(1, parts)),
            # a matrix product needs at least 16
            block_out=max(16, block_out),
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
        """Finish a block after attention: output projection, MLP, and the update of x.

        With `next_norm`, the norm that follows the block, x is prepared for it in `shaped`.
        """
        if self.prefetched is not None and next_norm is None:
            self.prefetched.finish(x, layer, mixed, places)
            return
        weights = self.weights
        norm = weights.norm_mlp[layer]
        w_in, w_mlp_out = weights.w_in[layer], weights.w_mlp_out[layer]
        self.multiply("store", mixed, weights.w_attn_out[layer], self.more, places, x=x, norm=norm)
        self.multiply(self.kind_in, self.shaped, w_in, self.hidden, places, prepared="store")
        self.multiply("update", self.hidden, w_mlp_out, x, places, norm=next_norm)


def limit_stages(kind: str, tuning: RowTuning, room: int) -> RowTuning:
    """Limit the stages to the blocks of columns that `room` bytes of shared memory can hold.

    A program has 227 KiB on an H200, and 99 on a desktop card.
    """
    num_rows = max(16, tuning.most_rows) * (2 if kind == "swiglu" else 1)
    num_rows += BLOCK_ROWS.value
    # 16 bits each; for wider numbers a block has fewer columns. The router has 32 bits.
    num_bytes = 2 * tuning.block * (num_rows + (2 if kind == "decide" else 0))
    return tuning._replace(num_stages=min(tuning.num_stages, 1 + room // num_bytes))


def _fit_columns(tuning: RowTuning, width: int, element_size: int) -> dict[str, int]:
    """Columns per launch: at most the width, but at least 16 per warp."""
    block = min(tuning.block * 4 // element_size**2, triton.next_power_of_2(width))
    return {
        "block": max(block, 16 * tuning.num_warps),
        "slices": tuning.num_warps,
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
    }
