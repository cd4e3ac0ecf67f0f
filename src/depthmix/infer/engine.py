"""The engine: requests in, tokens out, many at once, each as if it were alone.

Joins the parts: the scheduler says who computes what, the runner computes it, the sampler draws.
Does not know the tokenizer: `decode` is a function.
"""

import random
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from depthmix.infer.depth import DepthMeter
from depthmix.infer.draw import Drawer
from depthmix.infer.pages import Pages
from depthmix.infer.results import Event, Finish, Result, Sample, Stats
from depthmix.infer.runner import Done, Runner, Work
from depthmix.infer.sampling import SamplingParams, top_logprobs
from depthmix.infer.scheduler import Chunk, Scheduler
from depthmix.infer.text import TextStream
from depthmix.infer.track import Track
from depthmix.nn import Transformer
from depthmix.nn.transformer import choose_selector

# seeds of a request's samples lie this far apart: no two requests' samples meet by counting up
SEED_STRIDE = 0x5DEECE66D


class Engine:
    """Generates from a model: `generate` for all at once, `add` and `step` to see tokens come."""

    def __init__(
        self,
        model: Transformer,
        *,
        selector: str | None = None,
        decode: Callable[[list[int]], str] | None = None,
        max_batch: int = 8,
        cache_tokens: int | None = None,
        page_size: int = 16,
        chunk_tokens: int = 512,
        invariant: bool | None = None,
        seed: int | None = None,
        record: bool | None = None,
        compile: bool = False,
    ) -> None:
        """`selector` decides over depth: predictor or router, else the best that the model has.

        `decode` turns tokens into text, for results that carry it and for stop strings.
        `cache_tokens` is the room for tokens that go through every block, all requests together:
        requests wait, or give way, when it is taken. Prompts are computed `chunk_tokens` at a time
        beside the others' tokens. `invariant` computes each request apart, so that its numbers are
        the same to the last bit whoever else is there; unless given, so on a CPU. `seed` is for
        requests that name none. `record` keeps decoding steps, and new prompts of a size that comes
        again, as CUDA graphs, unless given on a GPU only; `compile` compiles decoding steps first:
        a minute more to begin with, then faster batches.
        """
        config = model.config
        sizes = {"max_batch": max_batch, "page_size": page_size, "chunk_tokens": chunk_tokens}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if cache_tokens is None:
            # whole pages: every row has room for the longest sequence
            cache_tokens = max_batch * -(-config.max_seq_len // page_size) * page_size
        if cache_tokens < page_size:
            raise ValueError(f"cache_tokens = {cache_tokens} must be a page or more: {page_size}")
        device = model.embedding.weight.device
        self.model, self.config, self.decode = model, config, decode
        self.invariant = device.type == "cpu" if invariant is None else invariant
        num_pages = cache_tokens // page_size * config.num_layers
        self.pages = Pages(num_pages, page_size, config.num_layers, max_batch)
        chunk_tokens = min(chunk_tokens, config.max_seq_len)
        self.scheduler = Scheduler(
            self.pages,
            max_rows=max_batch,
            max_step_tokens=chunk_tokens + max_batch,
            chunk_tokens=chunk_tokens,
            invariant=self.invariant,
        )
        self.runner = Runner(
            model,
            self.pages,
            choose_selector(config, selector),
            record=device.type == "cuda" if record is None else record,
            compile=compile,
            pad=not self.invariant,
        )
        self._random = random.Random(seed)
        self._tracks: dict[int, Track] = {}
        self._drawer = Drawer(config.vocab_size, device, record=self.runner.record)
        self._num_requests = self._num_keys = self._peak_pages = 0

    @property
    def selector(self) -> str | None:
        """Who decides over depth."""
        return self.runner.selector

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._tracks)

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> int:
        """Put a request in line; returns its number, which its events carry."""
        params = SamplingParams() if params is None else params
        max_new = self._check(prompt, params)
        seed = self._random.getrandbits(62) if params.seed is None else params.seed
        request, self._num_requests = self._num_requests, self._num_requests + 1
        for number in range(params.n):
            key, self._num_keys = self._num_keys, self._num_keys + 1
            self.scheduler.add(key, len(prompt), max_new - 1)
            stream = TextStream(self.decode, params.stop) if self.decode is not None else None
            seen = None
            if params.repetition_penalty != 1:
                seen = torch.zeros(self.config.vocab_size, dtype=torch.bool)
                seen[list(prompt)] = True
                seen = seen.to(self.runner.device)
            self._tracks[key] = Track(
                request=request,
                number=number,
                params=params,
                seed=_wrap(seed + number * SEED_STRIDE),
                tokens=list(prompt),
                num_prompt=len(prompt),
                max_new=max_new,
                meter=DepthMeter(self.config, self.selector),
                stream=stream,
                seen=seen,
            )
        return request

    def cancel(self, request: int) -> list[Event]:
        """End a request's samples where they stand; a request that is done, or never was, is fine.

        Returns the events of their ends.
        """
        keys = [key for key, track in self._tracks.items() if track.request == request]
        return [self._finish(key, None, "", (), "cancelled") for key in keys]

    def step(self) -> list[Event]:
        """Compute the next tokens of whoever the scheduler chose, and tell what is new."""
        chunks = self.scheduler.plan()
        works = [Work(chunk, self._take_tokens(chunk)) for chunk in chunks]
        if not works:
            return []
        batches = [[work] for work in works] if self.invariant else [works]
        done = [d for batch in batches for d in self.runner.run(batch)]
        for chunk, outcome in zip(chunks, done, strict=True):
            self.scheduler.settle(chunk, outcome.stored)
            self._tracks[chunk.key].meter.add(
                chunk.start, outcome.paths, outcome.used, num_logits=int(chunk.samples)
            )
        self._peak_pages = max(self._peak_pages, self.pages.num_used)
        asked = [(c.key, d) for c, d in zip(chunks, done, strict=True) if c.samples]
        return self._sample(asked) if asked else []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
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
        try:
            for prompt, wish in zip(prompts, params, strict=True):
                samples[self.add(prompt, wish)] = {}
            while self.has_work:
                for event in self.step():
                    if event.result is not None:
                        samples[event.request][event.sample] = event.result
        finally:
            # whatever went wrong, nothing stays behind
            for request in samples:
                self.cancel(request)
        return [
            Result(request, tuple(prompt), tuple(found[i] for i in sorted(found)))
            for (request, found), prompt in zip(samples.items(), prompts, strict=True)
        ]

    def stats(self) -> Stats:
        """Where the engine stands."""
        each = self.runner.cache.bytes_per_page
        return Stats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_preempted=self.scheduler.num_preempted,
            cache_bytes=each * self.pages.num_used,
            cache_bytes_peak=each * self._peak_pages,
            cache_bytes_total=each * self.pages.num_pages,
        )

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Refuse what can never be done; returns how many tokens may come."""
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
        if params.stop and self.decode is None:
            raise ValueError("stop strings need text: give the engine a `decode` function")
        max_new = min(params.max_tokens, config.max_seq_len - len(prompt) + 1)
        # the last token is told and never computed
        num_tokens, page_size = len(prompt) + max_new - 1, self.pages.page_size
        room = self.pages.num_pages // config.num_layers * page_size
        if num_tokens > room:
            raise ValueError(
                f"max_tokens = {params.max_tokens} after a prompt of {len(prompt)} tokens needs "
                f"cache_tokens = {-(-num_tokens // page_size) * page_size}, and there are {room}: "
                f"ask for fewer, shorten the prompt, or give the engine more"
            )
        return max_new

    def _take_tokens(self, chunk: Chunk) -> list[int]:
        return self._tracks[chunk.key].tokens[chunk.start : chunk.start + chunk.count]

    def _sample(self, asked: list[tuple[int, Done]]) -> list[Event]:
        """Draw the next token of each of these sequences."""
        tracks = [self._tracks[key] for key, _ in asked]
        if all(track.params.is_plain for track in tracks):
            # nothing to draw, and nothing to tell but the token
            told = zip(asked, _find_best([done for _, done in asked]), strict=True)
            return [self._take(key, d, token, 0.0) for (key, d), token in told]
        logits = _list_logits([done for _, done in asked])
        most = max(track.params.logprobs or 0 for track in tracks)
        if most:
            values_BK, ids_BK = top_logprobs(torch.stack(logits), most)
            tops = list(zip(values_BK.tolist(), ids_BK.tolist(), strict=True))
            for track, (values, ids) in zip(tracks, tops, strict=True):
                track.take_alternatives(ids, values)
        drawn = self._drawer.draw(
            logits,
            [track.params for track in tracks],
            [track.seed for track in tracks],
            [track.num_new for track in tracks],
            [track.seen for track in tracks],
        )
        told = zip(asked, *drawn, strict=True)
        return [self._take(key, d, token, logprob) for (key, d), token, logprob in told]

    def _take(self, key: int, done: Done, token: int, logprob: float) -> Event:
        """A sequence has a new token: tell it, and see whether it was the last."""
        track, path = self._tracks[key], done.paths[-1]
        text, finish = track.take(token, logprob)
        if finish is not None:
            return self._finish(key, token, text, path, finish)
        self.scheduler.append(key)
        return Event(track.request, track.number, token, text, path, None)

    def _finish(
        self, key: int, token: int | None, text: str, path: tuple[bool, ...], finish: Finish
    ) -> Event:
        track = self._tracks.pop(key)
        self.scheduler.remove(key)
        rest, result = track.end(finish)
        return Event(track.request, track.number, token, text + rest, path, result)


def _find_best(done: Sequence[Done]) -> list[int]:
    """The most probable tokens; a recorded step found them itself."""
    known = [d.best for d in done if d.best is not None]
    if len(known) == len(done):
        return known
    return torch.stack(_list_logits(done)).argmax(dim=1).tolist()


def _list_logits(done: Sequence[Done]) -> list[Float[Tensor, " V"]]:
    return [d.logits for d in done if d.logits is not None]


def _wrap(seed: int) -> int:
    """Into 64 bits, as a signed number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
