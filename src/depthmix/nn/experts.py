"""Expert MLPs in place of one MLP: expert choice, token choice, and no-op experts.

A no-op expert has no weights: its share of a token stays on the residual (integrated MoDE). Staged
MoDE is a Mixture-of-Depths around a block with experts.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from depthmix.config import ModelConfig, num_kept
from depthmix.kernels import compute_type, multiply_groups, pack_tokens
from depthmix.nn.layers import activate, input_width
from depthmix.nn.router import Predictor, Router
from depthmix.nn.routing import Candidates, count_places, count_share_of_rows, expert_choice


class ExpertRouting(NamedTuple):
    """The decisions of one set of experts; the no-op experts come last in `logits`.

    Inside a routed block (staged MoDE) its tokens are the kept ones, in the order of that block's
    `Routing.index`.
    """

    logits: Float[Tensor, "B T choices"]
    """The router's scores, float32."""
    kept: Bool[Tensor, "B T E"]
    """The (token, expert) pairs that were computed."""
    chosen: Bool[Tensor, "B T choices"]
    """The pairs that were chosen: under token choice by each token, else the same as `kept`."""
    predictor_logits: Float[Tensor, "B T E"] | None
    """The causal predictor's scores, where there is one."""
    target: Bool[Tensor, "B T E"] | None
    """The pairs that the experts' top-k keeps; None under token choice and while decoding."""
    present: Bool[Tensor, "B T"] | None
    """Tokens that are not padding; None when none is."""


class Pairs(NamedTuple):
    """(token, expert) pairs to compute, sorted by expert."""

    token: Int[Tensor, " R"]
    """Row in the flattened batch."""
    weight: Float[Tensor, " R"]
    """The factor on the expert's output: its probability, 0 for an empty place."""
    ends: Int[Tensor, " E"]
    """Where each expert's rows end."""


class Experts(nn.Module):
    """Several MLPs behind one router: Σ_e p_e(x) · mlp_e(x) over the experts that take x."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden = config.experts, config.shape.expert_width
        self.config, self.kind = experts, config.mlp
        self.router = Router(config.width, experts.num_experts + experts.num_noop)
        self.predictor = None
        if experts.has_predictor:
            self.predictor = Predictor(config.width, experts.predictor_width, experts.num_experts)
        columns = input_width(hidden, config.mlp)
        self.w_in = nn.Parameter(torch.empty(experts.num_experts, config.width, columns))
        self.w_out = nn.Parameter(torch.empty(experts.num_experts, hidden, config.width))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        present: Bool[Tensor, "B T"] | None,
        selector: str | None = None,
        *,
        decoding: bool = False,
        compact: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], ExpertRouting]:
        compact = compact and not torch.compiler.is_compiling()
        num_experts = self.config.num_experts
        logits_BTC = self.router(x)
        probs_BTC = logits_BTC.softmax(dim=-1)
        probs_BTE = probs_BTC[..., :num_experts]
        predicted_BTE = None if self.predictor is None else self.predictor(x)
        target_BTE = None
        if self.config.tokens_choose:
            pairs, chosen_BTC, kept_BTE = self._follow_tokens(probs_BTC, present, selector, compact)
        else:
            if selector in (None, "topk"):
                pairs, kept_BTE = self._ask_experts(probs_BTE, present)
                target_BTE = None if decoding else kept_BTE
            else:
                use_router = selector == "router" or predicted_BTE is None
                scores_BTE = logits_BTC[..., :num_experts] if use_router else predicted_BTE
                pairs, kept_BTE = self._decide_each(scores_BTE, probs_BTE, present, compact)
                if not decoding:
                    _, target_BTE = self._ask_experts(probs_BTE, present)
            chosen_BTC = kept_BTE
        return (
            self._compute(x, pairs),
            ExpertRouting(logits_BTC, kept_BTE, chosen_BTC, predicted_BTE, target_BTE, present),
        )

    def _ask_experts(
        self, probs: Float[Tensor, "B T E"], present: Bool[Tensor, "B T"] | None
    ) -> tuple[Pairs, Bool[Tensor, "B T E"]]:
        """Each expert takes its top-k tokens of each sequence."""
        batch, num_tokens, num_experts = probs.shape
        scores = probs.permute(2, 0, 1).flatten(0, 1)
        if present is not None:
            present = present.repeat(num_experts, 1)
        capacity = self.config.capacity / num_experts
        kept = expert_choice(scores.detach(), capacity, Candidates(present=present))
        weight = scores.gather(1, kept.index)
        if kept.valid is not None:
            weight = weight * kept.valid
        row = torch.arange(batch, device=probs.device).repeat(num_experts)[:, None]
        # every expert fills the same number of places, so its rows end where arithmetic says
        rows_each = batch * kept.index.shape[1]
        ends = torch.arange(1, num_experts + 1, device=probs.device, dtype=torch.int32) * rows_each
        taken = (kept.slot >= 0).unflatten(0, (num_experts, batch)).permute(1, 2, 0)
        return Pairs((row * num_tokens + kept.index).flatten(), weight.flatten(), ends), taken

    def _decide_each(
        self,
        scores: Float[Tensor, "B T E"],
        probs: Float[Tensor, "B T E"],
        present: Bool[Tensor, "B T"] | None,
        compact: bool,
    ) -> tuple[Pairs, Bool[Tensor, "B T E"]]:
        """Each expert takes the tokens whose own score for it is positive: the rule of sampling."""
        kept_BTE = scores > 0 if present is None else (scores > 0) & present[:, :, None]
        expert_BTE = torch.arange(scores.shape[2], device=scores.device).expand_as(kept_BTE)
        num_places = scores.shape[1] * scores.shape[2]
        if compact:
            num_places = count_places(kept_BTE.flatten(1))
        return _sort_pairs(expert_BTE, probs, kept_BTE, num_places, scores.shape[2]), kept_BTE

    def _follow_tokens(
        self,
        probs: Float[Tensor, "B T choices"],
        present: Bool[Tensor, "B T"] | None,
        selector: str | None,
        compact: bool,
    ) -> tuple[Pairs, Bool[Tensor, "B T choices"], Bool[Tensor, "B T E"]]:
        """Each token takes its own top experts, in order while there are places."""
        config, num_tokens = self.config, probs.shape[1]
        weight_BTn, choice_BTn = probs.topk(config.per_token, dim=-1)
        wanted_BTn = choice_BTn < config.num_experts
        if present is not None:
            wanted_BTn = wanted_BTn & present[:, :, None]
        if selector in (None, "topk") and config.capacity < config.per_token:
            num_places = num_kept(config.capacity, num_tokens)
            limit = count_share_of_rows(config.capacity, present, num_tokens)
            fits_BP = wanted_BTn.flatten(1).cumsum(dim=1) <= limit
            wanted_BTn = wanted_BTn & fits_BP.view_as(wanted_BTn)
        else:
            # sampling has no limit: one that depends on the length would let the future decide
            num_places = num_tokens * config.per_token
            if compact:
                num_places = count_places(wanted_BTn.flatten(1))
        pairs = _sort_pairs(choice_BTn, weight_BTn, wanted_BTn, num_places, config.num_experts)
        blank = torch.zeros_like(probs, dtype=torch.bool)
        kept = blank.scatter(2, choice_BTn, wanted_BTn)[..., : config.num_experts]
        return pairs, blank.scatter(2, choice_BTn, True), kept

    def _compute(self, x: Float[Tensor, "B T D"], pairs: Pairs) -> Float[Tensor, "B T D"]:
        if pairs.token.shape[0] == 0:
            return torch.zeros_like(x)
        flat, dtype = x.flatten(0, 1), compute_type(x)
        rows_RD = flat[pairs.token].to(dtype)
        hidden_RF = multiply_groups(rows_RD, self.w_in.to(dtype), pairs.ends)
        out_RD = multiply_groups(activate(hidden_RF, self.kind), self.w_out.to(dtype), pairs.ends)
        weighted_RD = out_RD * pairs.weight[:, None]
        summed = torch.zeros_like(flat, dtype=weighted_RD.dtype)
        return summed.index_add(0, pairs.token, weighted_RD).to(x.dtype).view_as(x)


def _sort_pairs(
    expert: Int[Tensor, "B T n"],
    weight: Float[Tensor, "B T n"],
    wanted: Bool[Tensor, "B T n"],
    num_places: int,
    num_experts: int,
) -> Pairs:
    """The wanted pairs of each row, sorted by expert; empty places go to the last one, weight 0."""
    batch, num_tokens, per_token = expert.shape
    index_BP, slot = pack_tokens(wanted.flatten(1), num_places)
    valid_BP = slot.gather(1, index_BP) >= 0
    expert_BP = expert.flatten(1).gather(1, index_BP).where(valid_BP, num_experts - 1)
    weight_BP = weight.flatten(1).gather(1, index_BP) * valid_BP
    row_B1 = torch.arange(batch, device=expert.device)[:, None]
    token_BP = row_B1 * num_tokens + index_BP // per_token
    sorted_R, order_R = expert_BP.flatten().sort(stable=True)
    marks_E = torch.arange(num_experts, device=expert.device)
    ends_E = torch.searchsorted(sorted_R, marks_E, right=True).to(torch.int32)
    return Pairs(token_BP.flatten()[order_R], weight_BP.flatten()[order_R], ends_E)
