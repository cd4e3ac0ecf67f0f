"""Runs the model on one step's tokens: any number of sequences, each at its own place.

Prompts, and on a CPU everything, stand one after the other in a single row, as packed documents
do, so the model's own forward pass is all there is. On a GPU, tokens that are written one at a time
go through a recorded step, and so do new prompts of a size that comes again. Knows nothing of
requests or of sampling.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.infer.cache import LayerUse, PagedCache, Span, StepCache
from depthmix.infer.decode import DecodeStep, SingleKernel, SingleStep
from depthmix.infer.depth import Usage
from depthmix.infer.pages import Pages
from depthmix.infer.prompt import PromptStep, can_record_prompts, choose_size
from depthmix.infer.scheduler import Chunk
from depthmix.kernels import HAS_TRITON
from depthmix.nn import Transformer
from depthmix.nn.transformer import Hidden


class Work(NamedTuple):
    """A chunk and its tokens."""

    chunk: Chunk
    tokens: Sequence[int]


class Done(NamedTuple):
    """What became of a chunk."""

    logits: Float[Tensor, " V"] | None
    """Of its last token, where that is asked for."""
    best: int | None
    """The most probable next token, where it is known already."""
    stored: list[int]
    """How many tokens each layer stored."""
    used: Usage
    paths: list[tuple[bool, ...]]
    """For each token, which routed blocks it went through."""


class Runner:
    """A model with a paged cache."""

    def __init__(
        self,
        model: Transformer,
        pages: Pages,
        selector: str | None,
        *,
        record: bool,
        compile: bool,
        pad: bool = False,
    ) -> None:
        """`record` keeps decoding steps as recorded ones, `compile` compiles those.

        `pad` records new prompts too, which rounds differently.
        """
        config, weight = model.config, model.embedding.weight
        self.model, self.selector, self.pages = model, selector, pages
        self.device, self.record, self.compile = weight.device, record, compile
        self.cache = PagedCache(config, pages, device=weight.device, dtype=weight.dtype)
        self.routed_layers, self.num_routed = config.routed_layers, len(config.routed_layers)
        self.with_experts = set(config.expert_layers)
        self.num_dense_experts = len(self.with_experts.difference(self.routed_layers))
        # where a recorded step's report begins to say what was stored
        self.kept_line = 1 + (self.num_routed if config.routing.kv_capacity is not None else 0)
        self.steps: dict[tuple[int, int], DecodeStep] = {}
        """By batch size; of one row, by its number too."""
        self.prompts: dict[int, PromptStep | None] = {}
        """By size; None where a prompt of that size came once, and recording would cost more."""
        self.pads = record and pad and can_record_prompts(config)
        self._single: SingleKernel | None = None
        self._weights: Any = None
        # what the device's own input and lengths are, so that only news is sent
        self._waiting: tuple[tuple[int, int], list[int], list[int], list[int]] | None = None

    def run(self, works: Sequence[Work]) -> list[Done]:
        """Compute these chunks, together."""
        self.cache.follow(self.pages.drain_changes())
        if not self.record:
            return self._run_prompts(works)
        # also tokens that are computed again, so that they come out the same to the last bit
        single = [work for work in works if work.chunk.count == 1]
        rest = [work for work in works if work.chunk.count > 1]
        done: dict[int, Done] = {}
        for part, compute in ((single, self._decode), (rest, self._run_prompts)):
            if part:
                keys = [work.chunk.key for work in part]
                done |= zip(keys, compute(part), strict=True)
        return [done[work.chunk.key] for work in works]

    def _run_prompts(self, works: Sequence[Work]) -> list[Done]:
        """New prompts one by one where they are recorded, and all others together."""
        self._waiting = None
        done = {work.chunk.key: self._run_recorded(work) for work in works if self.pads}
        rest = [work for work in works if done.get(work.chunk.key) is None]
        if rest:
            keys = [work.chunk.key for work in rest]
            done |= zip(keys, self._run_together(rest), strict=True)
        return [outcome for work in works if (outcome := done[work.chunk.key]) is not None]

    def _run_recorded(self, work: Work) -> Done | None:
        """A new prompt padded to a size that came before; None where it must be computed else."""
        chunk = work.chunk
        if chunk.start > 0 or chunk.count == 1:
            return None
        size = choose_size(chunk.count, self.model.config.max_seq_len)
        if size not in self.prompts:
            self.prompts[size] = None
            return None
        step = self.prompts[size]
        if step is None:
            step = PromptStep(self.model, self.cache, self.selector, size, compile=self.compile)
            self.prompts[size] = step
        prompt = step.run(work.tokens, chunk.row)
        if prompt is None:
            return None
        outputs = prompt.outputs
        paths = [tuple(path) for path in outputs.taken[: chunk.count].tolist()]
        kept = dict(zip(self.routed_layers, prompt.kept, strict=True))
        stored = [kept.get(layer, chunk.count) for layer in range(self.cache.num_layers)]
        # each query sees its own key and all before
        uses = [LayerUse(n, n, n * (n + 1) // 2) for n in stored]
        asked = (None, None)
        if chunk.samples:
            asked = (outputs.logits.clone(), int(outputs.best))
        return Done(*asked, stored, self._add_up(uses, 0), paths)

    @torch.inference_mode()
    def _run_together(self, works: Sequence[Work]) -> list[Done]:
        spans = [Span(w.chunk.row, w.chunk.start, w.chunk.count) for w in works]
        step = self.cache.view(spans)
        tokens = torch.tensor([[t for work in works for t in work.tokens]], device=self.device)
        hidden = self.model.compute_hidden(
            tokens, selector=self.selector, document_ids=step.document_ids(), cache=step
        )
        ends = torch.tensor([span.count for span in spans]).cumsum(0)
        asked = [number for number, work in enumerate(works) if work.chunk.samples]
        last = (ends[asked] - 1).to(self.device)
        logits = dict(zip(asked, self.model.head(hidden.hidden[0, last]), strict=True))
        paths = _read_paths(hidden, tokens.shape[1])
        expert_pairs = self._count_expert_pairs(step, hidden)
        starts = [0, *ends.tolist()]
        return [
            Done(
                logits.get(number),
                None,
                [layer.uses[number].num_stored for layer in step.layers],
                self._add_up([layer.uses[number] for layer in step.layers], expert_pairs[number]),
                paths[starts[number] : starts[number + 1]],
            )
            for number in range(len(works))
        ]

    def _decode(self, works: Sequence[Work]) -> list[Done]:
        """One token of each sequence, in a recorded step."""
        size = min(1 << (len(works) - 1).bit_length(), self.pages.num_rows)
        alone = size == 1 and self.can_fuse
        kind = (size, works[0].chunk.row if alone else 0)
        step = self.steps.get(kind)
        if step is None:
            step = self.steps[kind] = self._make_step(size, works[0].chunk.row if alone else None)
        tokens = [work.tokens[0] for work in works]
        positions, rows = [w.chunk.start for w in works], [w.chunk.row for w in works]
        # if this step fails, nobody knows what the device holds
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting[2:] != (positions, rows):
            self.cache.send_lengths()
        if waiting != (kind, tokens, positions, rows):
            step.send(tokens, positions, rows)
        outputs = step.run()
        told = outputs.told.tolist()
        self._waiting = (kind, told[0][: len(works)], [p + 1 for p in positions], rows)
        # a copy: the next recorded step, which may come before anybody samples, writes over them
        logits = outputs.logits.clone().unbind()
        # the step may have room for more
        parts = zip(works, logits, zip(*told, strict=True), strict=False)
        return [self._tell(*part) for part in parts]

    @cached_property
    def can_fuse(self) -> bool:
        """Whether a sequence that is alone can be decoded by one kernel."""
        return self.device.type == "cuda" and HAS_TRITON and not find_obstacle(self.model.config)

    def _make_step(self, size: int, row: int | None) -> DecodeStep:
        config = self.model.config
        if not self.can_fuse or (row is None and not self.can_fuse_rows):
            return DecodeStep(self.model, self.cache, self.selector, size, compile=self.compile)
        from depthmix.infer import single

        if self._weights is None:
            # once: the model's own weights become views of these
            self._weights = single.stack_weights(self.model)
        if row is None:
            routed = single.make_routed_rows(config, self._weights, self.selector, size)
            return DecodeStep(
                self.model, self.cache, self.selector, size, compile=self.compile, routed=routed
            )
        if self._single is None:
            pages = (self.cache.key.transpose(0, 1), self.cache.value.transpose(0, 1))
            self._single = single.make_single_step(config, self._weights, self.selector, *pages)
        return SingleStep(self.model, self.cache, self._single, row)

    @cached_property
    def can_fuse_rows(self) -> bool:
        """Whether the routed blocks of several sequences can be kernels of their own."""
        config = self.model.config
        wide = config.shape.head_width >= 32
        return bool(config.routed_layers) and self.selector != "all" and wide

    def _tell(self, work: Work, logits: Tensor, column: Sequence[int]) -> Done:
        """What the device reported about one token."""
        chunk, lengths, num_routed = work.chunk, self.pages.lengths[work.chunk.row], self.num_routed
        taken, kept = column[1 : 1 + num_routed], column[self.kept_line :][:num_routed]
        stored = [1] * self.cache.num_layers
        num_dense = self.cache.num_layers - num_routed
        # a query sees what was there and its own key; where nobody is sent by, all is there
        num_pairs = num_dense * chunk.start
        num_expert_visits = self.num_dense_experts
        for layer, runs, keeps in zip(self.routed_layers, taken, kept, strict=True):
            stored[layer] = keeps
            if runs:
                num_pairs += lengths[layer]
                num_expert_visits += layer in self.with_experts
        num_routed_visits, num_routed_stored = sum(taken), sum(kept)
        num_visits = num_dense + num_routed_visits
        used = Usage(
            num_visits=num_visits,
            num_routed_visits=num_routed_visits,
            num_expert_visits=num_expert_visits,
            num_stored=num_dense + num_routed_stored,
            num_routed_stored=num_routed_stored,
            num_pairs=num_pairs + num_visits,
            num_expert_pairs=sum(column[len(column) - len(self.with_experts) :]),
        )
        asked = (logits, column[0]) if chunk.samples else (None, None)
        return Done(*asked, stored, used, [tuple(map(bool, taken))])

    def _add_up(self, uses: Sequence[LayerUse], num_expert_pairs: int) -> Usage:
        """One span's use over all layers."""
        return Usage(
            num_visits=sum(use.num_queries for use in uses),
            num_routed_visits=sum(uses[i].num_queries for i in self.routed_layers),
            num_expert_visits=sum(uses[i].num_queries for i in self.with_experts),
            num_stored=sum(use.num_stored for use in uses),
            num_routed_stored=sum(uses[i].num_stored for i in self.routed_layers),
            num_pairs=sum(use.num_pairs for use in uses),
            num_expert_pairs=num_expert_pairs,
        )

    def _count_expert_pairs(self, step: StepCache, hidden: Hidden) -> list[int]:
        """By span: (token, expert) pairs that were computed."""
        found, routings = [0] * len(step.spans), iter(hidden.expert_routings)
        for layer in self.model.config.expert_layers:
            uses = step.layers[layer].uses
            if not any(use.num_stored for use in uses):
                # nobody entered this block
                continue
            counts = next(routings).kept[0].sum(dim=1).cpu()
            parts = counts.split([use.num_queries for use in uses])
            found = [total + int(part.sum()) for total, part in zip(found, parts, strict=True)]
        return found


def find_obstacle(config: ModelConfig) -> str | None:
    """Why this model cannot be decoded by one kernel, or None where it can."""
    head_width = config.shape.head_width
    if config.expert_layers:
        return "its blocks have experts"
    if config.routing.kv_capacity is not None:
        return "it routes keys and values apart from queries"
    if config.qkv_bias:
        return "its queries, keys and values have biases"
    if head_width < 16 or head_width & (head_width - 1):
        return f"its head width is {head_width}, not a power of two from 16 on"
    return None


def _read_paths(hidden: Hidden, num_tokens: int) -> list[tuple[bool, ...]]:
    if not hidden.routings:
        return [()] * num_tokens
    kept_TR = torch.stack([routing.slot[0] >= 0 for routing in hidden.routings], dim=1)
    return [tuple(path) for path in kept_TR.tolist()]
