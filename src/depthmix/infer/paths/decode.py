"""Batched one-token decoding in fixed shapes: recorded once, then replayed.

On a GPU the step is a CUDA graph whose best token is the input of the next step, so the host
neither launches kernels nor synchronizes. Elsewhere the same step runs eagerly, which is how it is
tested. Knows nothing of requests, nor of sampling beyond the best token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthmix.infer.cache import PagedCache
from depthmix.kernels import attend_pages
from depthmix.kernels.recording import record_graph
from depthmix.nn import Transformer
from depthmix.nn.attention import Place
from depthmix.nn.transformer import Hidden


class Outputs(NamedTuple):
    """A step's results on the device; the next step overwrites them."""

    logits: Float[Tensor, "B V"]
    told: Int[Tensor, "lines B"]
    """For the host, in one tensor: the best token, then for each routed block whether the token
    went through it, then under decoupled routing whether it was stored, and finally for each block
    with experts how many of them computed it."""


class StaticLayer:
    """One layer's pages in a recorded step."""

    compact = False
    most: int | None = None

    def __init__(self, cache: PagedCache, index: int, rows: Int[Tensor, " B"]) -> None:
        self.key, self.value, self.rows = cache.key, cache.value, rows
        self.table, self.lengths = cache.tables[index], cache.lengths[index]

    def attend(
        self,
        query: Float[Tensor, "B T N H"],
        key: Float[Tensor, "B S G H"],
        value: Float[Tensor, "B S G H"],
        place: Place,
        source: Place,
    ) -> Float[Tensor, "B T N H"]:
        """Store and attend, with each token in its own row of the cache."""
        return attend_pages(
            query[0],
            key[0],
            value[0],
            self._find_rows(place),
            self._find_rows(source),
            self.key,
            self.value,
            self.table,
            self.lengths,
        )[None]

    def _find_rows(self, place: Place) -> Int[Tensor, " K"]:
        assert place.documents is not None
        # documents are numbered from 1 in the order of the step's rows
        number_K = place.documents[0]
        return torch.where(number_K > 0, self.rows[(number_K - 1).clamp(min=0)], -1)


class RecordedStep:
    """A decoding step for up to `batch` rows of a cache; its tokens stay on the device."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        selector: str | None,
        batch: int,
    ) -> None:
        self.model, self.selector, self.cache, self.batch = model, selector, cache, batch
        device = cache.tables.device
        self.inputs = torch.zeros((4, batch), device=device, dtype=torch.long)
        """Tokens, their positions, their cache rows, and their index (-1 for an empty place)."""
        self.inputs[3] = -1
        self.tokens, self.positions, self.rows, self.present = self.inputs
        self.layers = [StaticLayer(cache, i, self.rows) for i in range(cache.num_layers)]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Outputs | None = None

    def advance(
        self, num_rows: int, num_tokens: int, present: Bool[Tensor, "B T"] | None
    ) -> Int[Tensor, "B T"]:
        """The tokens' positions: the step is its own cache."""
        return self.positions[None]

    def recall(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        present: Bool[Tensor, "B T"] | None,
        count: int,
    ) -> Int[Tensor, "B T past"]:
        """The ids before each token in its own row of the cache."""
        assert self.cache.past is not None
        return self.cache.past.recall(tokens, positions, present, count, self.rows[None])

    def send(self, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> None:
        """Set the next step's input; remaining places are empty."""
        rest = self.batch - len(tokens)
        numbers = [*range(len(tokens)), *[-1] * rest]
        values = [[*v, *[0] * rest] for v in (tokens, positions, rows)]
        new = torch.tensor([*values, numbers])
        if self.inputs.is_cuda:
            new = new.pin_memory()
        self.inputs.copy_(new, non_blocking=True)

    @torch.no_grad()
    def run(self) -> Outputs:
        """Run one step; on a GPU this is asynchronous."""
        if not self.inputs.is_cuda:
            return self._step()
        if self.graph is None:
            self._record()
        assert self.graph is not None
        assert self.outputs is not None
        self.graph.replay()
        return self.outputs

    def _step(self) -> Outputs:
        hidden = self.model.compute_hidden(
            self.tokens[None],
            selector=self.selector,
            document_ids=self.present[None],
            cache=self,
        )
        logits_BV = self.model.head(hidden.hidden[0])
        outputs = Outputs(logits_BV, self._tell(hidden, logits_BV.argmax(dim=1)))
        # unless `send` overrides it, the best token is the next input
        self.tokens.copy_(outputs.told[0])
        self.positions.add_(1)
        return outputs

    def _tell(self, hidden: Hidden, best: Int[Tensor, " B"]) -> Int[Tensor, "lines B"]:
        slots = [routing.slot[0] for routing in hidden.routings]
        slots += [r.memory.slot[0] for r in hidden.routings if r.memory is not None]
        lines = []
        routed = dict(zip(self.model.config.routed_layers, hidden.routings, strict=True))
        expert_layers = self.model.config.expert_layers
        for layer, routing in zip(expert_layers, hidden.expert_routings, strict=True):
            pairs_K = routing.kept[0].sum(dim=1)
            if layer in routed:
                # map places back to tokens
                slot_B = routed[layer].slot[0]
                pairs_K = torch.where(slot_B >= 0, pairs_K[slot_B.clamp(min=0)], 0)
            lines.append(pairs_K.long())
        # a few kernels for all blocks instead of two per block
        taken = (torch.stack(slots) >= 0).long().unbind() if slots else ()
        return torch.stack([best, *taken, *lines])

    def _record(self) -> None:
        """Capture the step; warm-up runs leave no visible change."""
        inputs, lengths = self.inputs.clone(), self.cache.lengths.clone()

        def restore() -> None:
            # every run writes the same cache slot, which the first real step overwrites
            self.inputs.copy_(inputs)
            self.cache.lengths.copy_(lengths)

        self.graph, self.outputs = record_graph(self._step, restore)
