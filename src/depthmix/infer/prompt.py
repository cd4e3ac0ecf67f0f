"""A new prompt in shapes that never change: recorded once for each size, replayed.

A prompt of some hundred tokens is bound by launching kernels, and by asking the device how many of
its tokens each routed block keeps. Here the prompt is padded to a size, and a routed block has
places for twice its share; where they do not suffice, the prompt is computed the other way.
Knows nothing of requests.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.infer.cache import PagedCache
from depthmix.infer.compiling import compiled_layers
from depthmix.kernels import store_prompt
from depthmix.kernels.recording import record_graph
from depthmix.nn import Transformer
from depthmix.nn.attention import Place, attend

SMALLEST = 32
# places of a routed block for each one that its capacity asks for
SLACK = 2


class PromptOutputs(NamedTuple):
    """What a step leaves on the device; the next one writes over it."""

    logits: Float[Tensor, " V"]
    """Of the last token."""
    best: Int[Tensor, ""]
    taken: Bool[Tensor, "T R"]
    """Which routed blocks each token went through."""
    kept: Int[Tensor, " R"]
    """How many tokens each of them kept."""


class Prompt(NamedTuple):
    """A prompt that was computed and stored."""

    outputs: PromptOutputs
    kept: list[int]
    """How many tokens each routed block kept, read from the device."""


class PromptLayer:
    """One layer's pages for a sequence that begins."""

    compact = False

    def __init__(
        self, cache: PagedCache, index: int, row: Int[Tensor, " 1"], most: int | None
    ) -> None:
        self.key, self.value, self.table = cache.key, cache.value, cache.tables[index]
        self.row, self.most = row, most

    def attend(
        self,
        query: Float[Tensor, "B T N H"],
        key: Float[Tensor, "B S G H"],
        value: Float[Tensor, "B S G H"],
        place: Place,
        source: Place,
    ) -> Float[Tensor, "B T N H"]:
        """Store what is real in order; nothing lies before it."""
        assert place is source
        assert place.valid is not None
        new = (key[0], value[0], place.valid[0])
        store_prompt(*new, self.row, self.key, self.value, self.table)
        # empty places stand last, so causal order alone hides them
        return attend(query, key, value, None)


class PromptStep:
    """Computes a prompt of up to `size` tokens from its beginning, in any row of a cache."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        selector: str | None,
        size: int,
        *,
        compile: bool = False,
    ) -> None:
        """`compile` compiles the layers."""
        device = cache.tables.device
        self.model, self.selector, self.size, self.compile = model, selector, size, compile
        self.inputs = torch.zeros(size + 2, device=device, dtype=torch.long)
        """The tokens, their row in the cache, and how many are real."""
        self.inputs[-1] = 1
        self.tokens, self.row, self.count = self.inputs.split([size, 1, 1])
        self.positions = torch.arange(size, device=device)[None]
        most = self._limit_places(model.config)
        self.layers = [
            PromptLayer(cache, index, self.row, most.get(index))
            for index in range(cache.num_layers)
        ]
        self.most = [most.get(index, size) for index in model.config.routed_layers]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: PromptOutputs | None = None

    def _limit_places(self, config: ModelConfig) -> dict[int, int]:
        """By routed block: how many tokens it can keep."""
        if self.selector == "all":
            return {}
        places = (
            min(self.size, 16 * math.ceil(SLACK * capacity * self.size / 16))
            for capacity in config.capacities
        )
        return dict(zip(config.routed_layers, places, strict=True))

    def advance(
        self, num_rows: int, num_tokens: int, present: Bool[Tensor, "B T"] | None
    ) -> Int[Tensor, "B T"]:
        """The tokens' positions: the step is its own cache."""
        return self.positions

    @torch.no_grad()
    def run(self, tokens: Sequence[int], row: int) -> Prompt | None:
        """Compute and store the prompt; None where a block may have had too few places.

        Then nobody has counted what was stored, and it can be stored again.
        """
        rest = self.size - len(tokens)
        new = torch.tensor([*tokens, *[0] * rest, row, len(tokens)])
        if self.inputs.is_cuda:
            new = new.pin_memory()
        self.inputs.copy_(new, non_blocking=True)
        if not self.inputs.is_cuda:
            with compiled_layers(self.model, compile=self.compile):
                outputs = self._step()
        else:
            if self.graph is None:
                with compiled_layers(self.model, compile=self.compile):
                    # what runs before writes what the first replay writes again
                    self.graph, self.outputs = record_graph(self._step)
            self.graph.replay()
            outputs = self.outputs
        assert outputs is not None
        kept = outputs.kept.tolist()
        full = any(n == most < self.size for n, most in zip(kept, self.most, strict=True))
        return None if full else Prompt(outputs, kept)

    def _step(self) -> PromptOutputs:
        present_1T = self.positions < self.count
        hidden = self.model.compute_hidden(
            self.tokens[None],
            selector=self.selector,
            document_ids=present_1T.long() - 1,
            cache=self,
        )
        logits_V = self.model.head(hidden.hidden[0].index_select(0, self.count - 1))[0]
        slots = [routing.slot[0] for routing in hidden.routings]
        taken_TR = torch.stack(slots, dim=1) >= 0 if slots else present_1T.T[:, :0]
        return PromptOutputs(logits_V, logits_V.argmax(), taken_TR, taken_TR.sum(dim=0))


def choose_size(num_tokens: int, longest: int) -> int:
    """The size that a prompt is padded to: a power of two, or one and a half, but no longer."""
    size = max(SMALLEST, 1 << (num_tokens - 1).bit_length())
    return min(longest, size * 3 // 4 if num_tokens <= size * 3 // 4 else size)


def can_record_prompts(config: ModelConfig) -> bool:
    """Whether the shapes of such a step do not depend on what it computes."""
    return not config.expert_layers and config.routing.kv_capacity is None
