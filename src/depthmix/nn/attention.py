"""Grouped-query attention by explicit positions.

Defines the mask rules (causal order, document boundaries, empty places), and has the only `if
cache`. Independent of routing, because a gathered sequence is a sequence, and of how a cache stores
its tokens.
"""

from contextlib import nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from depthmix.config import ModelConfig
from depthmix.kernels import linear, rotate_heads, rotate_split
from depthmix.nn.layers import Linear, RMSNorm, add_bias

# on an H200 cuDNN trains 1.5 times as fast as flash attention at 1,024 tokens and more, and as fast
# at 128; but it makes a new plan for each shape, and generation has many
TRAINING_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Place(NamedTuple):
    """A token's position data, besides its vector."""

    positions: Int[Tensor, "#B T"]
    """Position in its document; strictly increasing inside one."""
    phase: Float[Tensor, "#B T 2 half"]
    """Rotary cosine and sine of that position."""
    documents: Int[Tensor, "B T"] | None
    """Attention stays inside a document; negative is padding. None: a row is one document."""
    valid: Bool[Tensor, "B T"] | None
    """False for padding and for empty places, which stand last. None: all are tokens."""
    values: Float[Tensor, "B T GH"] | None = None
    """What each token adds to its values in every block, before a factor; None: nothing."""

    def take(self, index: Int[Tensor, "B K"], valid: Bool[Tensor, "B K"] | None) -> "Place":
        """The places of gathered tokens; those that are not valid belong to no document."""
        positions_BK = self.positions.expand(index.shape[0], -1).gather(1, index)
        documents_BK = self.documents
        if documents_BK is not None:
            documents_BK = documents_BK.gather(1, index)
            if valid is not None:
                documents_BK = documents_BK.where(valid, -1)
        row_B1 = torch.arange(index.shape[0], device=index.device)[:, None]
        phase = self.phase[0][index] if self.phase.shape[0] == 1 else self.phase[row_B1, index]
        values = None if self.values is None else self.values[row_B1, index]
        return Place(positions_BK, phase, documents_BK, valid, values)

    def cut(self, num_tokens: int) -> "Place":
        """The places of the first tokens of each row."""
        rest = (None if t is None else t[:, :num_tokens] for t in self[2:])
        return Place(self.positions[:, :num_tokens], self.phase[:, :num_tokens], *rest)


class Memory(NamedTuple):
    """Tokens that provide keys and values to other tokens' queries."""

    x: Float[Tensor, "B M D"]
    place: Place
    weight: Float[Tensor, "B M"]
    """Multiplies the values, which puts the choice of tokens on the gradient path."""


@runtime_checkable
class AttentionCache(Protocol):
    """One layer's past, as attention sees it."""

    compact: bool
    """Whether only kept tokens are gathered, and a block that no token enters is not run: it saves
    their compute, but shapes change from call to call and the host waits to know them."""
    most: int | None
    """Otherwise, how many tokens can be kept, the first ones; None means all of them."""

    def attend(
        self,
        query: Float[Tensor, "B T N H"],
        key: Float[Tensor, "B S G H"],
        value: Float[Tensor, "B S G H"],
        place: Place,
        source: Place,
    ) -> Float[Tensor, "B T N H"]:
        """Store the new keys and values, then attend to all that is stored.

        `place` is the queries', `source` the keys'.
        """
        ...


class Attention(nn.Module):
    """Queries attend to keys at or before their own position, inside their document."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = config.shape
        self.num_heads, self.num_kv_heads = config.num_heads, shape.num_kv_heads
        self.head_width = shape.head_width
        # queries and keys share a matrix: one larger product, and one rotation for both
        num_rotated = self.num_heads + self.num_kv_heads
        self.w_qk = Linear(config.width, num_rotated * self.head_width, bias=config.qkv_bias)
        self.w_value = Linear(
            config.width, self.num_kv_heads * self.head_width, bias=config.qkv_bias
        )
        self.w_out = Linear(self.num_heads * self.head_width, config.width)
        # not a scalar, which cannot be sharded
        self.value_scale = nn.Parameter(torch.ones(1)) if config.value_embedding else None
        self.norm_query = RMSNorm(self.head_width, config.norm_eps) if config.qk_norm else None
        self.norm_key = RMSNorm(self.head_width, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        place: Place,
        *,
        memory: Memory | None = None,
        cache: AttentionCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        source = place if memory is None else memory.place
        query_BTNH, key_BSGH = self.make_queries_and_keys(x, place, memory)
        value = self.w_value(x if memory is None else memory.x)
        if self.value_scale is not None and source.values is not None:
            value = value + (self.value_scale * source.values).to(value.dtype)
        if memory is not None:
            value = (value * memory.weight[:, :, None]).to(value.dtype)
        value_BSGH = value.unflatten(-1, (self.num_kv_heads, self.head_width))

        if cache is not None:
            mixed_BTNH = cache.attend(query_BTNH, key_BSGH, value_BSGH, place, source)
            return self.w_out(mixed_BTNH.flatten(-2))
        if memory is None and place.documents is None:
            # empty places stand last, so causal order alone hides them
            mask = None
        elif memory is None and self.can_skip_blocks(x):
            mask = make_block_mask(place)
        else:
            mask = make_mask(place, source.positions, source.documents, source.valid)
        mixed_BTNH = attend(query_BTNH, key_BSGH, value_BSGH, mask)
        return self.w_out(mixed_BTNH.flatten(-2))

    def can_skip_blocks(self, x: Tensor) -> bool:
        """Whether `flex_attention` can be compiled here: on a GPU, for heads of 16 and more.

        Below 128 queries torch takes its kernel for decoding, which cannot be compiled for these.
        Without gradients the compiled kernel was seen to read memory that is not its own (torch
        2.11), so validation has a mask of all pairs.
        """
        can_compile = torch.compiler.is_compiling() and x.is_cuda and torch.is_grad_enabled()
        return can_compile and self.head_width >= 16 and x.shape[1] >= 128

    def make_queries_and_keys(
        self, x: Float[Tensor, "B T D"], place: Place, memory: Memory | None
    ) -> tuple[Float[Tensor, "B T N H"], Float[Tensor, "B S G H"]]:
        """Projected, normalised where the model does, and rotated."""
        if memory is None:
            qk = self.w_qk(x).unflatten(-1, (-1, self.head_width))
            if self.norm_query is None:
                return rotate_split(qk, place.phase, self.num_heads)
            query_BTNH, key_BSGH = qk.split([self.num_heads, self.num_kv_heads], dim=2)
        else:
            widths = [self.num_heads * self.head_width, self.num_kv_heads * self.head_width]
            w_query, w_key = self.w_qk.weight.split(widths)
            biases = (None, None) if self.w_qk.bias is None else self.w_qk.bias.split(widths)
            query = add_bias(linear(x, w_query), biases[0])
            key = add_bias(linear(memory.x, w_key), biases[1])
            query_BTNH = query.unflatten(-1, (-1, self.head_width))
            key_BSGH = key.unflatten(-1, (-1, self.head_width))
        if self.norm_query is not None and self.norm_key is not None:
            query_BTNH, key_BSGH = self.norm_query(query_BTNH), self.norm_key(key_BSGH)
        source = place if memory is None else memory.place
        return rotate_heads(query_BTNH, place.phase), rotate_heads(key_BSGH, source.phase)


def make_mask(
    query: Place,
    positions: Int[Tensor, "#B S"],
    documents: Int[Tensor, "B S"] | None,
    valid: Bool[Tensor, "B S"] | None,
) -> Bool[Tensor, "B T S"]:
    """True where a query may see a key."""
    mask_BTS = positions[:, None, :] <= query.positions[:, :, None]
    if query.documents is not None and documents is not None:
        mask_BTS = mask_BTS & (documents[:, None, :] == query.documents[:, :, None])
    if valid is not None:
        mask_BTS = mask_BTS & valid[:, None, :]
    if query.valid is not None:
        # a query that sees no key would be NaN; what an empty place sees is never used
        mask_BTS = mask_BTS | ~query.valid[:, :, None]
    return mask_BTS


def make_block_mask(place: Place) -> BlockMask:
    """The same for tokens that attend to themselves, as blocks that are skipped where empty.

    Order is causal, and empty places are a document of their own, so nothing else is checked. On
    an H200 over documents of 1,000 tokens this trains 2.5 times as fast as a mask of all pairs.
    """
    documents = place.documents
    assert documents is not None
    num_rows, num_tokens = documents.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (documents[row, query] == documents[row, key])

    return create_block_mask(
        sees, num_rows, None, num_tokens, num_tokens, device=documents.device.type
    )


def attend(
    query: Float[Tensor, "B T N H"],
    key: Float[Tensor, "B S G H"],
    value: Float[Tensor, "B S G H"],
    mask: Bool[Tensor, "#B T S"] | BlockMask | None,
) -> Float[Tensor, "B T N H"]:
    """softmax(q·k / √H)·v over the keys that the mask allows; no mask means causal order."""
    query_BNTH, key_BGSH, value_BGSH = (t.transpose(1, 2) for t in (query, key, value))
    grouped = query.shape[2] != key.shape[2]
    if isinstance(mask, BlockMask):
        mixed_BNTH = flex_attention(
            query_BNTH, key_BGSH, value_BGSH, block_mask=mask, enable_gqa=grouped
        )
        assert isinstance(mixed_BNTH, Tensor)
        return mixed_BNTH.transpose(1, 2)
    if mask is not None:
        return F.scaled_dot_product_attention(
            query_BNTH, key_BGSH, value_BGSH, attn_mask=mask[:, None], enable_gqa=grouped
        ).transpose(1, 2)
    # choosing takes time, which would slow down a step of one token
    training = query.is_cuda and torch.is_grad_enabled()
    with sdpa_kernel(TRAINING_BACKENDS, set_priority=True) if training else nullcontext():
        return F.scaled_dot_product_attention(
            query_BNTH, key_BGSH, value_BGSH, is_causal=True, enable_gqa=grouped
        ).transpose(1, 2)
