"""One token of one sequence through the whole model, in a single persistent launch.

Decoding one sequence is bound first by reading the weights, and then by the gaps between kernels.
Here all programs live for the whole step. They divide the rows of each product among themselves
and synchronize at a barrier after it: a block costs five barriers, and a skipped block costs none,
because the next block's queries and keys are projected while the predictor is evaluated.

Two rules keep the programs in step. Each of them computes whether a block runs, from the same
numbers in the same order, so all of them reach the same barriers. And a buffer is overwritten only
after a barrier that follows its last read.

Owns the launch and its buffers. Knows nothing of models: it takes stacked tensors and numbers.
"""

import torch
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels.decode.attention import attend, find_context, load_context, load_nothing
from depthmix.kernels.decode.plan import (
    Rules,
    StepTuning,
    Weights,
    check_plan,
    choose_tuning,
    make_plan,
)
from depthmix.kernels.decode.stages import (
    LOWEST_RANK,
    activate,
    add_update,
    apply_gate,
    arrive,
    decide,
    find_ranked,
    foresee,
    jit,
    load_decider,
    load_first_tile,
    load_norm,
    load_stream,
    load_tile,
    load_unit,
    mix_heads,
    project,
    score_token,
    share_rows,
    wait,
)


@jit
def _load_numbers(layer, route_of_layer, lengths, lengths_stride, plan: tl.constexpr):
    """Load the next block's index among routed blocks, or -1, and its number of stored tokens."""
    following = tl.cast(tl.minimum(layer + 1, plan.num_layers - 1), tl.int64)
    return tl.load(route_of_layer + layer + 1), tl.load(lengths + following * lengths_stride)


@jit
def _decode(
    token,
    position,
    cache_row,
    table,
    table_stride,
    table_row_stride,
    lengths,
    lengths_stride,
    logits,
    told,
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
    best,
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
    if cache_row is not None:
        home = tl.load(cache_row).to(tl.int64)
        table += home * table_row_stride
        lengths += home
    at = tl.load(position)
    phase = phase_table + at * heads.width
    forced = (at < first_tokens).to(tl.int32)
    # every program writes the same x before the first barrier, so none has to wait for it
    embedding += tl.load(token) * plan.width
    for column in range(0, plan.width, plan.block):
        lane = column + tl.arange(0, plan.block)
        vector = tl.load(embedding + lane, mask=lane < plan.width, other=0.0).to(tl.float32)
        tl.store(x + lane, vector, mask=lane < plan.width)
    tl.debug_barrier()

    # each program's arrivals so far, and whether it still has to wait for the last one
    stage = 0
    pending = 0
    # the block whose queries, keys and values are in `qkv`
    ready = -1
    alive = 1
    # the first keys and values of the block in `qkv`
    key, value = load_nothing(key_pages, heads), load_nothing(value_pages, heads)
    # these numbers are loaded one block ahead, because addresses depend on them
    layer = 0
    route, length = tl.load(route_of_layer), tl.load(lengths)
    next_route, next_length = _load_numbers(layer, route_of_layer, lengths, lengths_stride, plan)
    # whether the block is already known to run
    settled = 0
    # A block that turns out to be kept takes a second iteration, for its queries and keys: the same
    # code serves both, because the loop has to fit into the instruction cache.
    while layer < plan.num_layers:
        kept = 1
        asks = 0
        # the block to project next: a block that has to decide is usually skipped
        target = layer
        if plan.selector != "all":
            if plan.early_exit:
                kept = tl.where(route >= 0, alive, 1)
            asks = ((route >= 0) & (settled == 0) & (kept == 1) & (forced == 0)).to(tl.int32)
            ahead = -1
            if plan.selector == "predictor":
                # entries past the last block count as routed: nothing to project ahead
                ahead = tl.where(next_route < 0, layer + 1, -1)
            target = tl.where(asks == 1, ahead, tl.where(kept == 1, layer, -1))
        wanted = (target >= 0) & (target != ready)
        target_64 = tl.cast(tl.maximum(target, 0), tl.int64)
        # weights have no dependencies: their first loads are in flight while other programs arrive
        w_target = w_qkv + target_64 * qkv_size
        norm_row = norm_attention + target_64 * plan.width
        scale_D = load_norm(norm_row, wanted, qkv_cut)
        first, end = share_rows(qkv_cut)
        tile = load_tile(w_target, first, tl.where(wanted, end, 0), 0, qkv_cut)
        held = tl.where(target == layer, length, next_length)
        context = find_context(table + target_64 * table_stride, held, wanted, heads)
        if plan.selector == "predictor":
            route_64 = tl.cast(tl.maximum(route, 0), tl.int64)
            w_units = predictor_in + route_64 * units * plan.width
            first, end = share_rows(unit_cut)
            unit = load_unit(w_units, first, tl.where(asks == 1, end, 0), 0, unit_cut)
        if pending == 1:
            wait(counter, stage * plan.num_programs)
            pending = 0

        if plan.selector == "router":  # noqa: SIM102
            if asks == 1:
                row = router + route * plan.width
                score = score_token(x, row, plan.width, plan.block, plan.normalize)
                kept = (score > 0).to(tl.int32)
        meets = wanted
        if plan.selector == "predictor":
            meets = wanted | (asks == 1)
        if meets:
            stream, square = load_stream(x, None, qkv_cut)
            if plan.selector == "predictor":  # noqa: SIM102
                # one row per block: other programs may still be reading the previous one's
                if asks == 1:
                    row = foreseen + route_64 * units
                    foresee(unit, w_units, x, stream, square, row, unit_cut)
            if wanted:
                project(tile, w_target, x, stream, square, scale_D, norm_row, qkv, eps, qkv_cut)
                ready = target
            stage += 1
            arrive(counter)
            if plan.selector == "predictor":
                weight_P, bias = load_decider(
                    predictor_out + route_64 * units,
                    predictor_bias + route_64,
                    units,
                    plan.predictor_block,
                )
            if wanted:
                # stored keys and values have no dependencies either
                key, value = load_context(key_pages, value_pages, context, heads)
            wait(counter, stage * plan.num_programs)
            if plan.selector == "predictor":  # noqa: SIM102
                if asks == 1:
                    row = foreseen + route_64 * units
                    kept = decide(row, weight_P, bias, units, plan.predictor_block)
        if (program == 0) & (route >= 0):
            tl.store(told + 1 + route, kept)

        if route >= 0:
            alive = kept
        settled = kept
        if kept == 0:
            # advance here, not in the next iteration: the next block may be ready to run
            layer += 1
            route, length = next_route, next_length
            next_route, next_length = _load_numbers(
                layer, route_of_layer, lengths, lengths_stride, plan
            )
        if ready == layer:
            layer_64 = tl.cast(layer, tl.int64)
            gate = 1.0
            if router is not None:  # noqa: SIM102
                if route >= 0:
                    row = router + route * plan.width
                    score = score_token(x, row, plan.width, plan.block, plan.normalize)
                    gate = apply_gate(score, gate_kind)
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
                table + layer_64 * table_stride,
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
            # all programs have read the length
            if program == 0:
                tl.store(lengths + layer_64 * lengths_stride, length + 1)

            mix_heads(out_tile, w_out, mixed, update, out_cut)
            stage += 1
            arrive(counter)
            w_up = w_in + layer_64 * in_size
            norm_row = norm_mlp + layer_64 * plan.width
            scale_D = load_norm(norm_row, True, in_cut)
            in_tile = load_first_tile(w_up, in_cut)
            wait(counter, stage * plan.num_programs)

            activate(in_tile, w_up, x, update, scale_D, norm_row, hidden, eps, in_cut)
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
            # frees the registers until the next block
            key, value = load_nothing(key_pages, heads), load_nothing(value_pages, heads)
            settled = 0
            layer += 1
            route, length = next_route, next_length
            next_route, next_length = _load_numbers(
                layer, route_of_layer, lengths, lengths_stride, plan
            )

    scale_D = load_norm(norm, True, head_cut)
    head_tile = load_first_tile(head, head_cut)
    if pending == 1:
        wait(counter, stage * plan.num_programs)
    stream, square = load_stream(x, None, head_cut)
    ranks = project(head_tile, head, x, stream, square, scale_D, norm, logits, eps, head_cut)
    tl.atomic_max(best, tl.max(ranks), sem="relaxed", scope="gpu")
    # the last program to get here resets the state for the next launch: all programs have passed
    # every barrier, so none reads it any more
    tl.debug_barrier()
    if tl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu") == plan.num_programs - 1:
        found = find_ranked(tl.load(best, cache_modifier=".cg"))
        tl.store(told, found)
        tl.store(token, found)
        tl.store(position, at + 1)
        tl.store(best, LOWEST_RANK)
        tl.store(counter, 0)
        tl.store(counter + 1, 0)


class DecodeStep:
    """Decodes one token of one sequence: one launch, no host work, suitable for capture.

    Every argument of a call is read on the device, so a captured launch can be replayed after
    the token, the position and the tables were changed in place. `logits` and `told` (the best
    token, then 1 for each routed block that ran) are overwritten by each call. Calls of one step
    must not overlap, and an aborted launch leaves the step unusable.
    """

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        key_pages: Float[Tensor, "pages G page_size H"],
        value_pages: Float[Tensor, "pages G page_size H"],
        tuning: StepTuning | None = None,
    ) -> None:
        device = weights.embedding.device
        self.weights, self.rules = weights, rules
        self.key_pages, self.value_pages = key_pages, value_pages
        self.tuning = tuning or choose_tuning(device, weights.embedding.shape[1], rules.num_heads)
        check_plan(weights, rules, key_pages, value_pages, self.tuning)
        self.plan = make_plan(weights, rules, key_pages, self.tuning)
        plan = self.plan

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=torch.float32)

        route_of_layer = [-1] * plan.num_layers + [0, 0]
        for route, layer in enumerate(rules.routed_layers):
            route_of_layer[layer] = route
        self.route_of_layer = torch.tensor(route_of_layer, device=device, dtype=torch.int32)
        num_routes = len(rules.routed_layers)
        self.logits = make(plan.head.num_rows)
        self.told = torch.zeros(1 + num_routes, device=device, dtype=torch.int64)
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
            torch.full((1,), LOWEST_RANK.value, device=device, dtype=torch.int64),
        )

    def __call__(
        self,
        token: Int[Tensor, ""] | Int[Tensor, " 1"],
        position: Int[Tensor, ""] | Int[Tensor, " 1"],
        table: Int[Tensor, "L *rows max_pages"],
        lengths: Int[Tensor, "L *rows"],
        row: Int[Tensor, " 1"] | None = None,
    ) -> Float[Tensor, " V"]:
        """Return the next token's logits; store the keys and values of `token` in blocks that ran.

        `token` is replaced by the best token (the first of equals), and `position` by the next
        one, so that by default a replay continues from there.
        `table` lists each block's pages in order; `lengths` holds the number of tokens stored in
        them, and is incremented. Both are int32, with any stride between blocks. With `row`, they
        cover all rows, and `row` selects one. The table must already have a page for the new
        token.
        """
        if table.stride(-1) != 1:
            raise ValueError("table must be contiguous along a block's pages")
        if row is not None and lengths.stride(-1) != 1:
            raise ValueError("lengths must be contiguous along rows")
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
            row,
            table,
            table.stride(0),
            table.stride(-2),
            lengths,
            lengths.stride(0),
            self.logits,
            self.told,
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
            # tiles are prefetched by hand
            num_stages=1,
            **options,
        )
        return self.logits
