"""All blocks of a model for the tokens of one step, by kernels that never wait for the host.

A step's tokens belong to several sequences and are concatenated, divided into chunks: first the
chunks of one token (`alone`), as in decoding, then parts of prompts. In each block, the tokens that
take part occupy places. Their number is known only on the device, and programs for places past it
exit at once, so a routed block's cost depends on the number of tokens it keeps.

Owns the order of the kernels and their buffers. Knows nothing of models, graphs or sampling: it
takes stacked tensors and numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.kernels.decode import chunks, places
from depthmix.kernels.decode.plan import Places, Rules, Weights, check_model
from depthmix.kernels.decode.routed import BLOCK_ROWS, FewRows
from depthmix.kernels.decode.stream import TOKENS as MOST_STREAMED
from depthmix.kernels.decode.stream import StreamedBlocks, find_obstacle

# Maximum tokens of a step, or expected places of a routed block, for which products of few rows are
# faster: these process 16 rows at a time, and a block may keep more than expected. More places if
# the device can prefetch their weights.
FEW_TOKENS, FEW_PLACES, MOST_PREFETCHED = 16, 13, 24
# number of rows that attention is tuned for, relative to the number that the capacity suggests
SLACK = 2


class Tokens(NamedTuple):
    """A step's tokens and chunks, on the device; -1 marks an empty entry."""

    given: Int[Tensor, " T"]
    """Each token, or -1 for the newest of its row."""
    row: Int[Tensor, " T"]
    """Its row of the cache."""
    position: Int[Tensor, " T"]
    chunk: Int[Tensor, " T"]
    """Its chunk."""
    begin: Int[Tensor, " chunks_and_one"]
    """First token of each chunk, followed by the number of tokens."""
    chunk_row: Int[Tensor, " chunks"]
    """Row of each chunk."""
    num_tokens: Int[Tensor, " 1"]
    sampled: Int[Tensor, " S"]
    """Tokens whose logits are requested; only the first `num_sampled` count."""
    num_sampled: Int[Tensor, " 1"]


class Pools(NamedTuple):
    """The cache: see `chunks` for its layout."""

    key: Float[Tensor, "G pages page H"]
    value: Float[Tensor, "G pages page H"]
    tables: Int[Tensor, "L rows most"]
    lengths: Int[Tensor, "L rows"]


class Blocks:
    """Runs steps of up to `most_tokens` tokens over one cache, one step at a time."""

    def __init__(
        self,
        weights: Weights,
        rules: Rules,
        pools: Pools,
        capacities: Sequence[float],
        *,
        most_tokens: int,
        most_sampled: int,
        newest: Int[Tensor, " rows"],
    ) -> None:
        """`newest` holds the newest token of each row."""
        check_model(weights, rules, pools.key.shape[0], pools.key.shape[3])
        self.newest = newest
        self.weights, self.rules, self.pools = weights, rules, pools
        device, dtype = weights.embedding.device, weights.embedding.dtype
        num_classes, width = weights.embedding.shape
        num_layers, num_projected = weights.w_qkv.shape[:2]
        mlp_width, num_in = weights.w_mlp_out.shape[2], weights.w_in.shape[1]
        self.kind_in = "swiglu" if num_in == 2 * mlp_width else "gelu"
        self.capacity = dict(zip(rules.routed_layers, capacities, strict=True))
        self.few = FewRows(weights, rules, min(most_tokens, max(256, most_sampled)))
        self.stream, self.most_streamed = None, 0
        if find_obstacle(weights, rules, pools.key) is None:
            self.stream = StreamedBlocks(weights, rules, *pools)
            self.most_streamed = MOST_STREAMED

        def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.token = make(most_tokens, dtype=torch.int64)
        self.x, self.update, self.more = (make(most_tokens, width) for _ in range(3))
        self.normed = make(max(most_tokens, most_sampled), width)
        self.qkv = make(most_tokens, num_projected)
        # of all tokens of a step without prompts, whether kept or not
        self.projected = make(min(most_tokens, most_sampled), num_projected)
        self.mixed = make(most_tokens, weights.w_attn_out.shape[2])
        self.wide = make(most_tokens, num_in)
        self.hidden = make(most_tokens, mlp_width)
        # rows padded to whole cache lines: without that, the product takes eight times as long
        self.logits = make(most_sampled, -(-num_classes // 64) * 64)[:, :num_classes]
        self.few_logits = make(FEW_TOKENS, num_classes)
        self.score, self.wish = (make(most_tokens, dtype=torch.float32) for _ in range(2))
        self.ones = torch.ones(most_tokens, device=device)
        # products read at least this many indices
        num_places = max(most_tokens, most_sampled, BLOCK_ROWS.value)
        self.order = torch.arange(num_places, device=device, dtype=torch.int32)
        self.index = make(num_places, dtype=torch.int32)
        self.count = make(1, dtype=torch.int32)
        self.gate = make(most_tokens, dtype=torch.float32)
        # of this routed block and the previous one, needed if a token that left cannot return
        self.slots = make(2, most_tokens, dtype=torch.int32)
        route_of_layer = [-1] * num_layers
        for route, layer in enumerate(rules.routed_layers):
            route_of_layer[layer] = route
        self.route_of_layer = torch.tensor(route_of_layer, device=device, dtype=torch.int32)

    def run(
        self, tokens: Tokens, taken: Int[Tensor, "R T"], *, num_alone: int, num_chunks: int
    ) -> Float[Tensor, "S V"]:
        """Logits of the requested tokens; `taken` records which routed blocks each token took.

        The first `num_alone` chunks have at most one token; `num_chunks` more have any number.
        """
        weights, rules, pools = self.weights, self.rules, self.pools
        x = self.begin(tokens)
        if self.stream is not None and not num_chunks and x.shape[0] <= self.most_streamed:
            return self.stream.run(
                x, tokens.row, tokens.position, tokens.sampled, tokens.num_sampled, taken
            )
        everyone = self.place_all(tokens, num_alone)
        num_routes = len(rules.routed_layers)
        firsts = torch.empty(
            (num_routes, tokens.begin.shape[0]), device=x.device, dtype=torch.int32
        )
        # whether all tokens are already normalized for the next block
        is_prepared = False
        for layer in range(weights.w_qkv.shape[0]):
            if layer in self.capacity:
                self._run_routed(layer, x, tokens, everyone, taken, firsts, num_chunks, is_prepared)
                is_prepared = False
            else:
                is_prepared = self._run_dense(layer, x, tokens, everyone, num_chunks, is_prepared)
        places.end_step(firsts, tokens.begin, tokens.chunk_row, self.route_of_layer, pools.lengths)
        return self._make_logits(x, tokens, is_prepared)

    def begin(self, tokens: Tokens) -> Float[Tensor, "T D"]:
        """Find the step's tokens and embed them; empty the rows of sequences that start."""
        num_tokens = tokens.given.shape[0]
        x = self.x[:num_tokens]
        places.begin_step(
            tokens.given,
            self.newest,
            tokens.row,
            tokens.position,
            tokens.begin,
            tokens.chunk_row,
            tokens.num_tokens,
            self.weights.embedding,
            self.pools.lengths,
            self.token[:num_tokens],
            x,
        )
        return x

    def place_all(self, tokens: Tokens, num_alone: int) -> Places:
        """The places of a dense block: each token has its own."""
        return Places(
            index=self.order,
            count=tokens.num_tokens,
            gate=self.ones,
            slot=self.order,
            first=tokens.begin,
            taken=self.order,
            alone=tokens.chunk_row[:num_alone],
        )

    def _run_dense(
        self,
        layer: int,
        x: Tensor,
        tokens: Tokens,
        everyone: Places,
        num_chunks: int,
        is_prepared: bool,
    ) -> bool:
        """Run a dense block; return whether x is prepared for what follows, as `is_prepared`."""
        weights, eps, num_tokens = self.weights, self.rules.norm_eps, x.shape[0]
        normed, qkv = self.normed[:num_tokens], self.qkv[:num_tokens]
        mixed = self.mixed[:num_tokens]
        count = tokens.num_tokens
        if not is_prepared:
            self._normalize_all(layer, x, everyone)
        next_norm = self._find_norm(layer + 1, tokens, num_chunks)
        if num_tokens <= FEW_TOKENS:
            self._project_few(layer, x, qkv, everyone, is_prepared)
            self._attend(layer, qkv, mixed, tokens, everyone, num_chunks, None)
            self.few.finish_block(x, layer, mixed, everyone, next_norm)
            return next_norm is not None
        torch.mm(normed, weights.w_qkv[layer].T, out=qkv)
        self._attend(layer, qkv, mixed, tokens, everyone, num_chunks, None)
        update, more = self.update[:num_tokens], self.more[:num_tokens]
        torch.mm(mixed, weights.w_attn_out[layer].T, out=update)
        norm = weights.norm_mlp[layer]
        places.add_and_normalize(x, None, count, update, norm, eps, normed, keep=True)
        wide, hidden = self.wide[:num_tokens], self.hidden[:num_tokens]
        torch.mm(normed, weights.w_in[layer].T, out=wide)
        places.activate_places(wide, count, hidden, self.kind_in)
        torch.mm(hidden, weights.w_mlp_out[layer].T, out=more)
        if next_norm is not None:
            places.add_and_normalize(x, None, count, more, next_norm, eps, normed, keep=True)
        elif not self._adds_before(layer + 1, tokens, num_chunks):
            places.add_update(x, None, count, None, None, more)
        return next_norm is not None

    def _adds_before(self, layer: int, tokens: Tokens, num_chunks: int) -> bool:
        """Whether a block's decision adds the last update of the block before it to x."""
        if layer not in self.capacity or layer == 0 or layer - 1 in self.capacity:
            return False
        # blocks of few tokens add their updates themselves
        is_large = tokens.given.shape[0] > FEW_TOKENS
        return is_large and self._choose_way(layer, tokens, num_chunks) == "prefetch"

    def _normalize_all(self, layer: int, x: Tensor, everyone: Places) -> None:
        norm, eps = self.weights.norm_attention[layer], self.rules.norm_eps
        places.normalize_places(x, None, everyone.count, norm, eps, self.normed[: x.shape[0]])

    def _project_few(
        self,
        layer: int,
        x: Tensor,
        qkv: Tensor,
        everyone: Places,
        is_prepared: bool,
    ) -> None:
        """Queries, keys and values of all tokens, which are already normalized."""
        source, prepared = self.normed[: x.shape[0]], None
        if is_prepared and x.shape[0] <= FEW_TOKENS:
            source, prepared = self.few.shaped, "update"
        w_qkv = self.weights.w_qkv[layer]
        self.few.multiply("plain", source, w_qkv, qkv, everyone, prepared=prepared)

    def _find_norm(self, layer: int, tokens: Tokens, num_chunks: int) -> Tensor | None:
        """The next norm applied to all tokens, of a block or the head; None if there is none."""
        if layer == self.weights.w_qkv.shape[0]:
            # only products of few rows prepare it; otherwise only few tokens need logits
            most = max(tokens.given.shape[0], tokens.sampled.shape[0])
            return self.weights.norm if most <= FEW_TOKENS else None
        if layer in self.capacity and self._choose_way(layer, tokens, num_chunks) != "all":
            return None
        return self.weights.norm_attention[layer]

    def _has_few(self, layer: int, num_tokens: int) -> bool:
        """Whether a routed block is expected to keep few tokens."""
        most = FEW_PLACES if self.few.prefetched is None else MOST_PREFETCHED
        return self._expect(layer, num_tokens) <= most and num_tokens <= self.few.num_rows

    def _expect(self, layer: int, num_tokens: int) -> int:
        return max(1, round(self.capacity[layer] * num_tokens))

    def _choose_way(self, layer: int, tokens: Tokens, num_chunks: int) -> str:
        """Choose how a routed block computes its queries, keys and values.

        With prompts, only kept tokens are projected (`kept`). Without prompts, every token is its
        own chunk. If the device can prefetch weights, they are read while the tokens are chosen
        (`prefetch`). If not, projecting all tokens takes as long as projecting the kept ones, since
        reading the weights dominates, and can be done before (`all`). With few tokens (`gather`),
        often none is kept, and no weights need to be read.
        """
        num_tokens = tokens.given.shape[0]
        if num_chunks or num_tokens > min(self.projected.shape[0], self.few.num_rows):
            return "kept"
        if self.few.prefetched is not None and self._has_few(layer, num_tokens):
            return "prefetch"
        return "gather" if num_tokens <= FEW_TOKENS else "all"

    def _run_routed(
        self,
        layer: int,
        x: Tensor,
        tokens: Tokens,
        everyone: Places,
        taken: Tensor,
        firsts: Tensor,
        num_chunks: int,
        is_prepared: bool,
    ) -> None:
        weights, eps, num_tokens = self.weights, self.rules.norm_eps, x.shape[0]
        num_alone = everyone.alone.shape[0]
        route = self.rules.routed_layers.index(layer)
        expected = self._expect(layer, num_tokens)
        kept = Places(
            index=self.index,
            count=self.count,
            gate=self.gate[:num_tokens],
            slot=self.slots[route % 2, :num_tokens],
            first=firsts[route],
            taken=taken[route],
            # one buffer per block: a kernel that reads it may be launched before it is written
            alone=torch.empty(num_alone, device=x.device, dtype=torch.int32),
        )
        previous = None
        if self.rules.early_exit and route > 0:
            previous = self.slots[(route - 1) % 2, :num_tokens]
        normed, qkv = self.normed[:num_tokens], self.qkv[:num_tokens]
        mixed = self.mixed[:num_tokens]
        few = self._has_few(layer, num_tokens)
        # kept tokens to expect among those alone in their row, with slack
        busy = max(1, round(SLACK * self.capacity[layer] * num_alone))
        decides = (x, layer, tokens.position, tokens.row, previous, kept)
        way, w_qkv = self._choose_way(layer, tokens, num_chunks), weights.w_qkv[layer]
        projected = self.projected[:num_tokens]
        if way == "prefetch":
            owed = self._adds_before(layer, tokens, num_chunks)
            more = self.more[:num_tokens] if owed else None
            assert self.few.prefetched is not None
            self.few.prefetched.decide_and_project(*decides, qkv, more)
        elif way == "gather":
            self.few.decide(*decides, shaped=normed)
            self.few.multiply("plain", normed, w_qkv, qkv, kept, prepared="decide", gathers=True)
        elif way == "all":
            if not is_prepared:
                self._normalize_all(layer, x, everyone)
            torch.mm(normed, w_qkv.T, out=projected)
            if few:
                self.few.decide(*decides)
            else:
                self._decide(layer, route, x, tokens, previous, kept)
        else:
            self._decide(layer, route, x, tokens, previous, kept)
            if few and self.few.prefetched is not None:
                self.few.prefetched.project(x, layer, kept, qkv)
            else:
                norm = weights.norm_attention[layer]
                places.normalize_places(x, kept.index, kept.count, norm, eps, normed)
                if few:
                    self.few.multiply("plain", normed, w_qkv, qkv, kept)
                else:
                    self._multiply(normed, w_qkv, qkv, kept, expected)
        given = projected if way == "all" else None
        self._attend(layer, qkv, mixed, tokens, kept, num_chunks, busy, given)
        if few:
            self.few.finish_block(x, layer, mixed, kept)
            return
        update, more = self.update[:num_tokens], self.more[:num_tokens]
        self._multiply(mixed, weights.w_attn_out[layer], update, kept, expected)
        norm = weights.norm_mlp[layer]
        places.add_and_normalize(x, kept.index, kept.count, update, norm, eps, normed, keep=False)
        wide, hidden = self.wide[:num_tokens], self.hidden[:num_tokens]
        self._multiply(normed, weights.w_in[layer], wide, kept, expected)
        places.activate_places(wide, kept.count, hidden, self.kind_in)
        self._multiply(hidden, weights.w_mlp_out[layer], more, kept, expected)
        places.add_update(x, kept.index, kept.count, kept.gate, update, more)

    def _decide(
        self,
        layer: int,
        route: int,
        x: Tensor,
        tokens: Tokens,
        previous: Tensor | None,
        kept: Places,
    ) -> None:
        weights, rules, num_tokens = self.weights, self.rules, x.shape[0]
        score, wish = self.score[:num_tokens], self.wish[:num_tokens]
        assert weights.router is not None
        heads = [weights.predictor_in, weights.predictor_out, weights.predictor_bias]
        asked = rules.selector == "predictor"
        w_in, w_out, bias = (t[route] if t is not None and asked else None for t in heads)
        places.score_tokens(
            x,
            weights.router[route],
            w_in,
            w_out,
            bias,
            tokens.num_tokens,
            score,
            wish,
            normalize=rules.normalize,
        )
        places.pack_tokens(
            self.ones[:num_tokens] if rules.selector == "all" else wish,
            score,
            tokens.row,
            tokens.position,
            previous,
            tokens.begin,
            tokens.num_tokens,
            rules.first_tokens,
            kept.index,
            kept.slot,
            kept.first,
            kept.count,
            kept.gate,
            kept.alone,
            kept.taken,
            gate_kind=rules.gate,
        )

    def _multiply(
        self, source: Tensor, weight: Tensor, out: Tensor, kept: Places, expected: int
    ) -> None:
        places.multiply_places(source, weight, out, kept.count, expected=expected)

    def _attend(
        self,
        layer: int,
        qkv: Tensor,
        mixed: Tensor,
        tokens: Tokens,
        kept: Places,
        num_chunks: int,
        busy: int | None,
        given: Tensor | None = None,
    ) -> None:
        """Attention of the places in `qkv`, or of their tokens in `given`."""
        weights, rules, pools = self.weights, self.rules, self.pools
        norms = (weights.norm_query, weights.norm_key)
        norm_query, norm_key = (None if norm is None else norm[layer] for norm in norms)
        pages = (pools.key, pools.value)
        table, lengths = pools.tables[layer], pools.lengths[layer]
        chunks.rotate_and_store(
            qkv,
            kept.index,
            kept.count,
            tokens.row,
            tokens.position,
            tokens.chunk,
            kept.first,
            weights.phase_table,
            norm_query,
            norm_key,
            None if weights.qkv_bias is None else weights.qkv_bias[layer],
            rules.norm_eps,
            *pages,
            table,
            lengths,
            num_heads=rules.num_heads,
            given=given,
        )
        num_alone = kept.alone.shape[0]
        if num_alone:
            chunks.attend_tokens(
                qkv,
                mixed,
                kept.alone,
                lengths,
                *pages,
                table,
                num_heads=rules.num_heads,
                busy=busy,
                num_places=num_alone,
                count=kept.count,
            )
        if num_chunks:
            chunks.attend_chunks(
                qkv,
                mixed,
                kept.first,
                tokens.chunk_row,
                lengths,
                *pages,
                table,
                num_heads=rules.num_heads,
                first_chunk=num_alone,
                max_places=qkv.shape[0],
                expected=max(1, round(self.capacity.get(layer, 1.0) * qkv.shape[0])),
            )

    def _make_logits(self, x: Tensor, tokens: Tokens, is_prepared: bool) -> Float[Tensor, "S V"]:
        weights, num_sampled = self.weights, tokens.sampled.shape[0]
        normed, logits = self.normed[:num_sampled], self.logits[:num_sampled]
        eps, count = self.rules.norm_eps, tokens.num_sampled
        if not is_prepared:
            places.normalize_places(x, tokens.sampled, count, weights.norm, eps, normed)
        if num_sampled > FEW_TOKENS:
            torch.mm(normed, weights.head.T, out=logits)
            return logits
        asked = Places(
            tokens.sampled if is_prepared else self.order,
            count,
            self.ones,
            self.order,
            self.order,
            taken=self.order,
            alone=self.order,
        )
        logits = self.few_logits[:num_sampled]
        source, prepared = (self.few.shaped, "update") if is_prepared else (normed, None)
        self.few.multiply(
            "plain", source, weights.head, logits, asked, prepared=prepared, gathers=is_prepared
        )
        return logits
