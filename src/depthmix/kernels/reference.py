"""Readable torch reference of every kernel, which other implementations must match.

Gradients come from autograd here, so that they check the hand-written ones elsewhere.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def select_topk(
    scores: Float[Tensor, "B T"], num_kept: int, counts: Int[Tensor, " B"] | None = None
) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B T"]]:
    """Each row's `num_kept` largest scores, ties by index (arXiv:2404.02258, Eq. 1).

    Returns `index_BK` and its inverse `slot_BT`, -1 for a token without a place. A row that fills
    only `counts` of its places has those first, in ascending order; the rest hold other tokens, so
    that no index appears twice.
    """
    # a stable sort breaks ties in favour of the earlier token
    order_BT = scores.sort(dim=1, descending=True, stable=True).indices
    rank_BT = torch.empty_like(order_BT).scatter_(
        1, order_BT, torch.arange(scores.shape[1], device=scores.device).expand_as(order_BT)
    )
    if counts is None:
        return pack_tokens(rank_BT < num_kept, num_kept)
    return pack_tokens(rank_BT < counts[:, None], num_kept)


def pack_tokens(kept: Tensor, num_places: int) -> tuple[Int[Tensor, "B K"], Int[Tensor, "B T"]]:
    """The kept tokens of each row in order, then the others; truncated to `num_places`."""
    num_kept_BT = kept.cumsum(dim=1)
    num_others_BT = (~kept).cumsum(dim=1)
    place_BT = torch.where(kept, num_kept_BT, num_kept_BT[:, -1:] + num_others_BT) - 1
    order_BT = torch.arange(kept.shape[1], device=kept.device).expand_as(place_BT)
    index_BK = torch.empty_like(place_BT).scatter(1, place_BT, order_BT)[:, :num_places]
    return index_BK, torch.where(kept & (place_BT < num_places), place_BT, -1)


def gather_tokens(
    x: Float[Tensor, "B T D"], index: Int[Tensor, "B K"], slot: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B K D"], Float[Tensor, "B T D"]]:
    """Return the rows of `x` at `index`, whose inverse is `slot`, and the stream `x` itself.

    Empty places pass no gradient back.
    """
    x_BKD = x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))
    placed_BK = slot.gather(1, index) >= 0
    return torch.where(placed_BK[:, :, None], x_BKD, x_BKD.detach()), x


def scatter_add_tokens(
    x: Float[Tensor, "B T D"],
    update: Float[Tensor, "B K D"],
    weight: Float[Tensor, "B K"],
    index: Int[Tensor, "B K"],
    slot: Int[Tensor, "B T"],
) -> Float[Tensor, "B T D"]:
    """x_i + weight_i · update_i for tokens with a place, x_i for all others."""
    placed_BK = slot.gather(1, index) >= 0
    # `where` instead of a product: an empty place may hold anything, NaN included
    scaled_BKD = torch.where(placed_BK[:, :, None], weight[:, :, None] * update, 0).to(x.dtype)
    return x.scatter_add(1, index[:, :, None].expand_as(scaled_BKD), scaled_BKD)


def rotate_heads(
    x: Float[Tensor, "B T heads H"], phase: Float[Tensor, "#B T 2 half"]
) -> Float[Tensor, "B T heads H"]:
    """Rotate each pair (x_i, x_{i + H/2}) by its token's phase, given as cosine and sine."""
    cos, sin = phase[:, :, None, 0], phase[:, :, None, 1]
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def rotate_split(
    x: Float[Tensor, "B T heads H"], phase: Float[Tensor, "#B T 2 half"], num_first: int
) -> tuple[Float[Tensor, "B T N H"], Float[Tensor, "B T G H"]]:
    """Rotate heads that were projected together, and split them into queries and keys."""
    turned = rotate_heads(x, phase)
    return turned[:, :, :num_first], turned[:, :, num_first:]
