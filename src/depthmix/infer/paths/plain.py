"""Steps by the model's own forward pass: any number of sequences, each at its own position.

A step's tokens are concatenated into a single row, like packed documents, so no padding is needed.
With `record`, sequences that decode one token go through a recorded step of their own. For models
that the kernels support as a whole, see the runner in `fused`. Knows nothing of requests.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.config import ModelConfig, fields
from depthmix.infer.cache import LayerUse, PagedCache, Span, StepCache, add_uses
from depthmix.infer.depth import Usage
from depthmix.infer.pages import Pages
from depthmix.infer.paths.decode import RecordedStep
from depthmix.infer.paths.draw import TorchDrawer
from depthmix.infer.sampling import SamplingParams, mark_seen, top_logprobs
from depthmix.infer.scheduler import Chunk, Plan
from depthmix.infer.steps import Ready, Report, Top
from depthmix.infer.track import Track
from depthmix.kernels import HAS_TRITON
from depthmix.nn import Transformer
from depthmix.nn.transformer import Hidden

# fields that whole-model kernels support, or may ignore because they only concern training
KNOWN_FIELDS = {
    *("vocab_size", "max_seq_len", "num_layers", "width", "num_heads", "num_kv_heads"),
    *("head_width", "mlp_width", "mlp", "qk_norm", "qkv_bias", "tied_head", "norm_eps"),
    *("rope_theta", "rope_factors"),
    *("routing.strategy", "routing.layers", "routing.every", "routing.first_dense"),
    *("routing.capacity", "routing.capacity_first", "routing.capacity_last"),
    *("routing.first_tokens", "routing.gate", "routing.normalize_input"),
    *("routing.predictor", "routing.predictor_width"),
    *("routing.init_std", "routing.aux_loss_weight", "routing.predictor_loss_weight"),
    "routing.balance_loss_weight",
}


class Work(NamedTuple):
    """A chunk and its tokens."""

    chunk: Chunk
    tokens: Sequence[int]


class Done(NamedTuple):
    """The result of a chunk."""

    logits: Float[Tensor, " V"] | None
    """Of its last token, if requested."""
    best: int | None
    """The most probable next token, if already known."""
    stored: list[int]
    """Number of tokens stored by each layer."""
    used: Usage
    paths: list[tuple[bool, ...]]
    """For each token, which routed blocks it went through."""


class Runner:
    """A model with a paged cache."""

    depth = most_rounds = 1
    can_retry = True

    def __init__(
        self,
        model: Transformer,
        pages: Pages,
        selector: str | None,
        *,
        record: bool,
        apart: bool = False,
    ) -> None:
        """`record` records and replays decoding steps; `apart` computes one chunk at a time."""
        config, weight = model.config, model.embedding.weight
        self.model, self.selector, self.pages = model, selector, pages
        self.device, self.record, self.apart = weight.device, record, apart
        self.cache = PagedCache(config, pages, device=weight.device, dtype=weight.dtype)
        self.routed_layers, self.num_routed = config.routed_layers, len(config.routed_layers)
        self.with_experts = set(config.expert_layers)
        self.num_dense_experts = len(self.with_experts.difference(self.routed_layers))
        # the line of a recorded step's report at which the stored tokens begin
        self.kept_line = 1 + (self.num_routed if config.routing.kv_capacity is not None else 0)
        self.steps: dict[int, RecordedStep] = {}
        """By batch size."""
        self._used = np.zeros((pages.num_rows, len(Usage._fields)), dtype=np.int64)
        self.drawer = TorchDrawer(config.vocab_size, weight.device, record=record)
        # what input and lengths the device already holds, so that only changes are sent
        self._waiting: tuple[int, list[int], list[int], list[int]] | None = None

    def launch(self, plan: Plan, tracks: Sequence[Track]) -> Ready:
        """Compute these chunks and draw the next tokens, synchronously."""
        works = [
            Work(chunk, np.asarray(track.list_tokens(chunk.start, chunk.count)).tolist())
            for chunk, track in zip(plan, tracks, strict=True)
        ]
        batches = [[work] for work in works] if self.apart else [works]
        done = [d for batch in batches for d in self.run(batch)]
        asked = np.flatnonzero(plan.samples).tolist()
        drawn = self._draw([(tracks[number], done[number]) for number in asked])
        found: dict[int, tuple[int, float, Top | None]] = dict(zip(asked, drawn, strict=True))
        columns = zip(*(found.get(n, (None, 0.0, None)) for n in range(len(done))), strict=True)
        self._used[plan.row] += np.array([d.used for d in done])
        return Ready(
            Report(
                *map(list, columns),
                taken=[b"".join(map(bytes, d.paths)) for d in done],
                stored=np.array([d.stored for d in done]),
            )
        )

    def take_usage(self, row: int) -> Usage:
        """Return what was computed in this row since the last call, and reset it."""
        used, self._used[row] = Usage(*self._used[row].tolist()), 0
        return used

    def warm_up(self, progress: Callable[[int, int], None] | None) -> float:
        """Nothing to prepare."""
        return 0.0

    def forget(self) -> None:
        """Nothing to discard: after a failure the input is sent again anyway."""

    def check_weights(self) -> None:
        """Nothing to check: the weights are read in place."""

    def mark_seen(self, tokens: Sequence[int], params: SamplingParams) -> Int[Tensor, " V"] | None:
        if not params.penalizes:
            return None
        return mark_seen(tokens, (), self.model.config.vocab_size).to(self.device)

    def run(self, works: Sequence[Work]) -> list[Done]:
        """Compute these chunks together."""
        self.cache.follow(self.pages.drain_changes())
        if not self.record:
            return self._run_prompts(works)
        # includes recomputed tokens, which must come out bitwise equal
        single = [work for work in works if work.chunk.count == 1]
        rest = [work for work in works if work.chunk.count > 1]
        done: dict[int, Done] = {}
        for part, compute in ((single, self._decode), (rest, self._run_prompts)):
            if part:
                keys = [work.chunk.key for work in part]
                done |= zip(keys, compute(part), strict=True)
        return [done[work.chunk.key] for work in works]

    def _draw(self, asked: Sequence[tuple[Track, Done]]) -> list[tuple[int, float, Top | None]]:
        """Draw the next tokens; return each with its log-probability and the most probable ones."""
        tracks, done = [track for track, _ in asked], [d for _, d in asked]
        if all(track.params.is_plain for track in tracks):
            # nothing to sample, and nothing to report but the token
            return [(token, 0.0, None) for token in _find_best(done)]
        logits = _list_logits(done)
        most = max(track.params.logprobs or 0 for track in tracks)
        tops: list[Top | None] = [None] * len(asked)
        if most:
            values_BK, ids_BK = top_logprobs(torch.stack(logits), most)
            tops = list(zip(ids_BK.tolist(), values_BK.tolist(), strict=True))
        drawn = self.drawer.draw(
            logits,
            [track.params for track in tracks],
            [track.seed for track in tracks],
            [track.num_new for track in tracks],
            [track.seen for track in tracks],
        )
        return list(zip(*drawn, tops, strict=True))

    def _run_prompts(self, works: Sequence[Work]) -> list[Done]:
        self._waiting = None
        return self._run_together(works)

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
        """Decode one token per sequence in a recorded step."""
        size = min(1 << (len(works) - 1).bit_length(), self.pages.num_rows)
        step = self.steps.get(size)
        if step is None:
            step = RecordedStep(self.model, self.cache, self.selector, size)
            self.steps[size] = step
        tokens = [work.tokens[0] for work in works]
        positions, rows = [w.chunk.start for w in works], [w.chunk.row for w in works]
        # if this step fails, the device's state is unknown
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting[2:] != (positions, rows):
            self.cache.send_lengths()
        if waiting != (size, tokens, positions, rows):
            step.send(tokens, positions, rows)
        outputs = step.run()
        told = outputs.told.tolist()
        self._waiting = (size, told[0][: len(works)], [p + 1 for p in positions], rows)
        # a copy: the next recorded step may overwrite them before they are sampled from
        logits = outputs.logits.clone().unbind()
        # not strict: the step may have spare rows
        parts = zip(works, logits, zip(*told, strict=True), strict=False)
        return [self._tell(*part) for part in parts]

    def _tell(self, work: Work, logits: Tensor, column: Sequence[int]) -> Done:
        """Decode the device's report on one token."""
        chunk, num_routed = work.chunk, self.num_routed
        lengths = self.pages.lengths[chunk.row].tolist()
        taken, kept = column[1 : 1 + num_routed], column[self.kept_line :][:num_routed]
        stored = [1] * self.cache.num_layers
        num_dense = self.cache.num_layers - num_routed
        # a query sees the stored keys and its own; dense blocks have stored every token
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
        return add_uses(uses, self.routed_layers, self.with_experts, num_expert_pairs)

    def _count_expert_pairs(self, step: StepCache, hidden: Hidden) -> list[int]:
        """Count the (token, expert) pairs computed for each span."""
        found, routings = [0] * len(step.spans), iter(hidden.expert_routings)
        for layer in self.model.config.expert_layers:
            uses = step.layers[layer].uses
            if not any(use.num_stored for use in uses):
                # no token entered this block
                continue
            counts = next(routings).kept[0].sum(dim=1).cpu()
            parts = counts.split([use.num_queries for use in uses])
            found = [total + int(part.sum()) for total, part in zip(found, parts, strict=True)]
        return found


def find_obstacle(model: Transformer) -> str | None:
    """Say why no kernels support this model; None if they do."""
    config, weight = model.config, model.embedding.weight
    if weight.device.type != "cuda" or not HAS_TRITON:
        return "it is not on a CUDA device with Triton"
    return find_shape_obstacle(config, weight.dtype)


def find_shape_obstacle(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """The same, considering only the model and not its device."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weights are {dtype}"
    if config.expert_layers:
        return "its blocks have experts"
    if config.has_memory:
        return "it has a memory of n-grams"
    # a field added to models counts as unsupported until KNOWN_FIELDS names it
    default = fields.flatten(ModelConfig().to_dict())
    for name, value in fields.flatten(config.to_dict()).items():
        is_known = name in KNOWN_FIELDS or name.startswith(("experts.", "memory."))
        if not is_known and value != default[name]:
            return f"kernels do not support its {name} = {value}"
    return None


def _find_best(done: Sequence[Done]) -> list[int]:
    """Return the most probable tokens; recorded steps have already found them."""
    known = [d.best for d in done if d.best is not None]
    if len(known) == len(done):
        return known
    return torch.stack(_list_logits(done)).argmax(dim=1).tolist()


def _list_logits(done: Sequence[Done]) -> list[Float[Tensor, " V"]]:
    return [d.logits for d in done if d.logits is not None]


def _read_paths(hidden: Hidden, num_tokens: int) -> list[tuple[bool, ...]]:
    if not hidden.routings:
        return [()] * num_tokens
    kept_TR = torch.stack([routing.slot[0] >= 0 for routing in hidden.routings], dim=1)
    return [tuple(path) for path in kept_TR.tolist()]
