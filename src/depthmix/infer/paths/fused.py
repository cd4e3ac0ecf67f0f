"""Steps that stay on the device: forward pass, sampling and bookkeeping in one recorded graph.

When a step ends, everything the next one needs is on the device: the sampled tokens, the number of
tokens stored in each layer, and the sampling settings. The host therefore launches a step before it
has read the previous one's results, and the device does not wait for it. A step's cost depends on
the tokens that blocks keep, not on the padded size of its graph. Knows nothing of requests, and
does not decide which sequences are in a step.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.infer.cache import PagedCache
from depthmix.infer.depth import Usage
from depthmix.infer.pages import Pages
from depthmix.infer.paths.layout import find_stacks, make_rules
from depthmix.infer.sampling import SamplingParams, mark_seen, pack_settings, top_logprobs
from depthmix.infer.scheduler import Plan
from depthmix.infer.steps import Flight, Ready, Report, Top, join_reports
from depthmix.infer.track import Track
from depthmix.kernels.compiling import compile_ahead
from depthmix.kernels.decode.blocks import Blocks, Pools, Tokens
from depthmix.kernels.decode.draw import Drawer, DrawState
from depthmix.kernels.decode.step import DecodeStep
from depthmix.kernels.recording import record_graph, turns
from depthmix.nn import Transformer

# maximum steps in flight, staging buffers on the host per step shape, and maximum rounds of a step
DEPTH, NUM_STAGES, MOST_ROUNDS = 2, 3, 8
# token counts are padded to one of these, or to a multiple of the last
SIZES = (32, 64, 96, 128, 192, 256)
# numbers of chunks, of each kind, are padded to one of these
CHUNKS = (0, 4, 16, 64, 256)
# numbers sent for a new sample: its `shares` and `counts` (see `DrawState`), and its row
NUM_NEWS = 10


class StepShape(NamedTuple):
    """Maximum numbers of tokens and chunks of a step."""

    num_tokens: int
    num_alone: int
    """Chunks of one token, which come first."""
    num_chunks: int
    """Chunks of any length."""

    @property
    def num_sampled(self) -> int:
        return self.num_alone + self.num_chunks

    @property
    def most_rounds(self) -> int:
        """Maximum number of rounds: more than one needs all next tokens to be sampled ones."""
        return 1 if self.num_chunks else MOST_ROUNDS


class Outcome(NamedTuple):
    """Host memory for the results of one round, whole and as views of its parts."""

    told: Tensor
    token: np.ndarray
    logprob: np.ndarray
    taken: np.ndarray


class Stage(NamedTuple):
    """Host memory for one step in flight, whole and as views of its parts."""

    inputs: Tensor
    parts: list[np.ndarray]
    news: np.ndarray
    outcomes: list[Outcome]
    """By round."""
    event: torch.cuda.Event | None
    """Recorded after the results of all rounds are copied."""


class Step:
    """One shape of step: its inputs and outputs, on the device and staged on the host.

    The inputs begin with `news`: settings of samples new to the device, and their rows, by column.
    """

    def __init__(self, shape: StepShape, num_routes: int, device: torch.device) -> None:
        self.shape, on_gpu = shape, device.type == "cuda"
        # every chunk may sample a token
        num_tokens, num_chunks = shape.num_tokens, shape.num_sampled
        sizes = [2 * NUM_NEWS * num_chunks, *[num_tokens] * 4]
        sizes += [num_chunks + 1, num_chunks, 1, num_chunks, 1, num_chunks]
        self.inputs = torch.zeros(sum(sizes), device=device, dtype=torch.int32)
        news, *parts, self.sampled_row = self.inputs.split(sizes)
        self.news = news.view(torch.int64).view(NUM_NEWS, num_chunks)
        self.tokens = Tokens(*parts)
        # no rows; but the single-sequence kernel needs a valid one
        for rows in (self.tokens.row, self.tokens.chunk_row, self.sampled_row):
            rows.fill_(-1)
        if num_chunks == 1:
            self.tokens.chunk_row.zero_()
        # tokens, log-probabilities and routing decisions, in one tensor for the host
        told_sizes = [8 * num_chunks, 4 * num_chunks, num_routes * num_tokens]

        def split(told: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            token, logprob, taken = told.split(told_sizes)
            taken = taken.view(num_routes, num_tokens)
            return token.view(torch.int64), logprob.view(torch.float32), taken

        self.told = torch.zeros(sum(told_sizes), device=device, dtype=torch.uint8)
        self.token, self.logprob, self.taken = split(self.told)
        self.graphs: dict[tuple[bool, bool, bool], torch.cuda.CUDAGraph] = {}
        self.logits: Tensor | None = None

        def make_stage() -> Stage:
            # views for the host to write and read
            inputs = torch.zeros(self.inputs.shape, dtype=torch.int32, pin_memory=on_gpu)
            news, *parts = (part.numpy() for part in inputs.split(sizes))
            news = news.view(np.int64).reshape(self.news.shape)
            # align each round to 8 bytes, the size of the widest type
            shape_told = (shape.most_rounds, -(-sum(told_sizes) // 8) * 8)
            told = torch.zeros(shape_told, dtype=torch.uint8, pin_memory=on_gpu)
            rows = told[:, : sum(told_sizes)]
            outcomes = [Outcome(row, *(part.numpy() for part in split(row))) for row in rows]
            return Stage(inputs, parts, news, outcomes, torch.cuda.Event() if on_gpu else None)

        self.stages = [make_stage() for _ in range(NUM_STAGES)]
        # the decoding rows that each stage was filled for, if it holds nothing else
        self.filled: list[np.ndarray | None] = [None] * NUM_STAGES
        self.turn = 0

    def take_turn(self) -> Stage:
        """Return a stage that no step in flight uses."""
        self.turn = (self.turn + 1) % NUM_STAGES
        return self.stages[self.turn]

    def fill(self, plan: Plan, tracks: Sequence[Track], num_alone: int) -> np.ndarray:
        """Write a plan into the current stage; return the index of each chunk's first token."""
        stage, filled = self.stages[self.turn], self.filled[self.turn]
        if filled is plan.row:
            # same rows as before, and every token was sampled on the device: only positions change
            stage.parts[2][:num_alone] = plan.start
            return stage.parts[3][:num_alone]
        begins = _fill(self.shape, stage.parts, plan, tracks, num_alone)
        if plan.rounds > 1:
            # these were sampled on the device too, and only the device knows the next ones
            stage.parts[0][:num_alone] = -1
        all_drawn = num_alone == len(plan) and stage.parts[0][:num_alone].max() < 0
        self.filled[self.turn] = plan.row if all_drawn else None
        return begins


class FusedFlight(NamedTuple):
    """A step in flight."""

    runner: "FusedRunner"
    plan: Plan
    """In the order of the step's tokens: chunks of one token come first."""
    order: np.ndarray | None
    """Index of each chunk in the original plan, if the order differs."""
    num_alone: int
    begins: np.ndarray
    """Index of each chunk's first token."""
    stage: Stage
    tops: list[tuple[Tensor, Tensor] | None]
    """By round."""

    def is_ready(self) -> bool:
        return self.stage.event is not None and self.stage.event.query()

    def wait(self) -> list[Report]:
        if self.stage.event is not None:
            self.stage.event.synchronize()
        rounds = zip(self.stage.outcomes, self.tops, strict=False)
        return [self.runner.read(self, outcome, tops) for outcome, tops in rounds]


class _Group(NamedTuple):
    """Rows that a later plan may repeat, with what was derived from them."""

    row: np.ndarray
    num_alone: int
    order: np.ndarray | None
    step: Step
    plain: bool
    filtered: bool
    most_tops: int


class FusedRunner:
    """A model with a paged cache, computed by whole-model kernels."""

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
        """`apart` computes one chunk at a time, so that its results do not depend on the others."""
        self.apart, self.depth = apart, 1 if apart else DEPTH
        self.most_rounds = 1 if apart else MOST_ROUNDS
        config, weight = model.config, model.embedding.weight
        self.model, self.config, self.pages, self.selector = model, config, pages, selector
        self.device = weight.device
        self.on_gpu = self.device.type == "cuda"
        # before anything is recorded, because the parameters move here
        self.stacks = find_stacks(model)
        self.weights = self.stacks.weights
        self.rules = make_rules(config, selector)
        self.cache = PagedCache(config, pages, device=self.device, dtype=weight.dtype, by_page=True)
        self.state = state = DrawState(pages.num_rows, config.vocab_size, self.device)
        # all settings as one tensor, so that one operation writes those of new samples
        num_shares = len(state.shares)
        self.settings = torch.cat([state.shares.view(torch.int64), state.counts])
        state.shares = self.settings[:num_shares].view(torch.float64)
        state.counts = self.settings[num_shares:]
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
        self.steps: dict[StepShape, Step] = {}
        # the outputs of a step have their own buffers, so graphs can share memory for the rest
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        # by row: the sample whose settings the device has, and how they affect a step's sampling
        self._settled = np.full(pages.num_rows, -1)
        self._is_plain = np.zeros(pages.num_rows, dtype=bool)
        self._filters = np.zeros(pages.num_rows, dtype=bool)
        self._num_tops = np.zeros(pages.num_rows, dtype=np.int64)
        self._group: _Group | None = None
        self._lost = False

    def _make_single(self) -> DecodeStep | None:
        if find_single_obstacle(self.config) is not None:
            return None
        pages = (self.cache.key.transpose(0, 1), self.cache.value.transpose(0, 1))
        return DecodeStep(self.weights, self.rules, *pages)

    def check_weights(self) -> None:
        """Raise if the model's weights are no longer those that this runner was built for."""
        if not self.stacks.are_current():
            raise RuntimeError(
                "the model's weights were moved or replaced after this engine was made: make a "
                "new Engine for it"
            )

    def mark_seen(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """Return nothing: the device keeps its own."""

    def forget(self) -> None:
        """Discard assumptions about the device's state, after a failed step."""
        self._settled.fill(-1)
        self._group, self._lost = None, True

    def take_usage(self, row: int) -> Usage:
        """Return the work spent on the tokens in a row's cache.

        A token that visits a block is stored there, each query sees the keys before it and its own,
        and no block has experts, so everything follows from the row's lengths.
        """
        num_routed = int(self.pages.lengths[row, self.routed_layers].sum())
        lengths = self.pages.lengths[row].tolist()
        num_visits = sum(lengths)
        num_pairs = sum(length * (length + 1) for length in lengths) // 2
        return Usage(num_visits, num_routed, 0, num_visits, num_routed, num_pairs, 0)

    def warm_up(self, progress: Callable[[int, int], None] | None) -> float:
        """Compile what requests of any length need, and record the most frequent graphs."""
        start = time.perf_counter()
        if not self.on_gpu:
            return 0.0
        steps = [self._find_step(shape) for shape in self.list_shapes()]
        # other sampling variants are recorded at first use, which takes a moment
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
        """List the most frequent shapes: decoding only, and prompts with and without decoding.

        Together they use every kernel that any shape uses.
        """
        most_rows = self.pages.num_rows
        alone = [choose_alone(n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
        shapes = [StepShape(n, n, 0) for n in alone if n <= choose_alone(most_rows)]
        few, many = choose_chunks(1), choose_chunks(most_rows)
        sizes = sorted({choose_size(1 << n) for n in range(1, 20) if 1 << n < self.most_tokens})
        shapes += [StepShape(size, 0, few) for size in (*sizes, self.most_tokens)]
        shapes += [StepShape(self.most_tokens, many, chunks) for chunks in (few, many)]
        return [*shapes, StepShape(choose_size(min(self.most_tokens, 2 * most_rows)), 0, many)]

    def launch(self, plan: Plan, tracks: Sequence[Track]) -> Flight:
        """Start a step with these chunks, asynchronously."""
        with self._on_device(), turns:
            if not self.apart:
                return self._launch(plan, tracks)
            each = zip(plan, tracks, strict=True)
            flights = (self._launch(Plan.gather([chunk]), [track]) for chunk, track in each)
            return Ready(join_reports([report for flight in flights for report in flight.wait()]))

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the model's GPU current, because kernels launch on torch's current device."""
        return torch.cuda.device(self.device) if self.on_gpu else nullcontext()

    def _launch(self, plan: Plan, tracks: Sequence[Track]) -> FusedFlight:
        if self._lost:
            self.cache.send_tables()
            self._lost = False
        else:
            self.cache.follow(self.pages.drain_changes())
        group, news = self._group, None
        if group is None or group.row is not plan.row:
            news = self._list_news(plan, tracks)
            group = self._group = self._find_group(plan)
        if group.order is not None:
            plan = Plan(*(column[group.order] for column in plan.columns), rounds=plan.rounds)
            tracks = [tracks[number] for number in group.order.tolist()]
        step = group.step
        stage = step.take_turn()
        begins = step.fill(plan, tracks, group.num_alone)
        if news is not None:
            stage.news[:, : news.shape[1]] = news
        step.inputs.copy_(stage.inputs, non_blocking=True)
        if news is not None:
            sent = step.news[:, : news.shape[1]]
            self.settings.index_copy_(1, sent[-1], sent[:-1])
        tops: list[tuple[Tensor, Tensor] | None] = []
        for number, outcome in enumerate(stage.outcomes[: plan.rounds]):
            if number:
                step.tokens.position.add_(1)
            self._run(step, group.plain, group.filtered)
            tops.append(self._find_tops(step, group.most_tops) if group.most_tops else None)
            outcome.told.copy_(step.told, non_blocking=True)
        if stage.event is not None:
            stage.event.record()
        return FusedFlight(self, plan, group.order, group.num_alone, begins, stage, tops)

    def _find_group(self, plan: Plan) -> _Group:
        """Prepare a plan's step."""
        num_alone, order = int(np.count_nonzero(plan.count == 1)), None
        if num_alone < len(plan):
            order = put_alone_first(plan.count)
        asked = plan.row[plan.samples]
        return _Group(
            plan.row,
            num_alone,
            order,
            self._find_step(choose_shape(plan, num_alone)),
            plain=bool(self._is_plain[asked].all()),
            filtered=bool(self._filters[asked].any()),
            most_tops=int(self._num_tops[asked].max(initial=0)),
        )

    def _find_step(self, shape: StepShape) -> Step:
        step = self.steps.get(shape)
        if step is None:
            step = self.steps[shape] = Step(shape, len(self.config.routed_layers), self.device)
        return step

    def _list_news(self, plan: Plan, tracks: Sequence[Track]) -> np.ndarray | None:
        """Return the settings of samples new to the device, and their rows, by column."""
        self._settled[plan.row[plan.start == 0]] = -1
        is_new = plan.samples & (self._settled[plan.row] != plan.key)
        if not np.count_nonzero(is_new):
            return None
        news = np.flatnonzero(is_new).tolist()
        new = [(int(plan.row[number]), tracks[number]) for number in news]
        for row, track in new:
            params = track.params
            self._is_plain[row], self._filters[row] = params.is_plain, params.filters
            self._num_tops[row] = params.logprobs or 0
        self._settled[plan.row[news]] = plan.key[news]
        shares, counts = pack_settings(
            [track.params for _, track in new],
            [track.seed for _, track in new],
            [track.num_new for _, track in new],
        )
        marked = [(row, track) for row, track in new if track.params.penalizes]
        if marked:
            # graphs recorded before it is first allocated do not use it
            seen = torch.stack([self._mark_seen(track) for _, track in marked])
            rows = self._send(torch.tensor([row for row, _ in marked]))
            self.state.allocate_seen().index_copy_(0, rows, self._send(seen))
        shares = shares.view(torch.int64).numpy()
        return np.concatenate([shares, counts.numpy(), plan.row[news][None]])

    def _mark_seen(self, track: Track) -> Tensor:
        return mark_seen(track.prompt.tolist(), track.new, self.config.vocab_size)

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
            # no sampling; the step's tokens are computed again at the first replay
            step.sampled_row.fill_(-1)
            graph, _ = record_graph(
                lambda: self._compute(step, plain, filtered), num_runs=1, pool=self.pool
            )
            step.inputs.copy_(inputs)
            self.cache.lengths.copy_(lengths)
            step.graphs[kind] = graph
        return graph

    def _compute(self, step: Step, plain: bool, filtered: bool) -> None:
        """The work of one step, as recorded."""
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
        """Start copying each place's most probable tokens to the host."""
        assert step.logits is not None
        found = []
        for tensor in top_logprobs(step.logits, most):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.on_gpu)
            found.append(host.copy_(tensor, non_blocking=True))
        return found[0], found[1]

    def read(
        self, flight: FusedFlight, outcome: Outcome, tops: tuple[Tensor, Tensor] | None
    ) -> Report:
        """Read the results of a finished round."""
        plan, begins = flight.plan, flight.begins
        num_chunks, num_tokens = len(plan), int(begins[-1] + plan.count[-1])
        taken_RT = outcome.taken[:, :num_tokens]
        # number of keys that each chunk stored in each routed block
        if num_chunks == num_tokens:
            kept_CR = taken_RT.T
        else:
            # twice as fast as with int64
            kept_CR = np.add.reduceat(taken_RT, begins, axis=1, dtype=np.int32).T
        stored_CL = np.repeat(plan.count[:, None], self.config.num_layers, axis=1)
        stored_CL[:, self.routed_layers] = kept_CR
        taken = _read_taken(taken_RT, plan, flight.num_alone, begins)
        report = Report(*_read_drawn(plan.samples, outcome, tops), taken, stored_CL)
        return report if flight.order is None else report.take(np.argsort(flight.order))


def _read_drawn(
    samples: np.ndarray, outcome: Outcome, found: tuple[Tensor, Tensor] | None
) -> tuple[list[int | None], list[float], list[Top | None]]:
    """Read the sampled tokens, their log-probabilities, and the most probable tokens."""
    num_sampled = int(np.count_nonzero(samples))
    tops: list[Top | None] = [None] * num_sampled
    if found is not None:
        ids, values = (tensor[:num_sampled].tolist() for tensor in reversed(found))
        tops = list(zip(ids, values, strict=True))
    tokens, logprobs = (part[:num_sampled].tolist() for part in (outcome.token, outcome.logprob))
    # results come in chunk order: insert entries for chunks that sample nothing
    for place in [] if num_sampled == len(samples) else np.flatnonzero(~samples).tolist():
        tokens.insert(place, None)
        logprobs.insert(place, 0.0)
        tops.insert(place, None)
    return tokens, logprobs, tops


def _read_taken(
    taken_RT: np.ndarray, plan: Plan, num_alone: int, begins: np.ndarray
) -> list[bytes]:
    """Read which routed blocks each chunk's tokens went through."""
    num_routes = len(taken_RT)
    if not num_routes:
        return [b""] * len(plan)
    alone = np.ascontiguousarray(taken_RT.T[:num_alone])
    taken = alone.view(f"V{num_routes}")[:, 0].tolist()
    for begin, count in zip(begins[num_alone:].tolist(), plan.count[num_alone:], strict=True):
        taken.append(taken_RT.T[begin : begin + count].tobytes())
    return taken


def put_alone_first(counts: np.ndarray) -> np.ndarray | None:
    """Return the order that puts chunks of one token first; None if they already are."""
    is_longer = counts > 1
    if not (is_longer[:-1] & ~is_longer[1:]).any():
        return None
    return np.argsort(is_longer, kind="stable")


def choose_shape(plan: Plan, num_alone: int) -> StepShape:
    """Return the smallest shape with room for these chunks."""
    num_chunks = len(plan) - num_alone
    if not num_chunks:
        size = choose_alone(num_alone)
        return StepShape(size, size, 0)
    num_tokens = int(plan.count.sum())
    return StepShape(choose_size(num_tokens), choose_chunks(num_alone), choose_chunks(num_chunks))


def _fill(
    shape: StepShape,
    parts: Sequence[np.ndarray],
    plan: Plan,
    tracks: Sequence[Track],
    num_alone: int,
) -> np.ndarray:
    """Write a step's inputs; return the index of each chunk's first token."""
    given, rows, positions, chunks, begin, chunk_row, count, sampled, num_sampled, to = parts
    begins = plan.count.cumsum() - plan.count
    rows.fill(-1)
    chunk_row.fill(-1)
    to.fill(-1)
    # -1 for a token that a step in flight has yet to sample
    alone = zip(tracks[:num_alone], plan.start[:num_alone].tolist(), strict=True)
    given[:num_alone] = [next(iter(track.list_tokens(start, 1)), -1) for track, start in alone]
    rows[:num_alone] = chunk_row[:num_alone] = plan.row[:num_alone]
    positions[:num_alone] = plan.start[:num_alone]
    chunks[:num_alone] = begin[:num_alone] = begins[:num_alone]
    begin[num_alone : shape.num_alone + 1] = num_alone
    first, place = num_alone, shape.num_alone
    for (_, row, start, number, _), track in zip(plan[num_alone:], tracks[num_alone:], strict=True):
        end = first + number
        given[first:end] = track.list_tokens(start, number)
        rows[first:end] = chunk_row[place] = row
        positions[first:end] = np.arange(start, start + number)
        chunks[first:end] = place
        first, place = end, place + 1
        begin[place] = end
    begin[place:] = count[0] = first
    # the last token of each chunk that samples
    ends = (begins + plan.count - 1)[plan.samples]
    sampled[: len(ends)] = ends
    sampled[len(ends) :] = 0
    to[: len(ends)] = plan.row[plan.samples]
    num_sampled[0] = len(ends)
    return begins


def find_single_obstacle(config: ModelConfig) -> str | None:
    """Say why the single-sequence kernel does not support this model; None if it does."""
    head_width = config.shape.head_width
    if config.qkv_bias:
        return "its queries, keys and values have biases"
    if head_width < 16 or head_width & (head_width - 1):
        return f"its head width is {head_width}, not a power of two from 16 on"
    return None


def choose_size(num_tokens: int) -> int:
    """Pad the number of tokens of a step with prompts."""
    for size in SIZES:
        if num_tokens <= size:
            return size
    return -(-num_tokens // SIZES[-1]) * SIZES[-1]


def choose_alone(num_tokens: int) -> int:
    """Pad the number of tokens of a step without prompts to a power of two."""
    return 1 << (num_tokens - 1).bit_length()


def choose_chunks(num_chunks: int) -> int:
    """Pad the number of chunks, of either kind, of a step with prompts."""
    for size in CHUNKS:
        if num_chunks <= size:
            return size
    return 1 << (num_chunks - 1).bit_length()
