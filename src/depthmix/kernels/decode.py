"""One token of one sequence through the whole model, in one launch that stays on the device.

A decoding step of one sequence is bound by the reading of weights, and then by what lies between
kernels. Here all programs live as long as the step does. They share out the rows of each product
and meet at a barrier after it: a block costs five barriers, and one that is skipped costs none,
because while its predictor is asked the next block's queries and keys are already projected.

Two rules keep the programs together. Whether a block runs is computed by each of them, from the
same numbers in the same order, so all of them meet at the same barriers. And a buffer is written
again only after a barrier that lies behind its last reading.

Owns the launch and its buffers. Knows nothing of models: it takes stacked tensors and numbers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels.stages import (
    Cut,
    Heads,
    activate,
    add_update,
    apply_gate,
    arrive,
    attend,
    decide,
    foresee,
    jit,
    load_context,
    load_decider,
    load_first_tile,
    load_nothing,
    load_tile,
    mean_square,
    mix_heads,
    project,
    score_token,
    share_rows,
    wait,
)

GATES = ("raw", "sigmoid", "tanh1", "unit")
SELECTORS = ("router", "predictor", "all")


class Plan(NamedTuple):
    """Everything that the kernel is compiled for."""

    num_layers: int
    num_programs: int
    width: int
    block: int
    """Elements of x that are read at a time where all of it is."""
    heads: Heads
    qkv: Cut
    attn_out: Cut
    mlp_in: Cut
    mlp_out: Cut
    head: Cut
    predictor: Cut
    predictor_block: int
    selector: str
    gate: str
    normalize: bool
    early_exit: bool


@jit
def _decode(
    token,
    position,
    table,
    table_stride,
    lengths,
    lengths_stride,
    logits,
    taken,
    key_pages,
    value_pages,
    embedding,
    norm_attention,
    w_qkv,
    norm_query,
    norm_key,
    w_attn_out,
    norm_mlp,
    w_in,
    w_mlp_out,
    norm,
    head,
    phase_table,
    route_of_layer,
    router,
    predictor_in,
    predictor_out,
    predictor_bias,
    x,
    qkv,
    mixed,
    update,
    hidden,
    foreseen,
    part_top,
    part_sum,
    part_out,
    arrivals,
    counter,
    eps,
    first_tokens,
    plan: tl.constexpr,
):
    program = tl.program_id(0)
    gate_kind: tl.constexpr = plan.gate
    heads: tl.constexpr = plan.heads
    qkv_cut: tl.constexpr = plan.qkv
    out_cut: tl.constexpr = plan.attn_out
    in_cut: tl.constexpr = plan.mlp_in
    down_cut: tl.constexpr = plan.mlp_out
    head_cut: tl.constexpr = plan.head
    unit_cut: tl.constexpr = plan.predictor
    qkv_size: tl.constexpr = qkv_cut.num_rows * plan.width
    out_size: tl.constexpr = out_cut.width * plan.width
    in_size: tl.constexpr = (in_cut.num_rows + in_cut.partner) * plan.width
    units: tl.constexpr = unit_cut.num_rows
    down_size: tl.constexpr = down_cut.width * plan.width
    at = tl.load(position)
    phase = phase_table + at * heads.width
    forced = (at < first_tokens).to(tl.int32)
    # everybody writes the same x, and before the first barrier: nobody need wait for it
    embedding += tl.load(token) * plan.width
    for column in range(0, plan.width, plan.block):
        lane = column + tl.arange(0, plan.block)
        vector = tl.load(embedding + lane, mask=lane < plan.width, other=0.0).to(tl.float32)
        tl.store(x + lane, vector, mask=lane < plan.width)
    tl.debug_barrier()

    # arrivals of each program so far, and whether it has yet to wait for the last one
    stage = 0
    pending = 0
    # the block whose queries, keys and values stand in `qkv`
    ready = -1
    alive = 1
    # the first keys and values of the block in `qkv`
    key, value = load_nothing(key_pages, heads), load_nothing(value_pages, heads)
    next_route = tl.load(route_of_layer)
    for layer in range(plan.num_layers):
        layer_64 = tl.cast(layer, tl.int64)
        route = next_route
        # behind the last block stands a routed one: there is nothing to project ahead
        next_route = tl.load(route_of_layer + layer + 1)
        length = tl.load(lengths + layer_64 * lengths_stride)
        pages = table + layer_64 * table_stride
        kept = 1
        score = 0.0
        # whose queries and keys come next, as far as that is known: a block that asks its router
        # or its predictor is most often skipped
        target = layer
        if plan.selector != "all":
            target = tl.where(route >= 0, -1, layer)
        if plan.selector == "predictor":
            target = tl.where((route >= 0) & (next_route < 0), layer + 1, target)
        # weights wait for nobody: the first ones are under way while the others arrive
        w_target = w_qkv + tl.cast(target, tl.int64) * qkv_size
        first, end = share_rows(qkv_cut)
        end = tl.where((target == ready) | (target < 0), 0, end)
        tile = load_tile(w_target, first, end, 0, qkv_cut)
        if plan.selector == "predictor":
            w_units = predictor_in + tl.maximum(route, 0) * units * plan.width
            first, end = share_rows(unit_cut)
            unit_tile = load_tile(w_units, first, tl.where(route >= 0, end, 0), 0, unit_cut)
        if pending == 1:
            wait(counter, stage * plan.num_programs)
            pending = 0

        if route >= 0:
            if plan.early_exit:
                kept = alive
            if plan.selector == "router":
                score = score_token(
                    x, router + route * plan.width, plan.width, plan.block, plan.normalize
                )
                kept = kept & ((score > 0).to(tl.int32) | forced)
            if plan.selector == "predictor":  # noqa: SIM102
                if (kept == 1) & (forced == 0):
                    # a row for each block: somebody may still be reading the last one's
                    row = foreseen + route * units
                    square = mean_square(x, None, unit_cut)
                    foresee(unit_tile, w_units, x, square, row, unit_cut)
                    if target > layer:
                        norm_row = norm_attention + (layer_64 + 1) * plan.width
                        project(tile, w_target, x, square, norm_row, qkv, eps, qkv_cut)
                        ready = target
                    stage += 1
                    arrive(counter)
                    out_row = predictor_out + route * units
                    weight_P, bias = load_decider(
                        out_row, predictor_bias + route, units, plan.predictor_block
                    )
                    if target > layer:
                        # what is stored already waits for nobody either
                        length_next = tl.load(lengths + (layer_64 + 1) * lengths_stride)
                        pages_next = pages + table_stride
                        key, value = load_context(
                            key_pages, value_pages, pages_next, length_next, heads
                        )
                    wait(counter, stage * plan.num_programs)
                    kept = decide(row, weight_P, bias, units, plan.predictor_block)
            alive = kept
            if program == 0:
                tl.store(taken + route, kept)

        if kept == 1:
            gate = 1.0
            if router is not None:  # noqa: SIM102
                if route >= 0:
                    if plan.selector != "router":
                        row = router + route * plan.width
                        score = score_token(x, row, plan.width, plan.block, plan.normalize)
                    gate = apply_gate(score, gate_kind)
            if ready != layer:
                w_layer = w_qkv + layer_64 * qkv_size
                if target != layer:
                    tile = load_first_tile(w_layer, qkv_cut)
                norm_row = norm_attention + layer_64 * plan.width
                square = mean_square(x, None, qkv_cut)
                project(tile, w_layer, x, square, norm_row, qkv, eps, qkv_cut)
                stage += 1
                arrive(counter)
                key, value = load_context(key_pages, value_pages, pages, length, heads)
                wait(counter, stage * plan.num_programs)

            attend(
                key,
                value,
                qkv,
                phase,
                norm_query,
                norm_key,
                layer,
                eps,
                key_pages,
                value_pages,
                pages,
                length,
                mixed,
                part_top,
                part_sum,
                part_out,
                arrivals,
                heads,
            )
            stage += 1
            arrive(counter)
            w_out = w_attn_out + layer_64 * out_size
            out_tile = load_first_tile(w_out, out_cut)
            wait(counter, stage * plan.num_programs)
            # everybody has read the length
            if program == 0:
                tl.store(lengths + layer_64 * lengths_stride, length + 1)

            mix_heads(out_tile, w_out, mixed, update, out_cut)
            stage += 1
            arrive(counter)
            w_up = w_in + layer_64 * in_size
            in_tile = load_first_tile(w_up, in_cut)
            wait(counter, stage * plan.num_programs)

            norm_row = norm_mlp + layer_64 * plan.width
            activate(in_tile, w_up, x, update, norm_row, hidden, eps, in_cut)
            stage += 1
            arrive(counter)
            w_down = w_mlp_out + layer_64 * down_size
            down_tile = load_first_tile(w_down, down_cut)
            wait(counter, stage * plan.num_programs)

            add_update(down_tile, w_down, hidden, update, gate, x, down_cut)
            stage += 1
            arrive(counter)
            pending = 1
            ready = -1
            # so that no register holds them until then
            key, value = load_nothing(key_pages, heads), load_nothing(value_pages, heads)

    head_tile = load_first_tile(head, head_cut)
    if pending == 1:
        wait(counter, stage * plan.num_programs)
    project(head_tile, head, x, mean_square(x, None, head_cut), norm, logits, eps, head_cut)
    # the last to come here leaves the counters as the next launch needs them: all have passed
    # every barrier, so nobody looks at them any more
    tl.debug_barrier()
    if tl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu") == plan.num_programs - 1:
        tl.store(counter, 0)
        tl.store(counter + 1, 0)


class Weights(NamedTuple):
    """A model's tensors; those of its L blocks are stacked. V, D, H, F: see `depthmix.nn`."""

    embedding: Float[Tensor, "V D"]
    phase_table: Float[Tensor, "positions 2 half"]
    """Rotary cosines and sines, float32."""
    norm_attention: Float[Tensor, "L D"]
    w_qkv: Float[Tensor, "L heads D"]
    """Rows of the query heads, then of the key heads, then of the value heads."""
    w_attn_out: Float[Tensor, "L D mixed"]
    norm_mlp: Float[Tensor, "L D"]
    w_in: Float[Tensor, "L hidden D"]
    """F gate rows, then F up rows (SwiGLU); or F rows alone (GELU)."""
    w_mlp_out: Float[Tensor, "L D F"]
    norm: Float[Tensor, " D"]
    head: Float[Tensor, "V D"]
    norm_query: Float[Tensor, "L H"] | None = None
    norm_key: Float[Tensor, "L H"] | None = None
    router: Float[Tensor, "R D"] | None = None
    """Of the R routed blocks, in order; float32."""
    predictor_in: Float[Tensor, "R P D"] | None = None
    predictor_out: Float[Tensor, "R P"] | None = None
    predictor_bias: Float[Tensor, " R"] | None = None


class Rules(NamedTuple):
    """What the tensors do not say."""

    num_heads: int
    norm_eps: float = 1e-6
    routed_layers: tuple[int, ...] = ()
    """Indices of the routed blocks, in order."""
    selector: str = "all"
    """Who decides: `router`, `predictor`, or `all` for every block."""
    gate: str = "raw"
    """What multiplies a routed block's update: raw, sigmoid, tanh1 or unit."""
    normalize: bool = True
    """The router scores x / rms(x)."""
    first_tokens: int = 0
    """Positions before this one are always kept."""
    early_exit: bool = False
    """Who skipped a routed block skips all later ones."""


class Tuning(NamedTuple):
    """How the work is cut up; results differ by rounding only."""

    num_programs: int
    """All of them must fit on the device at once."""
    num_warps: int = 4
    max_registers: int = 255
    """Of a thread: with all of them, two programs of four warps fit on a processor."""
    tile: int = 16384
    """Elements of a weight tile: at 4 warps and 16,384 of bf16, 64 registers of a thread."""
    min_columns: int = 2048
    """Columns of a tile, where rows are that long; fewer rows a program make it wider."""
    chunk: int = 32
    """Tokens that attention reads at a time."""
    max_splits: int = 16
    """Parts of the context that are attended to side by side."""


def cut_matrix(
    num_rows: int, width: int, dtype: torch.dtype, tuning: Tuning, *, partner: int = 0
) -> Cut:
    """Tiles for a matrix: no more rows than a program has, and wide where those are few."""
    longest = max(16, triton.next_power_of_2(width))
    own = triton.next_power_of_2(-(-num_rows // tuning.num_programs)) * (2 if partner else 1)
    columns = min(longest, max(16, tuning.min_columns, tuning.tile // own))
    rows = min(own, max(2 if partner else 1, tuning.tile // columns))
    step, padded = rows // 2 if partner else rows, -(-width // columns) * columns
    pack = 2 if dtype.itemsize == 2 and width % 2 == 0 else 1
    return Cut(num_rows, width, rows, columns, partner, tuning.num_programs, step, padded, pack)


def choose_tuning(device: torch.device, width: int, num_heads: int) -> Tuning:
    """What was fastest on an H200 (results/decode.md); one program in the interpreter."""
    if device.type != "cuda":
        # programs come one after another there, so a second one would be waited for in vain
        return Tuning(num_programs=1)
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    num_programs = 2 * num_processors
    # no program has a second head to attend with while others have none
    splits = triton.next_power_of_2(max(1, num_programs // num_heads) + 1) // 2
    return Tuning(num_programs, chunk=32 if width >= 2048 else 16, max_splits=min(splits, 64))


class DecodeStep:
    """Decodes one token of one sequence: one launch, no host work, made to be captured.

    Every argument of a call is read on the device, so a captured launch can be replayed after
    the token, the position and the tables were changed in place. `logits` and `taken` (1 for each
    routed block that ran) are overwritten by each call. Two calls of one step must not overlap,
    and a launch that was broken off leaves a step that cannot be used again.
    """

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        key_pages: Float[Tensor, "pages G page_size H"],
        value_pages: Float[Tensor, "pages G page_size H"],
        tuning: Tuning | None = None,
    ) -> None:
        device = weights.embedding.device
        self.weights, self.rules = weights, rules
        self.key_pages, self.value_pages = key_pages, value_pages
        self.tuning = tuning or choose_tuning(device, weights.embedding.shape[1], rules.num_heads)
        _check(weights, rules, key_pages, value_pages, self.tuning)
        self.plan = make_plan(weights, rules, key_pages, self.tuning)
        plan = self.plan

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=torch.float32)

        route_of_layer = [-1] * plan.num_layers + [0]
        for route, layer in enumerate(rules.routed_layers):
            route_of_layer[layer] = route
        self.route_of_layer = torch.tensor(route_of_layer, device=device, dtype=torch.int32)
        num_routes = len(rules.routed_layers)
        self.logits = make(plan.head.num_rows)
        self.taken = torch.zeros(num_routes, device=device, dtype=torch.int32)
        parts = (plan.heads.num_heads, plan.heads.max_splits)
        self._scratch = (
            make(plan.width),
            make(plan.qkv.num_rows),
            make(plan.attn_out.width),
            make(plan.width),
            make(plan.mlp_out.width),
            make(num_routes, plan.predictor.num_rows),
            make(*parts),
            make(*parts),
            make(*parts, plan.heads.width),
            torch.zeros(plan.heads.num_heads, device=device, dtype=torch.int32),
            torch.zeros(2, device=device, dtype=torch.int32),
        )

    def __call__(
        self,
        token: Int[Tensor, ""] | Int[Tensor, " 1"],
        position: Int[Tensor, ""] | Int[Tensor, " 1"],
        table: Int[Tensor, "L max_pages"],
        lengths: Int[Tensor, " L"],
    ) -> Float[Tensor, " V"]:
        """Logits of the next token; the keys and values of `token` are stored where it ran.

        `table` names each block's pages in order, `lengths` how many tokens are stored in them
        and counts the new one; both int32, of any stride between blocks. A page for the new token
        must stand in the table already.
        """
        if table.stride(1) != 1:
            raise ValueError("table must be contiguous along a block's pages")
        for name, given in (("token", token), ("position", position)):
            if given.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, not {given.dtype}")
        for name, given in (("table", table), ("lengths", lengths)):
            if given.dtype != torch.int32:
                raise ValueError(f"{name} must be int32, not {given.dtype}")
            if given.shape[0] != self.plan.num_layers:
                raise ValueError(
                    f"{name} must have one entry for each of the {self.plan.num_layers} blocks, "
                    f"not {given.shape[0]}"
                )
        weights = self.weights
        options = {}
        if token.is_cuda:
            options = {"launch_cooperative_grid": True, "maxnreg": self.tuning.max_registers}
        _decode[(self.plan.num_programs,)](
            token,
            position,
            table,
            table.stride(0),
            lengths,
            lengths.stride(0),
            self.logits,
            self.taken,
            self.key_pages,
            self.value_pages,
            weights.embedding,
            weights.norm_attention,
            weights.w_qkv,
            weights.norm_query,
            weights.norm_key,
            weights.w_attn_out,
            weights.norm_mlp,
            weights.w_in,
            weights.w_mlp_out,
            weights.norm,
            weights.head,
            weights.phase_table,
            self.route_of_layer,
            weights.router,
            weights.predictor_in,
            weights.predictor_out,
            weights.predictor_bias,
            *self._scratch,
            self.rules.norm_eps,
            self.rules.first_tokens,
            plan=self.plan,
            num_warps=self.tuning.num_warps,
            # tiles are asked for ahead by hand
            num_stages=1,
            **options,
        )
        return self.logits


def make_plan(
    weights: Weights, rules: Rules, pages: Float[Tensor, "pages G page_size H"], tuning: Tuning
) -> Plan:
    """The kernel's constants from the shapes of a model's tensors."""
    num_layers, num_projected, width = weights.w_qkv.shape
    num_classes, mlp_width = weights.head.shape[0], weights.w_mlp_out.shape[2]
    dtype = weights.embedding.dtype
    num_units = 1 if weights.predictor_in is None else weights.predictor_in.shape[1]
    partner = mlp_width if weights.w_in.shape[1] == 2 * mlp_width else 0
    _, num_kv_heads, page_size, head_width = pages.shape
    group = rules.num_heads // num_kv_heads
    heads = Heads(
        num_heads=rules.num_heads,
        num_kv_heads=num_kv_heads,
        width=head_width,
        page_size=page_size,
        chunk=tuning.chunk,
        max_splits=tuning.max_splits,
        num_programs=tuning.num_programs,
        group=group,
    )
    return Plan(
        num_layers=num_layers,
        num_programs=tuning.num_programs,
        width=width,
        block=min(triton.next_power_of_2(width), 2048),
        heads=heads,
        qkv=cut_matrix(num_projected, width, dtype, tuning),
        attn_out=cut_matrix(width, weights.w_attn_out.shape[2], dtype, tuning),
        mlp_in=cut_matrix(mlp_width, width, dtype, tuning, partner=partner),
        mlp_out=cut_matrix(width, mlp_width, dtype, tuning),
        head=cut_matrix(num_classes, width, dtype, tuning),
        predictor=cut_matrix(num_units, width, dtype, tuning),
        predictor_block=triton.next_power_of_2(num_units),
        selector=rules.selector if rules.routed_layers else "all",
        gate=rules.gate,
        normalize=rules.normalize,
        early_exit=rules.early_exit,
    )


def _check(
    weights: Weights, rules: Rules, key_pages: Tensor, value_pages: Tensor, tuning: Tuning
) -> None:
    num_layers, width = weights.norm_attention.shape
    num_kv_heads, head_width = key_pages.shape[1], key_pages.shape[3]
    mlp_width = weights.w_mlp_out.shape[2]
    pages = (("key_pages", key_pages), ("value_pages", value_pages))
    for name, tensor in (*weights._asdict().items(), *pages):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if head_width < 16 or head_width & (head_width - 1):
        raise ValueError(f"the head width must be a power of two from 16 on, not {head_width}")
    if rules.num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads = {rules.num_heads} must be a multiple of the pages' {num_kv_heads} heads"
        )
    shapes = {
        "phase_table": (weights.phase_table.shape[0], 2, head_width // 2),
        "norm_attention": (num_layers, width),
        "w_qkv": (num_layers, (rules.num_heads + 2 * num_kv_heads) * head_width, width),
        "w_attn_out": (num_layers, width, rules.num_heads * head_width),
        "norm_mlp": (num_layers, width),
        "w_in": (num_layers, (1 if weights.w_in.shape[1] == mlp_width else 2) * mlp_width, width),
        "w_mlp_out": (num_layers, width, mlp_width),
        "norm": (width,),
        "head": tuple(weights.embedding.shape),
        "norm_query": (num_layers, head_width),
        "norm_key": (num_layers, head_width),
        "router": (len(rules.routed_layers), width),
    }
    for name, shape in shapes.items():
        tensor = getattr(weights, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, not {tuple(tensor.shape)}")
    if value_pages.shape != key_pages.shape or value_pages.dtype != key_pages.dtype:
        raise ValueError("value_pages must have the shape and the type of key_pages")
    if rules.gate not in GATES:
        raise ValueError(f"there is no gate '{rules.gate}': use one of {', '.join(GATES)}")
    if rules.selector not in SELECTORS:
        raise ValueError(
            f"there is no selector '{rules.selector}': use one of {', '.join(SELECTORS)}"
        )
    if rules.routed_layers and weights.router is None:
        raise ValueError("routed_layers need the router's weights: give `router`")
    if rules.routed_layers and rules.selector == "predictor" and weights.predictor_in is None:
        raise ValueError(
            "selector 'predictor' needs the predictor's weights: give them, or use 'router'"
        )
    for name in ("tile", "min_columns", "chunk", "max_splits"):
        value = getattr(tuning, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{name} must be a power of two, not {value}")
