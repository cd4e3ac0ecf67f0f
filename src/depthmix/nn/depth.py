"""Mixture-of-Depths around any block: route, gather, block, scatter-add.

Implements the paper's equation. The block inside can be anything that takes gathered tokens and
their places and returns an update.
"""

import math
from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthmix.config import STRATEGIES, RoutingConfig
from depthmix.kernels import gather_tokens, scatter_add_tokens
from depthmix.nn import routing as rules
from depthmix.nn.attention import AttentionCache, Memory, Place
from depthmix.nn.block import Update
from depthmix.nn.layers import at_least_float32
from depthmix.nn.ngrams import Lookup
from depthmix.nn.router import Predictor, Router
from depthmix.nn.routing import Candidates, Kept, Routing


class Decider(nn.Module):
    """A router, its causal predictor, and the rule that turns their scores into kept tokens."""

    def __init__(self, width: int, config: RoutingConfig, capacity: float) -> None:
        super().__init__()
        self.config, self.capacity = config, capacity
        self.router = Router(width, normalize=config.normalize_input, init_std=config.init_std)
        self.predictor = Predictor(width, config.predictor_width) if config.has_predictor else None
        # float32 like the scores; not a parameter, as no gradient moves it
        self.register_buffer("bias", torch.zeros(()) if config.has_bias else None)

    @property
    def capacity(self) -> float:
        """Share of tokens that are kept."""
        return float(self._capacity)

    @capacity.setter
    def capacity(self, capacity: float) -> None:
        # as text: torch.compile treats a number in which two blocks or models differ as unknown,
        # and then the number of places cannot be computed
        self._capacity = repr(capacity)

    @torch.no_grad()
    def init_bias(self) -> None:
        """Let the capacity's share of tokens choose the block under a router's initial weights."""
        if self.bias is not None:
            self.bias.fill_(start_bias(self.config, self.router.weight.shape[1], self.capacity))

    @torch.no_grad()
    def move_bias(self, share: Float[Tensor, ""]) -> None:
        """After a step in which this share of tokens chose the block."""
        if self.bias is not None:
            self.bias.add_(self.config.bias_rate * (self.capacity - share))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        place: Place,
        candidates: Candidates,
        *,
        selector: str | None = None,
        previous: Routing | None = None,
        decoding: bool = False,
        compact: bool = False,
    ) -> tuple[Float[Tensor, "B K D"], Float[Tensor, "B T D"], Place, Routing]:
        """The kept tokens, the stream to add to, the tokens' places, and what was decided."""
        # sums over one score, and not views of it: a module that returns a view of its result
        # cannot be sharded safely
        if self.config.draws_scores:
            logits_BT = torch.randn_like(at_least_float32(x[..., 0]))
            predicted_BT = None
        elif compact and selector == "predictor" and self.predictor is not None:
            predicted_BT = self.predictor(x).sum(-1)
            # tokens that skip the block need not be scored
            logits_BT = torch.full_like(predicted_BT, torch.nan)
        else:
            logits_BT = self.router(x).sum(-1)
            predicted_BT = None if self.predictor is None else self.predictor(x).sum(-1)
        if self.bias is not None:
            logits_BT = logits_BT + self.bias
        strategy = STRATEGIES[self.config.strategy]
        if strategy.is_final:
            candidates = rules.survivors(candidates, previous)
        # decisions are not differentiable: the gate and the losses carry the gradient
        scores_BT = logits_BT.detach()
        foreseen_BT = scores_BT if predicted_BT is None else predicted_BT.detach()
        kept = self.keep(scores_BT, foreseen_BT, candidates, selector, compact=compact)
        target_BT = None
        if not decoding and self.config.has_target:
            topk = kept
            if selector not in (None, "topk") or strategy.asks_head:
                topk = rules.expert_choice(scores_BT, self.capacity, candidates)
            target_BT = topk.slot >= 0
        if kept.index.shape[1] == 0:
            # no token was kept: skip the gather too
            x_BKD, weight_BK, place_BK = x[:, :0], logits_BT[:, :0], place.cut(0)
        elif kept.valid is None and kept.index.shape == logits_BT.shape:
            # all tokens are kept: nothing to gather
            x_BKD, place_BK = x, place
            weight_BK = self.weigh(x, logits_BT)
        else:
            x_BKD, x = gather_tokens(x, kept.index, kept.slot)
            # scored again from the gathered tokens: the gate's gradient then stays among them,
            # where by way of logits_BT it would touch every token
            weight_BK = self.weigh(x_BKD, logits_BT.gather(1, kept.index))
            place_BK = place.take(kept.index, kept.valid)
        valid_BK = torch.ones_like(kept.index, dtype=torch.bool)
        if kept.valid is not None:
            valid_BK = kept.valid
            weight_BK = weight_BK * valid_BK
        return (
            x_BKD,
            x,
            place_BK,
            Routing(
                index=kept.index,
                weight=weight_BK,
                valid=valid_BK,
                logits=logits_BT,
                predictor_logits=predicted_BT,
                slot=kept.slot,
                target=target_BT,
                present=candidates.present,
            ),
        )

    def weigh(
        self, x: Float[Tensor, "B K D"], logits: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        """The gates of tokens with these scores."""
        scores_BK = logits if self.config.draws_scores else self.router(x).sum(-1)
        return rules.apply_gate(self.config.gate, scores_BK)

    def keep(
        self,
        scores: Float[Tensor, "B T"],
        foreseen: Float[Tensor, "B T"],
        candidates: Candidates,
        selector: str | None,
        *,
        compact: bool = False,
    ) -> Kept:
        """The tokens that get a place: by the strategy's own rule, or by a named selector.

        `foreseen` are the predictor's scores, or the router's again where there is none. `compact`:
        a causal selector makes only as many places as it fills.
        """
        strategy = STRATEGIES[self.config.strategy]
        if selector == "all":
            return rules.keep_all(scores, candidates)
        if selector in ("predictor", "router"):
            scores = foreseen if selector == "predictor" else scores
            return rules.causal(scores, candidates, compact=compact)
        if self.config.draws_scores or (selector == "topk" and not strategy.is_random):
            return rules.expert_choice(scores, self.capacity, candidates)
        scores = foreseen if strategy.asks_head else scores
        share = self.config.share_places(self.capacity)
        return rules.RULES[self.config.strategy](scores, share, candidates)


def start_bias(config: RoutingConfig, width: int, capacity: float) -> float:
    """Bias with which the capacity's share of tokens has a positive score at the start.

    Normalised inputs have length √width, so scores are about normal with this deviation.
    """
    if not config.normalize_input:
        return 0.0
    deviation = config.init_std * math.sqrt(width)
    return -deviation * NormalDist().inv_cdf(min(max(1 - capacity, 1e-6), 1 - 1e-6))


class MixtureOfDepths(nn.Module):
    """x_i ← x_i + g(r_i) · f_i(x_S) for i in S (arXiv:2404.02258, Eq. 1).

    Other tokens pass unchanged, or with a bypass b: x_i ← x_i + b(x_i).
    """

    def __init__(
        self,
        block: nn.Module,
        width: int,
        config: RoutingConfig,
        capacity: float,
        *,
        bypass: Lookup | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.first_tokens = config.first_tokens
        self.decider = Decider(width, config, capacity)
        self.kv_decider = None
        if config.kv_capacity is not None:
            self.kv_decider = Decider(width, config, config.kv_capacity)
            self.reserved = capacity
        self.bypass = bypass

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        place: Place,
        *,
        selector: str | None = None,
        previous: Routing | None = None,
        cache: AttentionCache | None = None,
        found: Float[Tensor, "B T W"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Routing, Update]:
        """The new stream, what was decided, and the block's update; `found` is for a bypass."""
        forced_BT = None
        if self.first_tokens:
            forced_BT = (place.positions < self.first_tokens).expand(x.shape[:2])
        most = None if cache is None else cache.most
        candidates = Candidates(present=place.valid, forced=forced_BT, most=most)
        decoding, compact = cache is not None, cache is not None and cache.compact
        x_BKD, x, place_BK, routing = self.decider(
            x,
            place,
            candidates,
            selector=selector,
            previous=previous,
            decoding=decoding,
            compact=compact,
        )
        memory = None
        if self.kv_decider is not None:
            # updated tokens also provide their keys, so that every query sees at least one
            queries_BT = routing.slot >= 0
            forced_BT = queries_BT if forced_BT is None else forced_BT | queries_BT
            candidates = Candidates(place.valid, forced_BT, reserved=self.reserved)
            x_BMD, x, place_BM, kv_routing = self.kv_decider(
                x, place, candidates, selector=selector, decoding=decoding, compact=compact
            )
            memory = Memory(x_BMD, place_BM, kv_routing.weight)
            routing = Routing(*routing[:-1], memory=kv_routing)
        is_empty = x_BKD.shape[1] == 0
        if is_empty and (memory is None or memory.x.shape[1] == 0):
            # the block neither runs nor reads its weights
            x = self._add_bypass(x, found, routing, compact=compact)
            return x, routing, Update(x_BKD, None)
        update = self.block(x_BKD, place_BK, selector=selector, memory=memory, cache=cache)
        if x_BKD is x:
            x = x + (routing.weight[:, :, None] * update.update).to(x.dtype)
        elif not is_empty:
            x = scatter_add_tokens(x, update.update, routing.weight, routing.index, routing.slot)
        return self._add_bypass(x, found, routing, compact=compact), routing, update

    def _add_bypass(
        self, x: Tensor, found: Tensor | None, routing: Routing, *, compact: bool
    ) -> Float[Tensor, "B T D"]:
        """What tokens get that the block did not keep."""
        if self.bypass is None:
            return x
        assert found is not None
        skipped_BT = routing.slot < 0
        if routing.present is not None:
            skipped_BT = skipped_BT & routing.present
        if not compact:
            return x + self.bypass(x, found).where(skipped_BT[..., None], 0)
        at = skipped_BT.nonzero(as_tuple=True)
        if len(at[0]) == 0:
            return x
        added = self.bypass(x[at][None], found[at][None])[0]
        return x.index_put(at, added, accumulate=True)
