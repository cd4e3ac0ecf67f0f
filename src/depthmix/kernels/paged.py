"""Attention over a paged cache on the device, in fixed shapes: a decoding step.

Every sequence provides at most one key and one query. A routed block caches only the tokens that
it kept, so each row has its own length; the program of a row that is not kept exits at once. On
CUDA this is Triton; elsewhere, the reference implementation that Triton must match.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def attend_pages(
    query: Float[Tensor, "K N H"],
    key: Float[Tensor, "M G H"],
    value: Float[Tensor, "M G H"],
    query_row: Int[Tensor, " K"],
    key_row: Int[Tensor, " M"],
    key_pages: Float[Tensor, "G P page H"],
    value_pages: Float[Tensor, "G P page H"],
    table: Int[Tensor, "rows most"],
    lengths: Int[Tensor, " rows"],
) -> Float[Tensor, "K N H"]:
    """Append each row's new key and value, then attend from its query to the whole row.

    `query_row` and `key_row` give the row of each token, or -1 for an empty place, whose output is
    zero. A row with a query also has a key. `table` lists the pages of each row, `lengths` the
    number of tokens in them; pages and lengths are updated in place.
    """
    return torch.ops.depthmix.attend_pages(
        query, key, value, query_row, key_row, key_pages, value_pages, table, lengths
    )


@torch.library.custom_op(
    "depthmix::attend_pages", mutates_args=("key_pages", "value_pages", "lengths")
)
def _attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_row: Tensor,
    key_row: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
) -> Tensor:
    page_size, out = key_pages.shape[2], torch.zeros_like(query)
    for place, row in enumerate(key_row.tolist()):
        if row >= 0:
            page, offset = divmod(int(lengths[row]), page_size)
            for pages, new in ((key_pages, key), (value_pages, value)):
                pages[:, table[row, page], offset] = new[place].to(pages.dtype)
            lengths[row] += 1
    heads_each = query.shape[1] // key.shape[1]
    for place, row in enumerate(query_row.tolist()):
        if row >= 0:
            length = int(lengths[row])
            stored = table[row, : -(-length // page_size)]
            past_key, past_value = (
                pages[:, stored].flatten(1, 2)[:, :length].repeat_interleave(heads_each, dim=0)
                for pages in (key_pages, value_pages)
            )
            wide = torch.promote_types(query.dtype, torch.float32)
            scores_NS = torch.einsum("nh,nsh->ns", query[place].to(wide), past_key.to(wide))
            share_NS = (scores_NS * query.shape[2] ** -0.5).softmax(dim=1)
            mixed_NH = torch.einsum("ns,nsh->nh", share_NS, past_value.to(wide))
            out[place] = mixed_NH.to(query.dtype)
    return out


@_attend_pages.register_fake
def _(query: Tensor, *rest: Tensor) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@_attend_pages.register_kernel("cuda")
def _(*tensors: Tensor) -> Tensor:
    from depthmix.kernels import paged_triton

    return paged_triton.attend_pages(*tensors, busy=None)
