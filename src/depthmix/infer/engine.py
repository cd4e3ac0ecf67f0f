"""The engine: batched generation, with each request's output independent of the others.

Connects the parts: the scheduler plans each step, and the runner computes it and samples. On a GPU
the runner starts the next step before the tokens of the last one have been read. Does not know the
tokenizer: `decode` is a function.
"""

import operator
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
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

# distance between the seeds of a request's samples: far more than consecutive requests' seeds
SEED_STRIDE = 0x5DEECE66D
# default batch and step sizes: a GPU needs many requests and many tokens to be busy
BATCH_CPU, BATCH_GPU = 8, 256
CHUNK_CPU, CHUNK_GPU = 512, 8192
# a routed block's share of the cache, relative to its capacity: actual depth varies between texts
CACHE_MARGIN = 1.25
# pages reserved ahead, in tokens, so that the page tables need not change at every step
PAGES_AHEAD = 8
# number of consecutive steps that the host waits for before steps get fewer rounds
PATIENCE = 16
# size of the cache of decoded paths: with many routed blocks there are too many to keep them all
MOST_PATHS = 1 << 16
# default fraction of a GPU's free memory used for the cache
CACHE_SHARE = 0.5


# token ids: a list, tuple, array or tensor of integers; `read_prompt` rejects anything else
Prompt = Any


class _Step(NamedTuple):
    """A step in flight."""

    plan: Plan
    tracks: list[Track]
    flight: Flight


class Engine:
    """Generates from a model: `generate` runs to completion, `add` and `step` stream tokens.

    `add`, `cancel` and `stats` may be called from any thread at any time; `step` and `generate`
    from one thread at a time.

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
        """`selector` makes the routing decisions: predictor or router; default: the model's best.

        `decode` turns tokens into text; results with text and stop strings need it.
        `max_batch` is the maximum number of samples at a time (default: 8 on a CPU, 256 on a GPU).
        `cache_tokens` is the cache's capacity in tokens that go through every block, for all
        requests together; when it is full, requests wait or are preempted. By default it holds
        `max_batch` sequences of the model's maximum length at its blocks' capacity, but on a GPU
        takes at most half of the free memory. Prompts are computed in chunks of `chunk_tokens`,
        in the same steps as other requests' tokens. `invariant` computes each request separately,
        so that its results do not depend on the rest of the batch, to the last bit (default: on a
        CPU only). `seed` is used for requests without one. `record` records decoding steps as CUDA
        graphs (default: on a GPU only).
        """
        if not isinstance(model, Transformer):
            raise ValueError(
                "Engine needs a Transformer: for a model folder, pass open_model(path).network"
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
            raise ValueError(
                f"cache_tokens = {cache_tokens} must be at least page_size = {page_size}"
            )
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
            # chunks are never cut, so leave room for a whole one besides the decoding rows
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
        # events that `step` has yet to return
        self._events: list[Event] = []
        # rounds of a decoding step, and consecutive steps that the host had to wait for
        self._rounds, self._num_waits = 1, 0
        # the first protects the engine's state; the second allows only one thread to step
        self._lock, self._stepping = threading.RLock(), threading.Lock()
        self._num_requests = self._num_keys = self._peak_pages = 0

    @property
    def selector(self) -> str | None:
        """What makes the routing decisions."""
        return self.runner.selector

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._tracks or self._events)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile and record what requests of any length need; return the seconds it took.

        Without it, this happens at first use. On a CPU there is nothing to prepare. Compiled
        kernels are cached on disk. `progress` is called with the number of parts done and the
        total.
        """
        with self._own_steps():
            if self.has_work:
                raise ValueError("warm_up() runs alone: finish or cancel the requests first")
            return self.runner.warm_up(progress)

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request; return its number, which its events carry."""
        return self._add(read_prompt(prompt), params)

    def score(self, prompt: Prompt, *, top: int = 0) -> list[TokenScore]:
        """Return the log-probability of each token but the first, given those before it.

        Uses the model's full forward pass, separate from all requests; includes the `top` most
        probable tokens at each position. Like `step`, call it from one thread at a time.
        """
        tokens = read_prompt(prompt)
        self._check_prompt(tokens)
        if top < 0:
            raise ValueError(f"top = {top} must be at least 0")
        device = self.model.embedding.weight.device
        # engines in other threads launch their steps before or after, never in between
        with self._own_steps(), turns:
            if device.type != "cuda":
                return score_tokens(self.model, tokens, self.selector, top)
            with torch.cuda.device(device):
                return score_tokens(self.model, tokens, self.selector, top)

    def cancel(self, request: int) -> list[Event]:
        """Cancel a request's running and waiting samples; finished or unknown requests are ignored.

        Returns the events that end them, after any that `step` has yet to return.
        """
        with self._lock:
            keys = [key for key, track in self._tracks.items() if track.request == request]
            for key in keys:
                self._finish(key, None, "", (), "cancelled")
            found = [event for event in self._events if event.request == request]
            self._events = [event for event in self._events if event.request != request]
            return found

    def list_paths(self, request: int, sample: int = 0) -> Sequence[Path]:
        """Paths of a running sample's tokens computed so far, starting with the prompt's."""
        with self._lock:
            for track in self._tracks.values():
                if (track.request, track.number) == (request, sample):
                    return track.trail.read()
        return ()

    def step(self) -> list[Event]:
        """Run one step; return the new events.

        If the host is slower than the device, a step may sample several tokens of each sequence. If
        it raises, no token is lost: the next call tries again, and returns the events of this one.
        If a request's text cannot be decoded, only that request fails.
        """
        with self._own_steps():
            try:
                with self._lock:
                    while len(self._steps) < self.runner.depth:
                        plan = self.scheduler.plan(self._rounds)
                        if not plan:
                            break
                        self._start(plan)
                if self._steps:
                    self._choose_rounds()
                    # other threads may add and cancel in the meantime
                    reports = self._steps[0].flight.wait()
                    with self._lock:
                        self._settle(self._steps.popleft().plan, reports)
                with self._lock:
                    events, self._events = self._events, []
                    return events
            except BaseException:
                with self._lock:
                    self._abandon()
                raise

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Run all prompts to completion, in order; `params` is one for all, or one per prompt."""
        if self.has_work:
            raise ValueError("generate() runs alone: finish or cancel the requests of add() first")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts but {len(params)} params: give one for each"
            )
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
        except BaseException:
            # leave no request behind
            for request in samples:
                self.cancel(request)
            raise
        return [
            Result(request, prompt, tuple(found[i] for i in sorted(found)))
            for (request, found), prompt in zip(samples.items(), tokens, strict=True)
        ]

    def stats(self) -> Stats:
        """Return the engine's current state."""
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

    def _add(self, tokens: tuple[int, ...], params: SamplingParams | None) -> int:
        params = SamplingParams() if params is None else params
        prompt = self._check_prompt(tokens)
        max_new = self._count_new(len(tokens), params)
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
                    max_new=max_new,
                    meter=self._meter.copy(),
                    stream=TextStream(self.decode, params.stop) if self.decode else None,
                    seen=self.runner.mark_seen(tokens, params),
                )
        return request

    def _check_prompt(self, prompt: tuple[int, ...]) -> np.ndarray:
        """Raise if the model cannot take the prompt; return its tokens as int32."""
        config = self.config
        if len(prompt) == 0:
            raise ValueError("a prompt needs at least one token")
        if len(prompt) > config.max_seq_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, but the model's max_seq_len is "
                f"{config.max_seq_len}: shorten it"
            )
        with suppress(struct.error):
            # takes half as long as NumPy; raises if a token has more than 32 bits
            tokens = np.frombuffer(struct.pack(f"{len(prompt)}i", *prompt), dtype=np.int32)
            # a negative number is a very large one without its sign
            if tokens.view(np.uint32).max() < config.vocab_size:
                return tokens
        wrong = next(t for t in prompt if not 0 <= t < config.vocab_size)
        raise ValueError(
            f"token {wrong} is not in the vocabulary of {config.vocab_size}: is this the "
            f"model's tokenizer?"
        )

    def _count_new(self, num_prompt: int, params: SamplingParams) -> int:
        """Return a request's maximum number of new tokens; raise if it can never be completed."""
        config = self.config
        if params.stop and self.decode is None:
            raise ValueError("stop strings need text: give the engine a `decode` function")
        max_new = min(params.max_tokens, config.max_seq_len - num_prompt + 1)
        # the last token is returned but never fed to the model
        num_tokens, page_size = num_prompt + max_new - 1, self.pages.page_size
        room = self.pages.num_pages // config.num_layers * page_size
        if num_tokens > room:
            raise ValueError(
                f"max_tokens = {params.max_tokens} after a prompt of {num_prompt} tokens needs "
                f"cache_tokens = {-(-num_tokens // page_size) * page_size}, but there are {room}: "
                f"lower max_tokens, shorten the prompt or raise cache_tokens"
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
        """Double the rounds of a step if the device finished before the host asked for the result.

        The host's work per step is then shared by more tokens. If the host waits anyway, more
        rounds only delay new requests, and compute tokens past the end of a sample.
        """
        if self._steps[0].flight.is_ready():
            self._rounds = min(2 * self._rounds, self.runner.most_rounds)
            self._num_waits = 0
            return
        self._num_waits += 1
        if self._num_waits >= PATIENCE:
            self._rounds = max(1, self._rounds // 2)
            self._num_waits = 0

    def _settle(self, plan: Plan, reports: Sequence[Report]) -> None:
        try:
            for part, report in zip(plan.split(), reports, strict=True):
                self.scheduler.settle(part, report.stored)
                self._peak_pages = max(self._peak_pages, self.pages.num_used)
                self._take(part, report)
        except BaseException:
            # a sequence that missed its token would never be planned again
            for chunk in plan:
                self.scheduler.abandon(chunk, restart=True)
            raise

    def _take(self, plan: Plan, report: Report) -> None:
        """Add the tokens of one round to their samples."""
        # samples that continue
        alive: list[int] = []
        columns = (plan.key.tolist(), plan.start.tolist(), plan.count.tolist(), *report[:4])
        try:
            for key, start, count, token, logprob, top, taken in zip(*columns, strict=True):
                track = self._tracks.get(key)
                if track is None:
                    # it ended while the step was in flight
                    continue
                track.trail.add(start, count, taken)
                if token is None:
                    continue
                path = self._paths[taken if count == 1 else taken[-(len(taken) // count) :]]
                num_new = len(track.new)
                try:
                    text, finish = track.take(token, logprob, top)
                    if finish is not None:
                        self._finish(key, token, text, path, finish)
                        continue
                except BaseException as error:
                    interrupted = not isinstance(error, Exception)
                    if interrupted and track.num_new == num_new:
                        # it came before the token was taken: the next step draws it again
                        raise
                    # only this sample fails
                    self._finish(key, token, "", path, "failed", error)
                    if interrupted:
                        raise
                    continue
                alive.append(key)
                score = track.read_score()
                event = Event(track.request, track.number, token, text, path, None, score)
                self._events.append(event)
        finally:
            self.scheduler.append(*alive)

    def _abandon(self) -> None:
        """Undo all steps in flight, newest first."""
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
        error: BaseException | None = None,
    ) -> None:
        track = self._tracks[key]
        if error is None:
            try:
                text += track.flush()
            except Exception as problem:
                finish, error = "failed", problem
        self.scheduler.remove(key)
        del self._tracks[key]
        result = track.end(finish, error)
        score = None if token is None else track.read_score()
        self._events.append(Event(track.request, track.number, token, text, path, result, score))


# not a method: an engine that refers to itself would only be freed by the garbage collector
def _count_use(
    tracks: dict[int, Track], runner: StepRunner, key: int, row: int, num_computed: int
) -> None:
    """Add a sample's usage in the row it gives up."""
    tracks[key].meter.add(num_computed, runner.take_usage(row))


class _KnownPaths(dict[bytes, Path]):
    """Cache of decoded paths by their bytes, since most tokens share theirs with others."""

    def __missing__(self, taken: bytes) -> Path:
        if len(self) > MOST_PATHS:
            self.clear()
        path = self[taken] = tuple(map(bool, taken))
        return path


class _Alone:
    """Lets one thread in, and raises for a second one."""

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
    """Return the fastest runner for this model and device."""
    if record and find_obstacle(model) is None:
        from depthmix.infer.paths.fused import FusedRunner

        return FusedRunner(model, pages, selector, max_step_tokens, apart=apart)
    return Runner(model, pages, selector, record=record, apart=apart)


def read_prompt(prompt: Prompt) -> tuple[int, ...]:
    """Return token ids as a tuple of ints; raise ValueError for anything else."""
    if isinstance(prompt, str | bytes):
        raise ValueError("a prompt is a list of token ids, not text: encode it first")
    if not hasattr(prompt, "__iter__") or getattr(prompt, "ndim", 1) == 0:
        raise ValueError("a prompt is a list of token ids, and generate takes a list of prompts")
    # prompts are long, so loops over them run in C
    if isinstance(prompt, torch.Tensor) or _is_vector(prompt):
        prompt = prompt.tolist()
    tokens = tuple(prompt)
    if operator.countOf(map(type, tokens), int) == len(tokens):
        return tokens
    return tuple(map(_read_token, tokens))


def _is_vector(prompt: Prompt) -> bool:
    """Whether this is an array of integers."""
    return isinstance(prompt, np.ndarray) and prompt.ndim == 1 and prompt.dtype.kind in "iu"


def _read_token(token: Any) -> int:
    if not isinstance(token, bool) and getattr(token, "dtype", None) not in (bool, torch.bool):
        # a float's or a list's type has no index; a tensor of several ids raises
        with suppress(TypeError):
            return operator.index(token)
    raise ValueError(f"a prompt is a list of token ids, and {token!r} is not one")


def count_pages(config: ModelConfig, selector: str | None, num_rows: int, page_size: int) -> int:
    """Count the pages for `num_rows` sequences of the maximum length, at each layer's capacity.

    Includes a margin, because actual depth varies between texts; if it is exceeded, the newest
    requests are preempted. One sequence always fits, whatever it keeps.
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
        # the last page of a layer is half empty on average
        needed = -(-int(CACHE_MARGIN * share * config.max_seq_len) // page_size) + 1
        each += min(longest, needed)
    return max(num_rows * each, longest * config.num_layers)


def _limit_pages(num_pages: int, model: Transformer, page_size: int) -> int:
    """Limit the pages to a fraction of the free memory, but leave enough for one sequence."""
    config, weight = model.config, model.embedding.weight
    free, _ = torch.cuda.mem_get_info(weight.device)
    shape = config.shape
    each = 2 * page_size * shape.num_kv_heads * shape.head_width * weight.element_size()
    least = -(-config.max_seq_len // page_size) * config.num_layers
    return max(least, min(num_pages, int(CACHE_SHARE * free) // each))


def _wrap(seed: int) -> int:
    """Wrap to a signed 64-bit integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
