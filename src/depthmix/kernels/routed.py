"""A routed block of a decoding step of many sequences, for those that it keeps.

Most rows pass by, so the block is bound by reading its weights and by what lies between kernels.
Here it is one kernel that decides, four products that read each weight once for up to 16 rows, and
attention over pages. How many rows are kept is known on the device alone: products beyond them end
at once. What a product multiplies stands ready in the weights' type, so that its loop only loads
and multiplies. Knows nothing of models: it takes stacked tensors and numbers.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels import paged_triton
from depthmix.kernels.plan import Rules, Weights
from depthmix.kernels.stages import ROUTER_EPS, apply_gate, gelu, jit

# rows of a matrix product: the fewest that it takes
BLOCK_ROWS = tl.constexpr(16)
# how many times as many rows as the capacity asks for may come before attention slows down
SLACK = 2


class Tuning(NamedTuple):
    """How a kernel cuts up its weights; results differ by rounding only."""

    block_out: int = 16
    """Rows of weights of a program, a power of two from 16 on; of partners, of each."""
    block: int = 256
    """Columns that are loaded at a time, a power of two; a quarter of them where numbers have 32
    bits, which are multiplied in registers. A device reads at its full rate while about 40 KiB of
    weights are under way on each of its processors."""
    num_warps: int = 4
    """Each of them multiplies columns of its own, at least 16, and they are summed at the end."""
    num_stages: int = 4
    """One more than the blocks of columns that shared memory holds."""


TUNINGS = {
    "decide": Tuning(num_stages=6),
    "rotate": Tuning(block_out=32),
    "swiglu": Tuning(num_stages=3),
    "gelu": Tuning(num_stages=5),
    "store": Tuning(),
    "update": Tuning(num_stages=7),
}
"""By kernel, who decides and the kinds of `_multiply`: the fastest of eight on an H200 at width
2,048, but for `gelu`, which was not tried."""


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
    normed,
    part_logit,
    score,
    gate,
    index,
    slot,
    kept_row,
    count,
    arrivals,
    num_rows,
    first_tokens,
    eps,
    width: tl.constexpr,
    num_units: tl.constexpr,
    gate_kind: tl.constexpr,
    normalize: tl.constexpr,
    parts: tl.constexpr,
    block_units: tl.constexpr,
    block_parts: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    slices: tl.constexpr,
    num_stages: tl.constexpr,
):
    """Score rows; whoever comes last keeps some, in order, and gives them places.

    A program has sixteen rows and a part of the predictor's units, and norms as large a part of
    those rows' columns. Without a predictor the router's score decides.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
    real = row < num_rows
    lane = _spread_columns(block, slices)
    rows = x + row[None, :, None].to(tl.int64) * width + lane
    unit = part * block_units + tl.arange(0, block_units)
    if w_in is not None:
        # those beyond the last are it once more, and weigh nothing
        w_in += tl.minimum(unit, num_units - 1)[None, :, None].to(tl.int64) * width + lane
    square = tl.zeros((slices, BLOCK_ROWS, block // slices), tl.float32)
    total = tl.zeros((slices, BLOCK_ROWS, block // slices), tl.float32)
    units = tl.zeros((slices, block_units, BLOCK_ROWS), tl.float32)
    # said aloud: where there is no matrix product, Triton fetches ahead only when it is told to
    for column in tl.range(0, width, block, num_stages=num_stages):
        inside = lane + column < width
        given = tl.load(rows + column, mask=real[None, :, None] & inside, other=0.0)
        vector = given.to(tl.float32)
        square += vector * vector
        total += vector * tl.load(router + column + lane, mask=inside, other=0.0)
        if w_in is not None:
            tile = tl.load(w_in + column, mask=inside, other=0.0)
            given = tl.permute(given.to(tile.dtype), (0, 2, 1))
            units = tl.dot(tile, given, units, input_precision="ieee")
    mean = tl.sum(tl.sum(square, axis=2), axis=0) / width
    invert = tl.rsqrt(mean + ROUTER_EPS)
    if part == 0:
        own = tl.sum(tl.sum(total, axis=2), axis=0)
        if normalize:
            own *= invert
        tl.store(score + row, own, mask=real)
    if w_in is not None:
        hidden = gelu(tl.sum(units, axis=0) * invert[None, :])
        weight = tl.load(w_out + unit, mask=unit < num_units, other=0.0).to(tl.float32)
        logit = tl.sum(hidden * weight[:, None], axis=0)
        tl.store(part_logit + row * parts + part, logit, mask=real)
    tl.debug_barrier()
    num_programs = tl.num_programs(0) * parts
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
        tl.debug_barrier()
        everyone = tl.arange(0, block_rows)
        there = everyone < num_rows
        home = tl.load(cache_row + everyone, mask=there, other=-1)
        scores = tl.load(score + everyone, mask=there, other=0.0, cache_modifier=".cg")
        wish = scores
        if w_in is not None:
            number = tl.arange(0, block_parts)[None, :]
            logits = tl.load(
                part_logit + everyone[:, None] * parts + number,
                mask=there[:, None] & (number < parts),
                other=0.0,
                cache_modifier=".cg",
            )
            wish = tl.sum(logits, axis=1) + tl.load(bias).to(tl.float32)
        forced = tl.load(position + everyone, mask=there, other=0) < first_tokens
        kept = (home >= 0) & ((wish > 0) | forced)
        if previous is not None:
            kept = kept & (tl.load(previous + everyone, mask=there, other=-1) >= 0)
        place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
        num_kept = tl.sum(kept.to(tl.int32))
        tl.store(slot + everyone, tl.where(kept, place, -1).to(tl.int64), mask=there)
        tl.store(gate + everyone, apply_gate(scores, gate_kind), mask=there)
        nobody = tl.full((block_rows,), -1, tl.int64)
        tl.store(kept_row + everyone, nobody, mask=there & (everyone >= num_kept))
        tl.store(kept_row + place, home.to(tl.int64), mask=kept)
        tl.store(index + place, everyone, mask=kept)
        tl.store(count, num_kept)
        tl.store(arrivals, 0)
    # after the arrival, which would wait for what is stored before it
    scale = tl.rsqrt(mean + eps)[:, None]
    share: tl.constexpr = (width + parts - 1) // parts
    end = tl.minimum((part + 1) * share, width)
    for first in range(part * share, end, block):
        own = first + tl.arange(0, block)
        at = row[:, None].to(tl.int64) * width + own[None, :]
        inside = own < end
        vector = tl.load(x + at, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        vector *= scale * tl.load(norm + own, mask=inside, other=0.0).to(tl.float32)[None, :]
        vector = vector.to(normed.dtype.element_ty)
        tl.store(normed + at, vector, mask=real[:, None] & inside[None, :])


@jit
def _load_if(wanted: tl.constexpr, pointer, inside):
    """What stands inside, where it is wanted."""
    return tl.load(pointer, mask=inside, other=0.0) if wanted else 0.0


@jit
def _multiply(
    source,
    weight,
    out,
    index,
    count,
    x,
    gate,
    phase,
    norm,
    more,
    shaped,
    part_square,
    norm_heads,
    eps,
    width: tl.constexpr,
    num_out: tl.constexpr,
    kind: tl.constexpr,
    num_heads: tl.constexpr,
    num_rotated: tl.constexpr,
    half: tl.constexpr,
    parts: tl.constexpr,
    block_parts: tl.constexpr,
    block_out: tl.constexpr,
    block: tl.constexpr,
    slices: tl.constexpr,
):
    """weight · source for the kept rows, and what follows from it.

    `rotate` takes rows by `index`, pairs the halves of a head and turns queries and keys, after
    their norm where there is one; a program then has all of a head. `store` keeps the product as
    `more` in float32, and the sum s of x and it as the next one needs it: s · norm, and the sum of
    squares over this program's part of s. `swiglu` pairs gate and up rows, `gelu` has one of each,
    and both divide by the rms of s only after the product, which comes to the same. `update` adds
    gate · (more + product) to x.
    """
    paired: tl.constexpr = kind == "rotate" or kind == "swiglu"
    program = tl.program_id(0)
    head = 0
    most_out: tl.constexpr = half if kind == "rotate" else num_out
    lane_out = program * block_out + tl.arange(0, block_out)
    if kind == "rotate":
        blocks: tl.constexpr = (half + block_out - 1) // block_out
        head = program // blocks
        lane_out = program % blocks * block_out + tl.arange(0, block_out)
        weight += head.to(tl.int64) * 2 * half * width
        out += head * 2 * half
    inside_out = (lane_out < most_out)[:, None]
    lane = _spread_columns(block, slices)
    # rows beyond the last are it once more, so that loads need no mask for them
    weight += tl.minimum(lane_out, most_out - 1)[None, :, None].to(tl.int64) * width + lane
    partner = weight + most_out * width
    # volatile, or it would be read after the number of rows; beyond that they are any rows
    row = tl.load(index + tl.arange(0, BLOCK_ROWS), volatile=True)
    num_kept = tl.load(count)
    for first in range(0, num_kept, BLOCK_ROWS):
        place = first + tl.arange(0, BLOCK_ROWS)
        real = place < num_kept
        next_row = tl.load(index + place + BLOCK_ROWS)
        inside = real[None, :] & inside_out
        at = place[None, :] * num_out + lane_out[:, None]
        at_x = row[None, :].to(tl.int64) * num_out + lane_out[:, None]
        # what follows the product is asked for before it, and has arrived when the loop ends
        rotates: tl.constexpr = kind == "rotate"
        turn = phase + row[None, :] * 2 * half + lane_out[:, None]
        cos = _load_if(rotates, turn, inside)
        sin = _load_if(rotates, turn + half, inside)
        old = _load_if(kind == "store" or kind == "update", x + at_x, inside)
        scale = _load_if(kind == "store", norm + lane_out, lane_out < most_out)
        before = _load_if(kind == "update", more + at, inside)
        factor = _load_if(kind == "update", gate + row, real)
        number = tl.arange(0, block_parts)[:, None]
        there = real[None, :] & (number < parts)
        activates: tl.constexpr = kind == "swiglu" or kind == "gelu"
        squares = _load_if(activates, part_square + place[None, :] * parts + number, there)

        origin = row if kind == "rotate" else place
        rows = source + origin[None, :, None].to(tl.int64) * width + lane
        total = tl.zeros((slices, block_out, BLOCK_ROWS), tl.float32)
        second = tl.zeros((slices, block_out, BLOCK_ROWS), tl.float32)
        for column in range(0, width, block):
            if width % block == 0:
                tile = tl.load(weight + column)
                other = tl.load(partner + column) if paired else tile
                given = tl.load(rows + column, mask=real[None, :, None], other=0.0)
            else:
                within = lane + column < width
                tile = tl.load(weight + column, mask=within, other=0.0)
                other = tl.load(partner + column, mask=within, other=0.0) if paired else tile
                given = tl.load(rows + column, mask=real[None, :, None] & within, other=0.0)
            given = tl.permute(given, (0, 2, 1))
            total = tl.dot(tile, given, total, input_precision="ieee")
            if paired:
                second = tl.dot(other, given, second, input_precision="ieee")

        total = tl.sum(total, axis=0)
        if paired:
            second = tl.sum(second, axis=0)
        if kind == "rotate":
            if head < num_rotated:
                if norm_heads is not None:
                    energy = tl.where(inside, total * total + second * second, 0.0)
                    invert = tl.rsqrt(tl.sum(energy, axis=0) / (2 * half) + eps)[None, :]
                    # those of queries, then those of keys
                    weights = norm_heads + (head // num_heads) * 2 * half + lane_out
                    here = lane_out < half
                    scale_low = tl.load(weights, mask=here, other=0.0).to(tl.float32)
                    scale_high = tl.load(weights + half, mask=here, other=0.0).to(tl.float32)
                    total *= invert * scale_low[:, None]
                    second *= invert * scale_high[:, None]
                turned = total * cos - second * sin
                second = second * cos + total * sin
                total = turned
            tl.store(out + at + half, second.to(out.dtype.element_ty), mask=inside)
        elif kind == "store":
            new = tl.where(inside, old.to(tl.float32) + total, 0.0)
            ready = new * scale.to(tl.float32)[:, None]
            tl.store(shaped + at, ready.to(shaped.dtype.element_ty), mask=inside)
            square = tl.sum(new * new, axis=0)
            tl.store(part_square + place * parts + program, square, mask=real)
        elif kind == "update":
            total = old.to(tl.float32) + factor[None, :] * (before + total)
            at = at_x
        else:
            invert = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)[None, :]
            total *= invert
            if kind == "swiglu":
                total = total * tl.sigmoid(total) * (second * invert)
            else:
                total = gelu(total)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
        row = next_row


class RoutedRows:
    """The routed blocks of a step of up to `num_rows` sequences; made to be captured."""

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        num_rows: int,
        capacity: float,
        tunings: Mapping[str, Tuning] | None = None,
    ) -> None:
        """`tunings` take the place of some of `TUNINGS`."""
        self.weights, self.rules, self.num_rows = weights, rules, num_rows
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.tunings = {**TUNINGS, **(tunings or {})}
        self.norm_heads = None
        if weights.norm_query is not None and weights.norm_key is not None:
            self.norm_heads = torch.stack([weights.norm_query, weights.norm_key], dim=1)
            half, tuning = self.norm_heads.shape[2] // 2, self.tunings["rotate"]
            block_out = max(tuning.block_out, triton.next_power_of_2(half))
            self.tunings["rotate"] = tuning._replace(block_out=block_out)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            # not every build of torch tells
            room = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
            self.tunings = {k: limit_stages(k, t, room) for k, t in self.tunings.items()}
        self.width, self.mlp_width = weights.embedding.shape[1], weights.w_mlp_out.shape[2]
        self.num_projected = weights.w_qkv.shape[1]
        self.kind_in = "swiglu" if weights.w_in.shape[1] == 2 * self.mlp_width else "gelu"
        self.busy = min(num_rows, max(1, round(SLACK * capacity * num_rows)))
        w_in = weights.predictor_in if rules.selector == "predictor" else None
        self.num_units = 0 if w_in is None else w_in.shape[1]

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        # programs that share out a row: the predictor's units, and the sum of its squares
        self.parts = max(1, triton.cdiv(self.num_units, self.tunings["decide"].block_out))
        self.square_parts = triton.cdiv(self.width, self.tunings["store"].block_out)
        self.part_logit = make(num_rows, self.parts)
        self.part_square = make(num_rows, self.square_parts)
        self.score, self.gate = make(num_rows), make(num_rows)
        self.count, self.arrivals = (make(1, dtype=torch.int32) for _ in range(2))
        # products look at sixteen places beyond the last
        self.index = make(num_rows + 2 * BLOCK_ROWS.value, dtype=torch.int32)
        self.kept_row = make(num_rows, dtype=torch.int64)
        self.normed, self.shaped = (make(num_rows, self.width, dtype=dtype) for _ in range(2))
        self.qkv = make(num_rows, self.num_projected, dtype=dtype)
        self.more = make(num_rows, self.width)
        self.hidden = make(num_rows, self.mlp_width, dtype=dtype)

    def __call__(
        self,
        x: Float[Tensor, "B D"],
        layer: int,
        phase: Float[Tensor, "B 2 half"],
        position: Int[Tensor, " B"],
        cache_row: Int[Tensor, " B"],
        previous: Int[Tensor, " B"] | None,
        key_pages: Float[Tensor, "G pages page H"],
        value_pages: Float[Tensor, "G pages page H"],
        table: Int[Tensor, "rows most"],
        lengths: Int[Tensor, " rows"],
    ) -> Int[Tensor, " B"]:
        """Update x in place; the place of each row among those kept, -1 where it passed by.

        `cache_row` is -1 where there is no token; `previous` are the last routed block's places,
        where who left does not return.
        """
        slot = self.decide(x, layer, position, cache_row, previous)
        self.multiply("rotate", self.normed, layer, x, phase)
        num_groups, head_width = key_pages.shape[0], key_pages.shape[3]
        queries, keys, values = self.qkv.unflatten(1, (-1, head_width)).split(
            [self.rules.num_heads, num_groups, num_groups], dim=1
        )
        mixed = paged_triton.attend_pages(
            queries,
            keys,
            values,
            self.kept_row,
            self.kept_row,
            key_pages,
            value_pages,
            table,
            lengths,
            busy=self.busy,
        )
        self.multiply("store", mixed, layer, x)
        self.multiply(self.kind_in, self.shaped, layer, x)
        self.multiply("update", self.hidden, layer, x)
        return slot

    def decide(
        self,
        x: Float[Tensor, "B D"],
        layer: int,
        position: Int[Tensor, " B"],
        cache_row: Int[Tensor, " B"],
        previous: Int[Tensor, " B"] | None,
    ) -> Int[Tensor, " B"]:
        """Choose rows and give them places, which are returned; norm all of them."""
        weights, rules = self.weights, self.rules
        route = rules.routed_layers.index(layer)
        assert weights.router is not None
        slot = torch.empty(self.num_rows, device=x.device, dtype=torch.int64)
        heads = [weights.predictor_in, weights.predictor_out, weights.predictor_bias]
        w_in, w_out, bias = (t[route] if t is not None and self.num_units else None for t in heads)
        tuning = self.tunings["decide"]
        _decide[(triton.cdiv(self.num_rows, BLOCK_ROWS.value), self.parts)](
            x,
            cache_row,
            previous,
            position,
            weights.router[route],
            w_in,
            w_out,
            bias,
            weights.norm_attention[layer],
            self.normed,
            self.part_logit,
            self.score,
            self.gate,
            self.index,
            slot,
            self.kept_row,
            self.count,
            self.arrivals,
            self.num_rows,
            rules.first_tokens,
            rules.norm_eps,
            self.width,
            self.num_units,
            rules.gate,
            rules.normalize,
            self.parts,
            block_units=tuning.block_out,
            block_parts=triton.next_power_of_2(self.parts),
            block_rows=triton.next_power_of_2(self.num_rows),
            **_fit_columns(tuning, self.width, x.element_size()),
        )
        return slot

    def multiply(
        self, kind: str, source: Tensor, layer: int, x: Tensor, phase: Tensor | None = None
    ) -> None:
        """One of the block's products, with what follows from it; see `_multiply`."""
        weights = self.weights
        stacked, out = {
            "rotate": (weights.w_qkv, self.qkv),
            "store": (weights.w_attn_out, self.more),
            self.kind_in: (weights.w_in, self.hidden),
            "update": (weights.w_mlp_out, x),
        }[kind]
        weight, tuning = stacked[layer], self.tunings[kind]
        num_out, width = out.shape[1], weight.shape[1]
        num_programs, half, num_rotated = triton.cdiv(num_out, tuning.block_out), 1, 0
        if phase is not None:
            half, num_heads = phase.shape[2], self.rules.num_heads
            num_all = num_out // (2 * half)
            num_rotated = num_heads + (num_all - num_heads) // 2
            num_programs = num_all * triton.cdiv(half, tuning.block_out)
        _multiply[(num_programs,)](
            source,
            weight,
            out,
            self.index,
            self.count,
            x,
            self.gate,
            weights.phase_table if phase is None else phase,
            weights.norm_mlp[layer],
            self.more,
            self.shaped,
            self.part_square,
            None if self.norm_heads is None or phase is None else self.norm_heads[layer],
            self.rules.norm_eps,
            width,
            num_out,
            kind,
            self.rules.num_heads,
            num_rotated,
            half,
            self.square_parts,
            block_parts=triton.next_power_of_2(self.square_parts),
            block_out=tuning.block_out,
            **_fit_columns(tuning, width, weight.element_size()),
        )


def limit_stages(kind: str, tuning: Tuning, room: int) -> Tuning:
    """The same with no more blocks of columns than a program's shared memory of `room` bytes holds.

    Those of an H200 hold 227 KiB, those of a desktop card 99.
    """
    num_rows = tuning.block_out * (2 if kind in ("rotate", "swiglu") else 1) + BLOCK_ROWS.value
    # 16 bits each; where numbers have more, a block has fewer columns. The router has 32.
    num_bytes = 2 * tuning.block * (num_rows + (2 if kind == "decide" else 0))
    return tuning._replace(num_stages=min(tuning.num_stages, 1 + room // num_bytes))


def _fit_columns(tuning: Tuning, width: int, element_size: int) -> dict[str, int]:
    """A launch's columns: no more than there are, but 16 for each warp at least."""
    block = min(tuning.block * 4 // element_size**2, triton.next_power_of_2(width))
    return {
        "block": max(block, 16 * tuning.num_warps),
        "slices": tuning.num_warps,
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
    }
