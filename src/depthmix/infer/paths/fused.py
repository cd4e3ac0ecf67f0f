"""Steps that stay on the device: forward pass, draw and bookkeeping in one recorded graph.

What the next step needs is on the device when the last one ends: the tokens that were drawn, how
many each layer stored, how each row is drawn. So the host launches a step before it has read the
one before it, and is never waited for. A step costs what its tokens keep, whatever graph it is
padded to. Knows nothing of requests, and does not decide who is in a step.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.infer.cache import PagedCache
from depthmix.infer.depth import Usage
from depthmix.infer.pages import Pages, find_rows
from depthmix.infer.paths.layout import find_stacks, make_rules
from depthmix.infer.sampling import SamplingParams, Wish, pack_settings, top_logprobs
from depthmix.infer.steps import Flight, Outcome, Ready, Report, Work
from depthmix.kernels.compiling import compile_ahead
from depthmix.kernels.decode.blocks import Blocks, Pools, Tokens
from depthmix.kernels.decode.draw import Drawer, DrawState
from depthmix.kernels.decode.step import DecodeStep
from depthmix.kernels.recording import record_graph
from depthmix.nn import Transformer

# steps that may be under way, and staging memory of the host for each
DEPTH, NUM_STAGES = 2, 3
# a step's tokens are padded to one of these, or to a multiple of the last
SIZES = (32, 64, 96, 128, 192, 256)
# chunks of each kind are padded to one of these
CHUNKS = (0, 4, 16, 64, 256)
# ways through the routed blocks that are remembered; a model of many blocks has more than memory
MOST_WAYS = 1 << 16


class StepShape(NamedTuple):
    """What a step has room for."""

    num_tokens: int
    num_alone: int
    """Chunks of one token, which come first."""
    num_chunks: int
    """Chunks of any number."""

    @property
    def num_sampled(self) -> int:
        return self.num_alone + self.num_chunks


class Stage(NamedTuple):
    """Memory of the host for one turn of a step, whole and part by part."""

    inputs: Tensor
    parts: list[np.ndarray]
    told: Tensor
    token: np.ndarray
    logprob: np.ndarray
    taken: np.ndarray


class Step:
    """One shape of step: its inputs and outputs, on the device and staged on the host."""

    def __init__(self, shape: StepShape, num_routes: int, device: torch.device) -> None:
        self.shape, on_gpu = shape, device.type == "cuda"
        # every chunk may ask for a token
        num_tokens, num_chunks = shape.num_tokens, shape.num_sampled
        sizes = [num_tokens] * 4 + [num_chunks + 1, num_chunks, 1, num_chunks, 1, num_chunks]
        self.inputs = torch.zeros(sum(sizes), device=device, dtype=torch.int32)
        *parts, self.sampled_row = self.inputs.split(sizes)
        self.tokens = Tokens(*parts)
        # nobody is in it yet; the kernel for one sequence has to have a row
        for rows in (self.tokens.row, self.tokens.chunk_row, self.sampled_row):
            rows.fill_(-1)
        if num_chunks == 1:
            self.tokens.chunk_row.zero_()
        # tokens, log-probabilities, and who took which block: in one piece for the host
        told_sizes = [8 * num_chunks, 4 * num_chunks, num_routes * num_tokens]

        def split(told: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            token, logprob, taken = told.split(told_sizes)
            taken = taken.view(num_routes, num_tokens)
            return token.view(torch.int64), logprob.view(torch.float32), taken

        self.told = torch.zeros(sum(told_sizes), device=device, dtype=torch.uint8)
        self.token, self.logprob, self.taken = split(self.told)
        self.graphs: dict[tuple[bool, bool, bool], torch.cuda.CUDAGraph] = {}
        self.logits: Tensor | None = None

        def stage(like: Tensor) -> list[Tensor]:
            return [
                torch.zeros(like.shape, dtype=like.dtype, pin_memory=on_gpu)
                for _ in range(NUM_STAGES)
            ]

        # the host writes and reads part by part
        self.stages = [
            Stage(
                inputs,
                [part.numpy() for part in inputs.split(sizes)],
                told,
                *(found.numpy() for found in split(told)),
            )
            for inputs, told in zip(stage(self.inputs), stage(self.told), strict=True)
        ]
        self._turn = 0

    def take_turn(self) -> Stage:
        """Memory that no step under way uses."""
        self._turn = (self._turn + 1) % NUM_STAGES
        return self.stages[self._turn]


class FusedFlight(NamedTuple):
    """A step that is under way."""

    runner: "FusedRunner"
    works: list[Work]
    """In the order of the step's tokens: whoever is alone comes first."""
    order: list[int] | None
    """The number of each of them among those that were given, where that is another."""
    begins: list[int]
    """Where each one's tokens begin."""
    stage: Stage
    tops: tuple[Tensor, Tensor] | None
    event: torch.cuda.Event | None

    def wait(self) -> Report:
        if self.event is not None:
            self.event.synchronize()
        return self.runner.read(self)


class FusedRunner:
    """A model with a paged cache, computed by kernels that know all of it."""

    can_retry = False

    def __init__(
        self,
        model: Transformer,
        pages: Pages,
        selector: str | None,
        max_step_tokens: int,
        *,
        apart: bool = False,
    ) -> None:
        """`apart` computes one chunk at a time: its numbers then depend on no other's."""
        self.apart, self.depth = apart, 1 if apart else DEPTH
        config, weight = model.config, model.embedding.weight
        self.model, self.config, self.pages, self.selector = model, config, pages, selector
        self.device = weight.device
        self.on_gpu = self.device.type == "cuda"
        # before anything is recorded: the parameters move here
        self.stacks = find_stacks(model)
        self.weights = self.stacks.weights
        self.rules = make_rules(config, selector)
        self.cache = PagedCache(config, pages, device=self.device, dtype=weight.dtype, by_page=True)
        self.state = DrawState(pages.num_rows, config.vocab_size, self.device)
        most_alone = choose_alone(pages.num_rows)
        self.most_tokens = most_tokens = max(choose_size(max_step_tokens), most_alone)
        most_sampled = max(2 * choose_chunks(pages.num_rows), most_alone)
        self.drawer = Drawer(self.state, most_sampled)
        pools = Pools(self.cache.key, self.cache.value, self.cache.tables, self.cache.lengths)
        self.blocks = Blocks(
            self.weights,
            self.rules,
            pools,
            config.capacities,
            most_tokens=most_tokens,
            most_sampled=most_sampled,
            newest=self.state.tokens,
        )
        self.single = self._make_single()
        self.routed_layers = np.array(config.routed_layers, dtype=np.int64)
        self.num_dense = config.num_layers - len(config.routed_layers)
        self.steps: dict[StepShape, Step] = {}
        self.ways = Ways()
        # what a step leaves is in buffers of its own, so that graphs can share the rest
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        # the sequence whose settings the device has for a row
        self._settled: dict[int, int] = {}
        self._lost = False

    def _make_single(self) -> DecodeStep | None:
        if find_single_obstacle(self.config) is not None:
            return None
        pages = (self.cache.key.transpose(0, 1), self.cache.value.transpose(0, 1))
        return DecodeStep(self.weights, self.rules, *pages)

    def check_weights(self) -> None:
        """Refuse to go on where the model's weights are no longer those that it was made for."""
        if not self.stacks.are_current():
            raise RuntimeError(
                "the model's weights were moved or replaced after this engine was made: make a "
                "new Engine for it"
            )

    def mark_seen(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """The device has its own marks."""

    def forget(self) -> None:
        """A step failed: nobody knows what the device holds."""
        self._settled.clear()
        self._lost = True

    def warm_up(self, progress: Callable[[int, int], None] | None) -> float:
        """Compile what requests of any length need, and record what most of them do."""
        start = time.perf_counter()
        if not self.on_gpu:
            return 0.0
        steps = [self._find_step(shape) for shape in self.list_shapes()]
        # what else draws is recorded when it is asked for, which takes a moment
        tasks = [
            (step, plain)
            for step in steps
            for plain in (True, False)
            if (plain, not plain, False) not in step.graphs
        ]
        progress = progress or (lambda done, total: None)

        @torch.no_grad()
        def launch() -> None:
            for step, plain in tasks:
                self._compute(step, plain, not plain)

        with self._on_device():
            num_kernels = compile_ahead(launch, lambda n, total: progress(n, total + len(tasks)))
            for number, (step, plain) in enumerate(tasks, 1):
                self._find_graph(step, plain, not plain, False)
                progress(num_kernels + number, num_kernels + len(tasks))
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def list_shapes(self) -> list[StepShape]:
        """The shapes that most steps have: tokens alone, and prompts with and without them.

        Together they use every kernel that a step of any shape uses.
        """
        most_rows = self.pages.num_rows
        alone = [choose_alone(n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
        shapes = [StepShape(n, n, 0) for n in alone if n <= choose_alone(most_rows)]
        few, many = choose_chunks(1), choose_chunks(most_rows)
        sizes = sorted({choose_size(1 << n) for n in range(1, 20) if 1 << n < self.most_tokens})
        shapes += [StepShape(size, 0, few) for size in (*sizes, self.most_tokens)]
        shapes += [StepShape(self.most_tokens, many, chunks) for chunks in (few, many)]
        return [*shapes, StepShape(choose_size(min(self.most_tokens, 2 * most_rows)), 0, many)]

    def launch(self, works: Sequence[Work]) -> Flight:
        """Start a step with these chunks; nothing of it is waited for."""
        with self._on_device():
            if self.apart:
                reports = [self._launch([work]).wait() for work in works]
                outcomes = [outcome for report in reports for outcome in report.outcomes]
                return Ready(Report(outcomes, np.concatenate([r.stored for r in reports])))
            return self._launch(works)

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels start where torch stands, which may be another GPU than the model's."""
        return torch.cuda.device(self.device) if self.on_gpu else nullcontext()

    def _launch(self, works: Sequence[Work]) -> FusedFlight:
        if self._lost:
            self.cache.send_tables()
            self._lost = False
        else:
            self.cache.follow(self.pages.drain_changes())
        shape = self._choose_shape(works)
        step = self._find_step(shape)
        stage = step.take_turn()
        ordered, order = put_alone_first(works)
        begins = _fill(shape, stage.parts, ordered)
        step.inputs.copy_(stage.inputs, non_blocking=True)
        self._send_settings(works)
        asked = [work.wish.params for work in works if work.wish is not None]
        plain = all(params.is_plain for params in asked)
        filtered = any(params.filters for params in asked)
        self._run(step, plain, filtered)
        most = max([params.logprobs or 0 for params in asked], default=0)
        tops = self._find_tops(step, most) if most else None
        stage.told.copy_(step.told, non_blocking=True)
        event = None
        if self.on_gpu:
            event = torch.cuda.Event()
            event.record()
        return FusedFlight(self, ordered, order, begins, stage, tops, event)

    def _choose_shape(self, works: Sequence[Work]) -> StepShape:
        num_alone = sum(work.chunk.count == 1 for work in works)
        num_chunks = len(works) - num_alone
        if not num_chunks:
            size = choose_alone(num_alone)
            return StepShape(size, size, 0)
        num_tokens = sum(work.chunk.count for work in works)
        return StepShape(
            choose_size(num_tokens), choose_chunks(num_alone), choose_chunks(num_chunks)
        )

    def _find_step(self, shape: StepShape) -> Step:
        step = self.steps.get(shape)
        if step is None:
            step = self.steps[shape] = Step(shape, len(self.config.routed_layers), self.device)
        return step

    def _send_settings(self, works: Sequence[Work]) -> None:
        """Tell the device how rows are drawn whose sequences it does not know yet."""
        new: list[tuple[int, Wish]] = []
        for work in works:
            key, row, start, _, _ = work.chunk
            if start == 0:
                self._settled.pop(row, None)
            if work.wish is not None and self._settled.get(row) != key:
                self._settled[row] = key
                new.append((row, work.wish))
        if not new:
            return
        wishes = [wish for _, wish in new]
        shares, counts = pack_settings(
            [wish.params for wish in wishes],
            [wish.seed for wish in wishes],
            [wish.step for wish in wishes],
        )
        rows = self._send(torch.tensor([row for row, _ in new]))
        self.state.shares.index_copy_(1, rows, self._send(shares))
        self.state.counts.index_copy_(1, rows, self._send(counts))
        marked = [(row, wish) for row, wish in new if wish.params.repetition_penalty != 1]
        if marked:
            # what was recorded before the first of them knows nothing of marks
            seen = torch.zeros((len(marked), self.config.vocab_size), dtype=torch.bool)
            for marks, (_, wish) in zip(seen, marked, strict=True):
                marks[list(wish.tokens)] = True
            rows = self._send(torch.tensor([row for row, _ in marked]))
            self.state.allocate_seen().index_copy_(0, rows, self._send(seen))

    def _send(self, tensor: Tensor) -> Tensor:
        if not self.on_gpu:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    @torch.no_grad()
    def _run(self, step: Step, plain: bool, filtered: bool) -> None:
        penalized = self.state.seen is not None and not plain
        if not self.on_gpu:
            self._compute(step, plain, filtered)
            return
        self._find_graph(step, plain, filtered, penalized).replay()

    @torch.no_grad()
    def _find_graph(
        self, step: Step, plain: bool, filtered: bool, penalized: bool
    ) -> torch.cuda.CUDAGraph:
        kind = (plain, filtered, penalized)
        graph = step.graphs.get(kind)
        if graph is None:
            inputs, lengths = step.inputs.clone(), self.cache.lengths.clone()
            # nobody is drawn, and whoever is in the step is computed again at the first replay
            step.sampled_row.fill_(-1)
            graph, _ = record_graph(
                lambda: self._compute(step, plain, filtered), num_runs=1, pool=self.pool
            )
            step.inputs.copy_(inputs)
            self.cache.lengths.copy_(lengths)
            step.graphs[kind] = graph
        return graph

    def _compute(self, step: Step, plain: bool, filtered: bool) -> None:
        """The step itself, as it is recorded."""
        shape = step.shape
        if shape == (1, 1, 0) and self.single is not None:
            logits = self._compute_single(step)
        else:
            logits = self.blocks.run(
                step.tokens,
                step.taken,
                num_alone=shape.num_alone,
                num_chunks=shape.num_chunks,
            )
        step.logits = logits
        self.drawer(
            logits,
            step.sampled_row.long(),
            step.token,
            step.logprob,
            plain=plain,
            filtered=filtered,
        )

    def _compute_single(self, step: Step) -> Float[Tensor, "1 V"]:
        assert self.single is not None
        tokens, blocks = step.tokens, self.blocks
        blocks.begin(tokens)
        logits = self.single(
            blocks.token[:1],
            tokens.position.long(),
            self.cache.tables,
            self.cache.lengths,
            tokens.chunk_row,
        )
        step.taken.copy_(self.single.told[1:, None])
        return logits[None]

    def _find_tops(self, step: Step, most: int) -> tuple[Tensor, Tensor]:
        """The most probable tokens of each place, on their way to the host."""
        assert step.logits is not None
        found = []
        for tensor in top_logprobs(step.logits, most):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.on_gpu)
            found.append(host.copy_(tensor, non_blocking=True))
        return found[0], found[1]

    def read(self, flight: FusedFlight) -> Report:
        """What the device told of a step that is done."""
        works, begins, stage = flight.works, flight.begins, flight.stage
        _, rows, starts, counts, _ = zip(*[work.chunk for work in works], strict=True)
        taken_RT = stage.taken[:, : begins[-1] + counts[-1]]
        paths = self.ways.look_up(taken_RT)
        # keys that a chunk stored in each routed block, and how many lay before them
        kept_CR = np.add.reduceat(taken_RT, begins, axis=1, dtype=np.int64).T
        before_CR = self.pages.lengths[find_rows(rows)][:, self.routed_layers]
        # each query sees those before it and its own
        num_pairs = np.einsum("cr,cr->c", kept_CR, 2 * before_CR + kept_CR + 1).tolist()
        num_routed = kept_CR.sum(axis=1).tolist()
        stored_CL = np.repeat(np.array(counts), self.config.num_layers)
        stored_CL = stored_CL.reshape(len(works), self.config.num_layers)
        stored_CL[:, self.routed_layers] = kept_CR
        # tokens were asked for in the order in which their chunks stand
        drawn = iter(self._read_drawn(flight, sum(work.wish is not None for work in works)))
        outcomes, num_dense = [], self.num_dense
        each = zip(works, begins, starts, counts, num_routed, num_pairs, strict=True)
        for work, begin, start, count, routed, pairs in each:
            visits = num_dense * count + routed
            # what lay before a dense layer's chunk is known even where steps before it are not
            # settled
            pairs = (pairs + num_dense * count * (2 * start + count + 1)) // 2
            used = Usage(visits, routed, 0, visits, routed, pairs, 0)
            token, logprob, top = (None, 0.0, None) if work.wish is None else next(drawn)
            outcomes.append(Outcome(token, logprob, top, used, paths[begin : begin + count]))
        if flight.order is not None:
            back = np.argsort(flight.order)
            outcomes, stored_CL = [outcomes[number] for number in back], stored_CL[back]
        return Report(outcomes, stored_CL)

    def _read_drawn(
        self, flight: FusedFlight, count: int
    ) -> Iterable[tuple[int, float, tuple[list[int], list[float]] | None]]:
        """The tokens that were drawn, their log-probabilities, and the most probable ones."""
        tops: list[Any] = [None] * count
        if flight.tops is not None:
            tops = list(zip(flight.tops[1].tolist(), flight.tops[0].tolist(), strict=True))
        stage = flight.stage
        return zip(stage.token.tolist(), stage.logprob.tolist(), tops, strict=False)


class Ways(dict[bytes, tuple[bool, ...]]):
    """Ways through the routed blocks by their bytes; most tokens share theirs with others."""

    def __missing__(self, taken: bytes) -> tuple[bool, ...]:
        way = self[taken] = tuple(map(bool, taken))
        return way

    def look_up(self, taken_RT: np.ndarray) -> list[tuple[bool, ...]]:
        """Each token's way."""
        num_routes, num_tokens = taken_RT.shape
        if not num_routes:
            return [()] * num_tokens
        if len(self) > MOST_WAYS:
            self.clear()
        taken_TR = np.ascontiguousarray(taken_RT.T)
        return list(map(self.__getitem__, taken_TR.view(f"V{num_routes}")[:, 0].tolist()))


def put_alone_first(works: Sequence[Work]) -> tuple[list[Work], list[int] | None]:
    """The chunks of one token, then all others; and which number each had, if not its own."""
    counts = [work.chunk.count for work in works]
    if 1 not in counts[counts.count(1) :]:
        return list(works), None
    order = sorted(range(len(works)), key=lambda number: counts[number] > 1)
    return [works[number] for number in order], order


def _fill(shape: StepShape, parts: Sequence[np.ndarray], works: Sequence[Work]) -> list[int]:
    """Write a step's inputs; returns where each chunk's tokens begin."""
    given, rows, positions, chunks, begin, chunk_row, count, sampled, num_sampled, to = parts
    _, row_of, starts, counts, _ = zip(*[work.chunk for work in works], strict=True)
    rows.fill(-1)
    chunk_row.fill(-1)
    to.fill(-1)
    first = counts.count(1)
    begins = list(range(first))
    # whoever is alone is a chunk of its own
    given[:first] = [work.tokens[0] if work.tokens else -1 for work in works[:first]]
    rows[:first] = chunk_row[:first] = row_of[:first]
    positions[:first] = starts[:first]
    chunks[:first] = begin[:first] = begins
    begin[first : shape.num_alone + 1] = first
    place = shape.num_alone
    for (_, row, start, number, _), tokens, _ in works[len(begins) :]:
        begins.append(first)
        end = first + number
        given[first:end] = tokens
        rows[first:end] = chunk_row[place] = row
        positions[first:end] = np.arange(start, start + number)
        chunks[first:end] = place
        first, place = end, place + 1
        begin[place] = end
    begin[place:] = count[0] = first
    # the last token of each chunk that asks for one
    asked = [number for number, work in enumerate(works) if work.wish is not None]
    sampled[: len(asked)] = [begins[number] + counts[number] - 1 for number in asked]
    sampled[len(asked) :] = 0
    to[: len(asked)] = [row_of[number] for number in asked]
    num_sampled[0] = len(asked)
    return begins


def find_single_obstacle(config: ModelConfig) -> str | None:
    """Why a sequence that is alone cannot be decoded by one kernel, or None where it can."""
    head_width = config.shape.head_width
    if config.qkv_bias:
        return "its queries, keys and values have biases"
    if head_width < 16 or head_width & (head_width - 1):
        return f"its head width is {head_width}, not a power of two from 16 on"
    return None


def choose_size(num_tokens: int) -> int:
    """The number of tokens that a step with prompts is padded to."""
    for size in SIZES:
        if num_tokens <= size:
            return size
    return -(-num_tokens // SIZES[-1]) * SIZES[-1]


def choose_alone(num_tokens: int) -> int:
    """The number of tokens that a step without prompts is padded to: a power of two."""
    return 1 << (num_tokens - 1).bit_length()


def choose_chunks(num_chunks: int) -> int:
    """The number of chunks, alone or not, that a step with prompts is padded to."""
    for size in CHUNKS:
        if num_chunks <= size:
            return size
    return 1 << (num_chunks - 1).bit_length()
