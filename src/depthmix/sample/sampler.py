"""A model on disk → an engine with text in and out, and timing.

Chooses the device and dtype that a model is sampled with.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch

from depthmix.infer import Engine, Event, SamplingParams
from depthmix.models import StoredModel, Vocabulary
from depthmix.models import open_model as open_stored
from depthmix.models.chat import list_ends
from depthmix.nn import Transformer
from depthmix.world import choose_device

# enough for the prompt's step and for steps of single tokens
WARM_TOKENS = 3


def seed_prompt(params: SamplingParams, text: str) -> SamplingParams:
    """The parameters with a separate seed for this prompt, as equal seeds draw equal noise.

    It depends only on the seed and the text, not on the other prompts.
    """
    if params.seed is None:
        return params
    data = f"{params.seed} {text}".encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "little", signed=True))


class Sampler:
    """An engine with a tokenizer, and a clock."""

    def __init__(
        self,
        model: Transformer,
        vocabulary: Vocabulary,
        *,
        selector: str | None = None,
        max_batch: int = 8,
    ) -> None:
        self.vocabulary = vocabulary
        self.engine = Engine(
            model,
            selector=selector,
            decode=vocabulary.decode,
            max_batch=max_batch,
        )
        self.load_seconds = self.compile_seconds = 0.0
        self.start_over()

    def start_over(self) -> None:
        """Forget the finished requests and their times."""
        self.requests: list[int] = []
        self._num_later = 0
        self._first = self._last = 0.0

    def warm_up(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        progress: Callable[[], object] | None = None,
    ) -> None:
        """Compile and record in advance what these requests need; does nothing on a CPU.

        The requests are started and discarded: the engine's own `warm_up` covers any request, and
        takes longer. `progress` is called at the start. The time is in `compile_seconds`.
        """
        if not self._compiles:
            return
        start = time.perf_counter()
        if progress is not None:
            progress()
        few = min(params.max_tokens, WARM_TOKENS)
        self.engine.generate(prompts, replace(params, max_tokens=few))
        self.compile_seconds += time.perf_counter() - start

    def warm_up_all(self, progress: Callable[[], object] | None = None) -> None:
        """Like `warm_up`, for any request."""
        if not self._compiles:
            return
        if progress is not None:
            progress()
        self.compile_seconds += self.engine.warm_up()

    @property
    def _compiles(self) -> bool:
        return self.engine.model.embedding.weight.device.type == "cuda"

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue a request."""
        request = self.engine.add(prompt, params)
        self.requests.append(request)
        return request

    def run(self, stopped: Callable[[], object] = lambda: False) -> Iterator[list[Event]]:
        """Each step's events, until all requests are done; `stopped` is checked between steps."""
        while self.engine.has_work:
            if stopped():
                yield [event for number in self.requests for event in self.engine.cancel(number)]
                return
            events = self.engine.step()
            if events:
                self._last = time.perf_counter()
                # the first token belongs to the prompt's time
                if self._first:
                    self._num_later += sum(event.token is not None for event in events)
                else:
                    self._first = self._last
            yield events

    @property
    def tokens_per_second(self) -> float | None:
        """Speed since the first tokens; None if there were no more.

        Excludes loading and the prompt, and compiling after a `warm_up`.
        """
        seconds = self._last - self._first
        return self._num_later / seconds if self._num_later and seconds else None


def start_sampler(
    model: StoredModel,
    *,
    device: str | None = None,
    selector: str | None = None,
    max_batch: int = 8,
) -> Sampler:
    """Load a model for sampling, on a GPU if there is one, and time it."""
    start = time.perf_counter()
    kind, vocabulary = choose_device(device), model.vocabulary
    network = place_network(model, kind)
    sampler = Sampler(network, vocabulary, selector=selector, max_batch=max_batch)
    sampler.load_seconds = time.perf_counter() - start
    return sampler


def place_network(model: StoredModel, kind: str) -> Transformer:
    """A model's network in the dtype for sampling on a device."""
    network = model.network.to(kind)
    # as in training on that device; routers score in float32 anyway
    return network.to(torch.bfloat16) if kind == "cuda" else network


class TextModel(StoredModel):
    """A model on disk that generates text, as returned by `depthmix.open_model`."""

    @cached_property
    def engine(self) -> Engine:
        """An engine that decodes text, on a GPU if there is one; created at first use."""
        network = place_network(self, choose_device(None))
        return Engine(network, decode=self.vocabulary.decode)

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | None = None, **options: Any
    ) -> str: ...
    @overload
    def generate(
        self, prompts: Sequence[str], params: SamplingParams | None = None, **options: Any
    ) -> list[str]: ...
    def generate(
        self, prompts: Any, params: SamplingParams | None = None, **options: Any
    ) -> str | list[str]:
        """Continue a text, or each of a list of texts.

        `options` are fields of `SamplingParams`, which replace or override `params`. A text ends
        with its document, unless `stop_tokens` says otherwise. For more than text, use `engine`.
        """
        params = replace(params or SamplingParams(), **options)
        if params.n != 1:
            raise ValueError(
                f"n = {params.n}: generate gives one text for each prompt; repeat the prompt, or "
                f"use engine.generate"
            )
        ends = params.stop_tokens or list_ends(self.vocabulary.end_token)
        params = replace(params, stop_tokens=ends)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a prompt is text: give token ids to engine.generate")
        tokens = [self.vocabulary.encode(text) for text in texts]
        results = self.engine.generate(tokens, [seed_prompt(params, text) for text in texts])
        found = [result.samples[0].text or "" for result in results]
        return found[0] if isinstance(prompts, str) else found


def open_model(
    path: Path | str,
    *,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    max_seq_len: int | None = None,
) -> TextModel:
    """Open the model of a run, of one of its checkpoints, or of a Hugging Face folder.

    The result has `config`, `network`, `vocabulary` and `chat`, each read at first use, and
    `generate`. For a run, `checkpoint` is best, newest, a name or a step; the default is the best
    if there are scores, otherwise the newest. `tokenizer` is for a model without one, and
    `max_seq_len` for fewer positions than the model has.

    >>> model = depthmix.open_model("runs/demo-20261115-142233")
    >>> text = model.generate("def main(", max_tokens=20, seed=1)
    """
    stored = open_stored(path, checkpoint=checkpoint, tokenizer=tokenizer, max_seq_len=max_seq_len)
    # only the fields: nothing else has been read yet
    return TextModel(**vars(stored))
