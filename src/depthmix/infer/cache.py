"""Paged keys and values, and attention over them for batches of sequences of any length.

A page holds tokens of one layer of one row, so a routed block's cache takes memory for its routed
tokens only. Owns the tensors; `pages` decides which row gets which page.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.infer.depth import Usage
from depthmix.infer.pages import Changes, Pages
from depthmix.nn.attention import Place, attend
from depthmix.nn.cache import PastIds


class Span(NamedTuple):
    """Consecutive tokens of one sequence, computed in one step."""

    row: int
    start: int
    """Position of the first one."""
    count: int


class LayerUse(NamedTuple):
    """Work of one layer for one span."""

    num_queries: int = 0
    num_stored: int = 0
    num_pairs: int = 0
    """(query, key) pairs computed by attention."""


def add_uses(
    uses: Sequence[LayerUse],
    routed_layers: Iterable[int],
    expert_layers: Iterable[int] = (),
    num_expert_pairs: int = 0,
) -> Usage:
    """Sum one span's work over all layers."""
    routed = [uses[layer] for layer in routed_layers]
    return Usage(
        num_visits=sum(use.num_queries for use in uses),
        num_routed_visits=sum(use.num_queries for use in routed),
        num_expert_visits=sum(uses[layer].num_queries for layer in expert_layers),
        num_stored=sum(use.num_stored for use in uses),
        num_routed_stored=sum(use.num_stored for use in routed),
        num_pairs=sum(use.num_pairs for use in uses),
        num_expert_pairs=num_expert_pairs,
    )


class PagedCache:
    """The pages of all rows and layers, and their tables, on the model's device."""

    def __init__(
        self,
        config: ModelConfig,
        pages: Pages,
        *,
        device: torch.device,
        dtype: torch.dtype,
        by_page: bool | None = None,
    ) -> None:
        """`by_page` stores all heads of a page contiguously, as GPU kernels need it."""
        self.pages = pages
        self.num_layers = config.num_layers
        num_heads, head_width = config.shape.num_kv_heads, config.shape.head_width
        if not (device.type != "cpu" if by_page is None else by_page):
            # a head's pages are contiguous: gathering them yields attention's own layout
            shape = (num_heads, pages.num_pages, pages.page_size, head_width)
            self.key, self.value = (torch.zeros(shape, dtype=dtype) for _ in range(2))
        else:
            shape = (pages.num_pages, num_heads, pages.page_size, head_width)
            self.key, self.value = (
                torch.zeros(shape, device=device, dtype=dtype).transpose(0, 1) for _ in range(2)
            )
        shape = pages.tables.shape
        self.tables = torch.zeros(shape, device=device, dtype=torch.int32)
        self.lengths = torch.zeros(shape[:2], device=device, dtype=torch.int32)
        """Tokens stored, for steps that run without the host; valid after `send_lengths`."""
        self.past = None
        if config.has_memory:
            self.past = PastIds(pages.num_rows, config.max_seq_len, device)

    @property
    def bytes_per_page(self) -> int:
        """Memory of one page, keys and values together."""
        return 2 * self.key[:, 0].numel() * self.key.element_size()

    def follow(self, changes: Changes) -> None:
        """Bring the device's tables up to date."""
        if len(changes.places):
            # one transfer for int64 and int32
            words = [changes.places.view(np.int32), changes.pages]
            new = torch.from_numpy(np.concatenate(words, dtype=np.int32))
            if self.tables.is_cuda:
                # with pinned memory the host need not wait
                new = new.pin_memory().to(self.tables.device, non_blocking=True)
            places, pages = new.tensor_split([2 * len(changes.places)])
            # an entry listed twice gets the same page both times
            self.tables.view(-1).index_copy_(0, places.view(torch.int64), pages)

    def send_tables(self) -> None:
        """Send all tables to the device, whatever was sent before."""
        self.pages.drain_changes()
        self.follow(self.pages.list_everything())

    def send_lengths(self) -> None:
        """Send the host's lengths to the device."""
        self.lengths.copy_(torch.from_numpy(self.pages.lengths.astype(np.int32)).T)

    def view(self, spans: Sequence[Span]) -> "StepCache":
        """The cache as seen by one forward pass over these spans, concatenated."""
        return StepCache(self, spans)


class StepCache:
    """The cache for one step; records what each layer stored."""

    def __init__(self, cache: PagedCache, spans: Sequence[Span]) -> None:
        self.cache, self.spans = cache, spans
        self.layers = [PagedLayer(cache, index, spans) for index in range(cache.num_layers)]
        device = cache.tables.device
        ranges = [torch.arange(s.start, s.start + s.count, device=device) for s in spans]
        self.positions = torch.cat(ranges)[None]

    def advance(
        self, num_rows: int, num_tokens: int, present: Bool[Tensor, "B T"] | None
    ) -> Int[Tensor, "B T"]:
        """Positions of the spans' tokens, which form a single row."""
        assert (num_rows, num_tokens) == self.positions.shape
        return self.positions

    def recall(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        present: Bool[Tensor, "B T"] | None,
        count: int,
    ) -> Int[Tensor, "B T past"]:
        """The ids before each token in its own row of the cache."""
        assert self.cache.past is not None
        rows = torch.tensor([span.row for span in self.spans])
        rows_1T = rows.repeat_interleave(torch.tensor([span.count for span in self.spans]))[None]
        return self.cache.past.recall(tokens, positions, None, count, rows_1T.to(tokens.device))

    def document_ids(self) -> Int[Tensor, "1 T"] | None:
        """Index of each token's span; None if there is only one span."""
        if len(self.spans) == 1:
            return None
        counts = torch.tensor([span.count for span in self.spans])
        ids = torch.arange(len(self.spans)).repeat_interleave(counts)
        return ids[None].to(self.positions.device)


class PagedLayer:
    """One layer's pages for one step."""

    compact = True
    most: int | None = None

    def __init__(self, cache: PagedCache, index: int, spans: Sequence[Span]) -> None:
        self.cache, self.index, self.spans = cache, index, spans
        self.uses = [LayerUse()] * len(spans)

    def attend(
        self,
        query: Float[Tensor, "B T N H"],
        key: Float[Tensor, "B S G H"],
        value: Float[Tensor, "B S G H"],
        place: Place,
        source: Place,
    ) -> Float[Tensor, "B T N H"]:
        """Append each span's keys and values to its row, then attend to them causally."""
        mixed, own = [], place is source
        stops = zip(self._count(place), self._count(source), strict=True)
        query_at = key_at = 0
        for number, (num_queries, num_keys) in enumerate(stops):
            here = slice(query_at, query_at + num_queries)
            new = slice(key_at, key_at + num_keys)
            query_at, key_at = here.stop, new.stop
            if num_keys == 0:
                continue
            row = self.spans[number].row
            length = int(self.cache.pages.lengths[row, self.index])
            self._write(row, length, key[0, new], value[0, new])
            if num_queries == 0:
                self.uses[number] = LayerUse(0, num_keys, 0)
                continue
            visible = range(length + 1, length + num_keys + 1)
            if not own:
                offered, asking = source.positions[0, new], place.positions[0, here]
                visible = (torch.searchsorted(offered, asking, right=True) + length).tolist()
            self.uses[number] = LayerUse(num_queries, num_keys, sum(visible))
            if own and length == 0:
                # an empty past: what was just written need not be read back
                mixed.append(attend(query[:, here], key[:, new], value[:, new], None))
                continue
            mixed.append(self._read(row, length + num_keys, query[:, here], visible))
        if not mixed:
            # decoupled routing: all tokens here only provide keys, none is a query
            return query
        return torch.cat(mixed, dim=1) if len(mixed) != 1 else mixed[0]

    def _count(self, place: Place) -> list[int]:
        """Count the tokens of each span at `place`."""
        if place.documents is None:
            return [place.positions.shape[1]]
        # documents are numbered from 1, in the spans' order
        counts = torch.bincount(place.documents[0], minlength=len(self.spans) + 1)
        return counts.tolist()[1:]

    def _write(
        self, row: int, length: int, key: Float[Tensor, "S G H"], value: Float[Tensor, "S G H"]
    ) -> None:
        cache, size = self.cache, self.cache.pages.page_size
        pools = ((cache.key, key), (cache.value, value))
        if key.shape[0] == 1:
            page = int(cache.pages.tables[self.index, row, length // size])
            for pool, new in pools:
                pool[:, page, length % size] = new[0]
            return
        slots = torch.arange(length, length + key.shape[0], device=key.device)
        pages, places = cache.tables[self.index, row, slots // size].long(), slots % size
        for pool, new in pools:
            pool[:, pages, places] = new.transpose(0, 1).to(pool.dtype)

    def _read(
        self, row: int, length: int, query: Float[Tensor, "1 T N H"], visible: Iterable[int]
    ) -> Float[Tensor, "1 T N H"]:
        """Attend from each query to the first `visible` of the row's `length` keys."""
        cache = self.cache
        num_pages = -(-length // cache.pages.page_size)
        pages = cache.tables[self.index, row, :num_pages]
        key_1GSH, value_1GSH = (
            pool.index_select(1, pages).flatten(1, 2)[None, :, :length].to(query.dtype)
            for pool in (cache.key, cache.value)
        )
        mask = None
        if query.shape[1] > 1 or next(iter(visible)) < length:
            slots = torch.arange(length, device=query.device)
            mask = slots < torch.tensor(list(visible), device=query.device)[:, None]
        grouped = query.shape[2] != key_1GSH.shape[1]
        mixed_1NTH = F.scaled_dot_product_attention(
            query.transpose(1, 2), key_1GSH, value_1GSH, attn_mask=mask, enable_gqa=grouped
        )
        return mixed_1NTH.transpose(1, 2)
