"""The engine: requests in, tokens out, many at once, each as if it were alone.

Joins the parts: the scheduler says who computes what, the runner computes it and draws. On a GPU
the runner takes the next step before the last one's tokens were read. Does not know the tokenizer:
`decode` is a function.
"""

import operator
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from depthmix.config import ModelConfig
from depthmix.infer.depth import DepthMeter, Path
from depthmix.infer.pages import Pages
from depthmix.infer.paths.plain import Runner, find_obstacle
from depthmix.infer.results import Event, Finish, Result, Sample, Stats, TokenScore
from depthmix.infer.sampling import SamplingParams
from depthmix.infer.scheduler import Plan, Scheduler
from depthmix.infer.scores import score_tokens
from depthmix.infer.steps import Flight, Report, StepRunner
from depthmix.infer.text import TextStream
from depthmix.infer.track import Track
from depthmix.kernels.recording import turns
from depthmix.nn import Transformer

# seeds of a request's samples lie this far apart: no two requests' samples meet by counting up
SEED_STRIDE = 0x5DEECE66D
# default batch and step sizes: a GPU wants many requests and many tokens
BATCH_CPU, BATCH_GPU = 8, 256
CHUNK_CPU, CHUNK_GPU = 512, 8192
# room for a routed block's tokens, over its capacity: texts use more depth or less
CACHE_MARGIN = 1.25
# tokens that rows have room for beyond the next step: their books need not be kept at every one
PAGES_AHEAD = 8
# after so many steps in a row that the host had to wait for, steps have fewer rounds
PATIENCE = 16
# paths through the routed blocks that are remembered; a model of many blocks has more than memory
MOST_PATHS = 1 << 16
# default share of a GPU's free memory that the cache takes
CACHE_SHARE = 0.5


# token ids: a list, a tuple, an array or a tensor of whole numbers; `read_prompt` refuses the rest
Prompt = Any


class _Step(NamedTuple):
    """A step that is under way."""

    plan: Plan
    tracks: list[Track]
    flight: Flight


class Engine:
    """Generates from a model: `generate` for all at once, `add` and `step` to see tokens come.

    `add`, `cancel` and `stats` may be called from any thread at any time; `step` and `generate` by
    one thread at a time.

    >>> engine = Engine(Transformer(load_preset("tiny")))
    >>> (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=0))
    >>> len(result.samples[0].tokens)
    4
    """

    def __init__(
        self,
        model: Transformer,
        *,
        selector: str | None = None,
        decode: Callable[[list[int]], str] | None = None,
        max_batch: int | None = None,
        cache_tokens: int | None = None,
        page_size: int = 16,
        chunk_tokens: int | None = None,
        invariant: bool | None = None,
        seed: int | None = None,
        record: bool | None = None,
    ) -> None:
        """`selector` decides over depth: predictor or router, else the best that the model has.

        `decode` turns tokens into text, for results that carry it and for stop strings.
        `max_batch` is the most samples at a time: 8 on a CPU and 256 on a GPU unless given.
        `cache_tokens` is the room for tokens that go through every block, all requests together:
        requests wait, or give way, when it is taken. Unless given there is room for `max_batch`
        sequences of the model's longest length at the capacity of its blocks, on a GPU in at most
        half of its free memory. Prompts are computed `chunk_tokens` at a time beside the others'
        tokens. `invariant` computes each request apart, so that its numbers are the same to the
        last bit whatever else runs; the default on a CPU. `seed` is for requests that name
        none. `record` keeps decoding steps as CUDA graphs, unless given on a GPU only.
        """
        if not isinstance(model, Transformer):
            raise ValueError(
                "an engine needs a Transformer: open_model(path).network is the one of a folder"
            )
        config = model.config
        device = model.embedding.weight.device
        on_gpu = device.type == "cuda"
        max_batch = (BATCH_GPU if on_gpu else BATCH_CPU) if max_batch is None else max_batch
        if chunk_tokens is None:
            chunk_tokens = CHUNK_GPU if on_gpu else CHUNK_CPU
        sizes = {"max_batch": max_batch, "page_size": page_size, "chunk_tokens": chunk_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if cache_tokens is not None and cache_tokens < page_size:
            raise ValueError(f"cache_tokens = {cache_tokens} must be a page or more: {page_size}")
        self.model, self.config, self.decode = model, config, decode
        self.invariant = not on_gpu if invariant is None else invariant
        chosen = config.choose_selector(selector)
        if cache_tokens is not None:
            num_pages = cache_tokens // page_size * config.num_layers
        else:
            num_pages = count_pages(config, chosen, max_batch, page_size)
            if on_gpu:
                num_pages = _limit_pages(num_pages, model, page_size)
        ahead = PAGES_AHEAD if on_gpu and record is not False else 0
        self.pages = Pages(
            num_pages, page_size, config.num_layers, max_batch, ahead, config.max_seq_len
        )
        # several prompts may share a step
        step_tokens = max(chunk_tokens, 2 * max_batch)
        chunk_tokens = min(chunk_tokens, config.max_seq_len)
        if self.invariant:
            # a whole chunk has room beside those that decode, because chunks are never cut
            step_tokens = chunk_tokens + max_batch
        self.runner = make_runner(
            model,
            self.pages,
            chosen,
            record=on_gpu if record is None else record,
            apart=self.invariant,
            max_step_tokens=step_tokens,
        )
        self._tracks: dict[int, Track] = {}
        self.scheduler = Scheduler(
            self.pages,
            max_rows=max_batch,
            max_step_tokens=step_tokens,
            chunk_tokens=chunk_tokens,
            invariant=self.invariant,
            on_stop=partial(_count_use, self._tracks, self.runner),
        )
        self._random = random.Random(seed)
        self._meter = DepthMeter(config, chosen)
        self._paths = _KnownPaths()
        self._steps: deque[_Step] = deque()
        # rounds of a step of decoding rows, and steps in a row that were waited for
        self._rounds, self._num_waits = 1, 0
        # the first guards the books, the second the one thread that steps
        self._lock, self._stepping = threading.RLock(), threading.Lock()
        self._num_requests = self._num_keys = self._peak_pages = 0

    @property
    def selector(self) -> str | None:
        """Who decides over depth."""
        return self.runner.selector

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._tracks)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile and record what requests of any length need; returns the seconds it took.

        It is done at first use otherwise, and there is nothing to do on a CPU. Compiled kernels
        stay on disk for the next process. `progress` hears how many of how many parts are done.
        """
        with self._own_steps():
            if self.has_work:
                raise ValueError("warm_up() runs alone: finish or cancel the requests first")
            return self.runner.warm_up(progress)

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Put a request in line; returns its number, which its events carry."""
        return self._add(read_prompt(prompt), params)

    def score(self, prompt: Prompt, *, top: int = 0) -> list[TokenScore]:
        """For each token of a text but the first: how probable it is after those before it.

        By the model's own full pass, apart from all requests, with the `top` most probable tokens
        at each place. Like `step`, by one thread at a time.
        """
        tokens = read_prompt(prompt)
        self._check_prompt(tokens)
        if top < 0:
            raise ValueError(f"top = {top} must be at least 0")
        device = self.model.embedding.weight.device
        # other threads' engines launch their steps between two of these
        with self._own_steps(), turns:
            if device.type != "cuda":
                return score_tokens(self.model, tokens, self.selector, top)
            with torch.cuda.device(device):
                return score_tokens(self.model, tokens, self.selector, top)

    def cancel(self, request: int) -> list[Event]:
        """End a request's samples where they stand; a request that is done, or never was, is fine.

        Returns the events of their ends.
        """
        with self._lock:
            keys = [key for key, track in self._tracks.items() if track.request == request]
            return [self._finish(key, None, "", (), "cancelled") for key in keys]

    def list_paths(self, request: int, sample: int = 0) -> Sequence[Path]:
        """Paths of a running sample's tokens, the prompt's first, as far as they are computed."""
        with self._lock:
            for track in self._tracks.values():
                if (track.request, track.number) == (request, sample):
                    return track.trail.read()
        return ()

    def step(self) -> list[Event]:
        """Run one step of the requests that the scheduler chose; returns what is new.

        Where the host is slower than the device, a step may draw several tokens of each sample. If
        it raises, no token is lost: the next call tries again. A request whose own text cannot be
        decoded ends alone, as failed.
        """
        with self._own_steps():
            try:
                with self._lock:
                    while len(self._steps) < self.runner.depth:
                        plan = self.scheduler.plan(self._rounds)
                        if not plan:
                            break
                        self._start(plan)
                if not self._steps:
                    return []
                self._choose_rounds()
                # others may add and cancel meanwhile
                reports = self._steps[0].flight.wait()
                with self._lock:
                    return self._settle(self._steps.popleft().plan, reports)
            except BaseException:
                with self._lock:
                    self._abandon()
                raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """All prompts to their ends, in the prompts' order; `params` for all, or one for each."""
        if self.has_work:
            raise ValueError("generate() runs alone: finish or cancel the requests of add() first")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(params)} params")
        samples: dict[int, dict[int, Sample]] = {}
        tokens = [read_prompt(prompt) for prompt in prompts]
        try:
            for prompt, wish in zip(tokens, params, strict=True):
                samples[self._add(prompt, wish)] = {}
            while self.has_work:
                for event in self.step():
                    if event.result is not None:
                        samples[event.request][event.sample] = event.result
                        if event.result.error is not None:
                            raise event.result.error
        finally:
            # whatever went wrong, nothing stays behind
            for request in samples:
                self.cancel(request)
        return [
            Result(request, tuple(prompt), tuple(found[i] for i in sorted(found)))
            for (request, found), prompt in zip(samples.items(), tokens, strict=True)
        ]

    def stats(self) -> Stats:
        """Where the engine stands."""
        each = self.runner.cache.bytes_per_page
        with self._lock:
            return Stats(
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting,
                num_preempted=self.scheduler.num_preempted,
                cache_bytes=each * self.pages.num_used,
                cache_bytes_peak=each * self._peak_pages,
                cache_bytes_total=each * self.pages.num_pages,
            )

    def _add(self, tokens: list[int], params: SamplingParams | None) -> int:
        params = SamplingParams() if params is None else params
        max_new = self._check(tokens, params)
        prompt = np.array(tokens, dtype=np.int32)
        with self._lock:
            if not self._tracks:
                self.runner.check_weights()
            seed = self._random.getrandbits(62) if params.seed is None else params.seed
            request, self._num_requests = self._num_requests, self._num_requests + 1
            for number in range(params.n):
                key, self._num_keys = self._num_keys, self._num_keys + 1
                self.scheduler.add(key, len(tokens), max_new - 1)
                self._tracks[key] = Track(
                    request=request,
                    number=number,
                    params=params,
                    seed=_wrap(seed + number * SEED_STRIDE),
                    prompt=prompt,
                    tokens=list(tokens),
                    num_prompt=len(tokens),
                    max_new=max_new,
                    meter=self._meter.copy(),
                    stream=TextStream(self.decode, params.stop) if self.decode else None,
                    seen=self.runner.mark_seen(tokens, params),
                )
        return request

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        config = self.config
        if len(prompt) == 0:
            raise ValueError("a prompt needs at least one token")
        if len(prompt) > config.max_seq_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, the model's max_seq_len is "
                f"{config.max_seq_len}: give fewer"
            )
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            wrong = next(t for t in prompt if not 0 <= t < config.vocab_size)
            raise ValueError(
                f"token {wrong} is not in the vocabulary of {config.vocab_size}: is this the "
                f"model's tokenizer?"
            )

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Refuse what can never be done; returns how many tokens may come."""
        config = self.config
        self._check_prompt(prompt)
        if params.stop and self.decode is None:
            raise ValueError("stop strings need text: give the engine a `decode` function")
        max_new = min(params.max_tokens, config.max_seq_len - len(prompt) + 1)
        # the last token is returned and never computed
        num_tokens, page_size = len(prompt) + max_new - 1, self.pages.page_size
        room = self.pages.num_pages // config.num_layers * page_size
        if num_tokens > room:
            raise ValueError(
                f"max_tokens = {params.max_tokens} after a prompt of {len(prompt)} tokens needs "
                f"cache_tokens = {-(-num_tokens // page_size) * page_size}, and there are {room}: "
                f"ask for fewer, shorten the prompt, or give the engine more"
            )
        return max_new

    def _own_steps(self) -> "_Alone":
        return _Alone(self._stepping)

    def _start(self, plan: Plan) -> None:
        if self._steps and plan.key is self._steps[-1].plan.key:
            tracks = self._steps[-1].tracks
        else:
            tracks = [self._tracks[key] for key in plan.key.tolist()]
        self.scheduler.start(plan)
        try:
            flight = self.runner.launch(plan, tracks)
        except BaseException:
            self._take_back(plan)
            raise
        self._steps.append(_Step(plan, tracks, flight))

    def _choose_rounds(self) -> None:
        """Let steps have more rounds while the device is done before the host asks for a result.

        The host's work for a step is then shared by more tokens. Where the host waits anyway, more
        rounds only make new requests wait, and compute tokens after the last one.
        """
        if self._steps[0].flight.is_ready():
            self._rounds = min(2 * self._rounds, self.runner.most_rounds)
            self._num_waits = 0
            return
        self._num_waits += 1
        if self._num_waits >= PATIENCE:
            self._rounds = max(1, self._rounds // 2)
            self._num_waits = 0

    def _settle(self, plan: Plan, reports: Sequence[Report]) -> list[Event]:
        events: list[Event] = []
        try:
            for part, report in zip(plan.split(), reports, strict=True):
                self.scheduler.settle(part, report.stored)
                self._peak_pages = max(self._peak_pages, self.pages.num_used)
                self._take(part, report, events)
        except BaseException:
            # a sequence whose token was not taken would never be planned again
            for chunk in plan:
                self.scheduler.abandon(chunk, restart=True)
            raise
        return events

    def _take(self, plan: Plan, report: Report, events: list[Event]) -> None:
        """Add the tokens of one round to their samples."""
        # whose tokens go on
        alive: list[int] = []
        columns = (plan.key.tolist(), plan.start.tolist(), plan.count.tolist(), *report[:4])
        try:
            for key, start, count, token, logprob, top, taken in zip(*columns, strict=True):
                track = self._tracks.get(key)
                if track is None:
                    # it ended while the step was running
                    continue
                track.trail.add(start, count, taken)
                if token is None:
                    continue
                path = self._paths[taken if count == 1 else taken[-(len(taken) // count) :]]
                try:
                    text, finish = track.take(token, logprob, top)
                except Exception as error:
                    # only this request fails
                    events.append(self._finish(key, token, "", path, "failed", error))
                    continue
                if finish is not None:
                    events.append(self._finish(key, token, text, path, finish))
                    continue
                alive.append(key)
                score = track.read_score()
                events.append(Event(track.request, track.number, token, text, path, None, score))
        finally:
            self.scheduler.append(*alive)

    def _abandon(self) -> None:
        """Take back all steps that are under way, the newest first."""
        while self._steps:
            self._take_back(self._steps.pop().plan)
        self.runner.forget()

    def _take_back(self, plan: Plan) -> None:
        for chunk in plan:
            self.scheduler.abandon(chunk, restart=not self.runner.can_retry)

    def _finish(
        self,
        key: int,
        token: int | None,
        text: str,
        path: Path,
        finish: Finish,
        error: Exception | None = None,
    ) -> Event:
        self.scheduler.remove(key)
        track = self._tracks.pop(key)
        rest, result = track.end(finish, error)
        score = None if token is None else track.read_score()
        return Event(track.request, track.number, token, text + rest, path, result, score)


# not a method: an engine that refers to itself would keep its memory until the next collection
def _count_use(
    tracks: dict[int, Track], runner: StepRunner, key: int, row: int, num_computed: int
) -> None:
    """Add what a sample used in the row that it gives up."""
    tracks[key].meter.add(num_computed, runner.take_usage(row))


class _KnownPaths(dict[bytes, Path]):
    """Paths through the routed blocks by their bytes; most tokens share theirs with others."""

    def __missing__(self, taken: bytes) -> Path:
        if len(self) > MOST_PATHS:
            self.clear()
        path = self[taken] = tuple(map(bool, taken))
        return path


class _Alone:
    """Lets one thread in, and refuses a second one with a sentence."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is stepping this engine: let one thread call step() or "
                "generate(), and others add() and cancel()"
            )

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def make_runner(
    model: Transformer,
    pages: Pages,
    selector: str | None,
    *,
    record: bool,
    apart: bool,
    max_step_tokens: int,
) -> StepRunner:
    """The fastest runner that there is for this model and device."""
    if record and find_obstacle(model) is None:
        from depthmix.infer.paths.fused import FusedRunner

        return FusedRunner(model, pages, selector, max_step_tokens, apart=apart)
    return Runner(model, pages, selector, record=record, apart=apart)


def read_prompt(prompt: Prompt) -> list[int]:
    """Token ids as plain numbers; anything else is refused with a sentence."""
    if isinstance(prompt, str | bytes):
        raise ValueError("a prompt is a list of token ids, not text: encode it first")
    if not hasattr(prompt, "__iter__"):
        raise ValueError("a prompt is a list of token ids, and generate takes a list of prompts")
    tokens = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    if set(map(type, tokens)) <= {int}:
        return tokens
    try:
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError:
        wrong = next(t for t in tokens if isinstance(t, bool) or not hasattr(t, "__index__"))
        raise ValueError(f"a prompt is a list of token ids, and {wrong!r} is not one") from None


def count_pages(config: ModelConfig, selector: str | None, num_rows: int, page_size: int) -> int:
    """Pages for `num_rows` of the longest sequences, each layer filled as its capacity says.

    With some margin: texts use more depth or less, and the newest requests give way where all
    use more. One sequence always has room, whatever it keeps.
    """
    longest = -(-config.max_seq_len // page_size)
    capacities = dict(zip(config.routed_layers, config.capacities, strict=True))
    if selector == "all":
        capacities = {}
    each = 0
    for layer in range(config.num_layers):
        share = capacities.get(layer, 1.0)
        if layer in capacities and config.routing.kv_capacity is not None:
            share = config.routing.kv_capacity
        # the last page of a layer is half empty
        needed = -(-int(CACHE_MARGIN * share * config.max_seq_len) // page_size) + 1
        each += min(longest, needed)
    return max(num_rows * each, longest * config.num_layers)


def _limit_pages(num_pages: int, model: Transformer, page_size: int) -> int:
    """No more than fit into a share of the free memory, but those of one sequence at least."""
    config, weight = model.config, model.embedding.weight
    free, _ = torch.cuda.mem_get_info(weight.device)
    shape = config.shape
    each = 2 * page_size * shape.num_kv_heads * shape.head_width * weight.element_size()
    least = -(-config.max_seq_len // page_size) * config.num_layers
    return max(least, min(num_pages, int(CACHE_SHARE * free) // each))


def _wrap(seed: int) -> int:
    """Into 64 bits, as a signed number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
