"""Routing strategies: which tokens a routed block keeps, as pure functions of scores.

Also defines `Routing`, the decisions that a routed block returns.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthmix.config import count_share, num_kept
from depthmix.kernels import pack_tokens, select_topk


class Kept(NamedTuple):
    """The kept tokens in order, and the place of each."""

    index: Int[Tensor, "B K"]
    """Token in each place: the kept ones first and ascending, so that attention stays causal."""
    slot: Int[Tensor, "B T"]
    """Inverse of `index`: a token's place, -1 where it has none."""
    valid: Bool[Tensor, "B K"] | None
    """Which places are taken; None if all are."""


class Routing(NamedTuple):
    """The decisions of one routed block, returned with its output.

    >>> model = Transformer(load_preset("tiny", **{"routing.capacity": 0.25}))
    >>> first, _ = model(torch.arange(8)[None]).routings
    >>> first.index.shape, int((first.slot >= 0).sum())
    (torch.Size([1, 2]), 2)
    """

    index: Int[Tensor, "B K"]
    """Token in each place."""
    weight: Float[Tensor, "B K"]
    """Gate of each place, 0 where it is empty."""
    valid: Bool[Tensor, "B K"]
    """Places that are taken."""
    logits: Float[Tensor, "B T"]
    """The router's scores, float32, with its bias where it has one; NaN where a predictor decided
    and no more was computed than needed, as in decoding on a CPU."""
    predictor_logits: Float[Tensor, "B T"] | None
    """The causal predictor's scores, where there is one."""
    slot: Int[Tensor, "B T"]
    """A token's place, -1 if it skips the block."""
    target: Bool[Tensor, "B T"] | None
    """The tokens that top-k keeps, which causal heads learn; None while decoding from a cache."""
    present: Bool[Tensor, "B T"] | None
    """Tokens that are not padding; None when none is."""
    memory: "Routing | None" = None
    """Decoupled routing: the same for keys and values."""


class Candidates(NamedTuple):
    """Which tokens may be kept; None means all (or, for `forced`, none)."""

    present: Bool[Tensor, "B T"] | None = None
    """Tokens that are not padding."""
    forced: Bool[Tensor, "B T"] | None = None
    """Tokens that are kept regardless of their score."""
    alive: Bool[Tensor, "B T"] | None = None
    """Tokens that have not left yet, for early exit."""
    most: int | None = None
    """A causal selector keeps no more than so many, the first ones."""
    reserved: float = 0.0
    """Under `token_choice`, the share of places reserved for forced tokens, which others would
    otherwise take."""

    def mask(self) -> Bool[Tensor, "B T"] | None:
        """Tokens that may be kept."""
        if self.present is None or self.alive is None:
            return self.alive if self.present is None else self.present
        return self.present & self.alive


def expert_choice(scores: Float[Tensor, "B T"], capacity: float, candidates: Candidates) -> Kept:
    """Keep each sequence's k = ceil(C·T) highest scores (arXiv:2404.02258, Eq. 1).

    T counts the row's real tokens, so that padding neither is kept nor makes room for others.
    """
    num_places = num_kept(capacity, scores.shape[1])
    allowed_BT, counts_B = candidates.mask(), None
    if candidates.forced is not None:
        scores = scores.masked_fill(candidates.forced, torch.inf)
    if allowed_BT is not None:
        scores = scores.masked_fill(~allowed_BT, -torch.inf)
        limit = count_share_of_rows(capacity, candidates.present, scores.shape[1])
        counts_B = allowed_BT.sum(dim=1, keepdim=True).clamp(max=limit).squeeze(1)
    index_BK, slot_BT = select_topk(scores, num_places, counts_B)
    if counts_B is None:
        return Kept(index_BK, slot_BT, None)
    place_K = torch.arange(num_places, device=scores.device)
    return Kept(index_BK, slot_BT, place_K < counts_B[:, None])


def stochastic(scores: Float[Tensor, "B T"], capacity: float, candidates: Candidates) -> Kept:
    """Top-k of Gaussian noise that is used for nothing else."""
    return expert_choice(torch.randn_like(scores), capacity, candidates)


def survivors(candidates: Candidates, previous: Routing | None) -> Candidates:
    """Early exit: only what the previous routed block kept; a token that leaves does not return."""
    if previous is None:
        return candidates
    return candidates._replace(alive=previous.slot >= 0)


def token_choice(scores: Float[Tensor, "B T"], capacity: float, candidates: Candidates) -> Kept:
    """Keep tokens whose own score is positive, in order, while there are places: causal."""
    kept_BT, num_tokens = _want(scores, candidates), scores.shape[1]
    limit = count_share_of_rows(capacity, candidates.present, num_tokens)
    if candidates.forced is not None:
        others_BT = kept_BT & ~candidates.forced
        room = limit - count_share_of_rows(candidates.reserved, candidates.present, num_tokens)
        kept_BT = kept_BT & (candidates.forced | (others_BT.cumsum(dim=1) <= room))
    return _pack(kept_BT & (kept_BT.cumsum(dim=1) <= limit), num_kept(capacity, num_tokens))


RULES: Mapping[str, Callable[[Tensor, float, Candidates], Kept]] = {
    "expert_choice": expert_choice,
    "token_choice": token_choice,
    "stochastic": stochastic,
    "early_exit": expert_choice,
    "causal": token_choice,
}
"""Which tokens each strategy keeps; `config.STRATEGIES` says which scores it uses."""


def causal(scores: Float[Tensor, "B T"], candidates: Candidates, *, compact: bool = False) -> Kept:
    """Keep every token whose own score is positive: the rule of sampling.

    There is a place for each token, because a limit that depends on the sequence's length would
    let the future decide. `compact` counts first, and makes as many places as the fullest row
    fills: nothing is computed needlessly, but the host waits for the count. With `most` places, the
    caller checks afterwards whether they were enough.
    """
    kept_BT, num_places = _want(scores, candidates), scores.shape[1]
    if compact and not torch.compiler.is_compiling():
        num_places = count_places(kept_BT)
        if num_places == 0:
            slot_BT = torch.full_like(scores, -1, dtype=torch.long)
            return Kept(slot_BT[:, :0], slot_BT, None)
        if num_places == scores.numel():
            # one row that keeps every token
            index_BT = torch.arange(num_places, device=scores.device)[None]
            return Kept(index_BT, index_BT, None)
    elif candidates.most is not None:
        num_places = min(num_places, candidates.most)
        kept_BT = kept_BT & (kept_BT.cumsum(dim=1) <= num_places)
    return _pack(kept_BT, num_places)


def keep_all(scores: Float[Tensor, "B T"], candidates: Candidates) -> Kept:
    """Keep every token that is not padding."""
    return causal(torch.ones_like(scores), candidates)


def apply_gate(gate: str, scores: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """The factor on a kept token's update (never on the residual)."""
    match gate:
        case "raw":
            return scores
        case "sigmoid":
            return scores.sigmoid()
        case "tanh1":
            return 1 + scores.tanh()
        case "unit":
            return torch.ones_like(scores)
    raise ValueError(f"unknown gate '{gate}'")


def count_places(kept: Bool[Tensor, "B T"]) -> int:
    """Places that the fullest row fills; reads the device."""
    return int(kept.sum() if kept.shape[0] == 1 else kept.sum(dim=1).max())


def _want(scores: Float[Tensor, "B T"], candidates: Candidates) -> Bool[Tensor, "B T"]:
    """Tokens that are forced or have a positive score, among those that may be kept."""
    kept_BT, allowed_BT = scores > 0, candidates.mask()
    if candidates.forced is not None:
        kept_BT = kept_BT | candidates.forced
    return kept_BT if allowed_BT is None else kept_BT & allowed_BT


def _pack(kept: Bool[Tensor, "B T"], num_places: int) -> Kept:
    index_BK, slot_BT = pack_tokens(kept, num_places)
    place_K = torch.arange(num_places, device=kept.device)
    return Kept(index_BK, slot_BT, place_K < kept.sum(dim=1, keepdim=True))


def count_share_of_rows(
    share: float, present: Bool[Tensor, "B T"] | None, num_tokens: int
) -> int | Int[Tensor, "B 1"]:
    """ceil(share·T), T being each row's real tokens; one number where all are."""
    if present is None:
        return count_share(share, num_tokens)
    # the same slack as there
    return (present.sum(dim=1, keepdim=True).double() * share - 1e-9).ceil().long()
