"""The engine's events as answers: whole ones, and streams of pieces.

Owns how samples become choices, usage and paths, and how a token is spelled. Does not know routes
or the engine's thread.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from depthmix.config import ModelConfig
from depthmix.infer import Event, Sample, TokenScore
from depthmix.infer.depth import Path
from depthmix.infer.text import TextStream
from depthmix.models import Chat, Vocabulary
from depthmix.serve.problems import FailedError
from depthmix.serve.shapes import (
    AssistantMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    DepthUsage,
    SamplingShape,
    StepPath,
    TokenLogprob,
    TokenPaths,
    TokenUsage,
    TopLogprob,
    encode_shape,
)

REPLACEMENT = "\ufffd"


class ServedModel(NamedTuple):
    """What answers need to know of a model."""

    name: str
    config: ModelConfig
    vocabulary: Vocabulary
    chat: Chat | None
    created: int
    """When it was loaded, in seconds since 1970."""


class Draft(ABC):
    """An answer while its samples are generated. Subclasses give it its shape."""

    prefix: str

    def __init__(self, model: ServedModel, wish: SamplingShape, prompts: list[list[int]]) -> None:
        self.model, self.wish, self.prompts = model, wish, prompts
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        num = len(prompts) * wish.n
        self.samples: list[Sample | None] = [None] * num
        self.starts: list[list[int]] = [[] for _ in range(num)]
        """For each choice, the length of its final text when each of its tokens arrived."""
        self._num_chars = [0] * num
        self.scores: Mapping[int, list[TokenScore]] = {}
        """By prompt, of all its tokens but the first; empty if they were not requested."""
        # the same few tokens are likely in most places
        self.spell = cache(self._spell)

    def _spell(self, token: int) -> tuple[str, tuple[int, ...] | None]:
        """A token's text and bytes; for a part of a character, its number and None."""
        text = self.model.vocabulary.decode([token])
        if REPLACEMENT in text:
            return f"token_id:{token}", None
        return text, tuple(text.encode())

    def count_items(self) -> int:
        """The approximate size of the answer: its tokens and their alternatives."""
        num_tokens = self.wish.n * sum(map(len, self.prompts)) + sum(map(len, self.starts))
        return num_tokens * (1 + (self.wish.count_logprobs() or 0))

    def take(self, choice: int, event: Event) -> Event:
        """Record an event; return it as the client sees it."""
        if self.wish.count_tokens() == 0:
            event = hide_token(event)
        if event.token is not None:
            self.starts[choice].append(self._num_chars[choice])
        self._num_chars[choice] += len(event.text)
        if event.result is not None:
            if event.result.finish == "failed":
                raise FailedError("the text of this request could not be decoded")
            self.samples[choice] = event.result
        return event

    def list_samples(self) -> list[Sample]:
        """All samples, once each has ended."""
        return [sample for sample in self.samples if sample is not None]

    def sum_usage(self) -> TokenUsage:
        """What was used in total; a prompt counts once, but its compute once per sample."""
        depths = [sample.depth for sample in self.list_samples()]
        num_in = sum(map(len, self.prompts))
        num_out = sum(len(sample.tokens) for sample in self.list_samples())
        flops = sum(depth.flops for depth in depths)
        return TokenUsage(
            prompt_tokens=num_in,
            completion_tokens=num_out,
            total_tokens=num_in + num_out,
            depth=DepthUsage(
                blocks_executed=sum(depth.num_visits for depth in depths),
                blocks=sum(depth.num_visits_dense for depth in depths),
                flops=flops,
                flops_saved=sum(depth.dense_flops for depth in depths) - flops,
            ),
        )

    def count_usage(self) -> TokenUsage:
        """What was used so far."""
        num_in, num_out = sum(map(len, self.prompts)), sum(map(len, self.starts))
        return TokenUsage(
            prompt_tokens=num_in,
            completion_tokens=num_out,
            total_tokens=num_in + num_out,
            depth=None,
        )

    def list_paths(self, choice: int) -> TokenPaths | None:
        """Every token's path, if paths were requested."""
        sample = self.samples[choice]
        if not self.wish.depth or sample is None:
            return None
        num_prompt = len(self.prompts[choice // self.wish.n])
        paths = [format_path(path) for path in sample.depth.blocks]
        own: list[str | None] = [*paths[num_prompt:]]
        own += [None] * (len(sample.tokens) - len(own))
        return TokenPaths(
            routed_blocks=list(self.model.config.routed_layers),
            prompt=paths[:num_prompt],
            completion=own[: len(sample.tokens)],
        )

    def make_step_path(self, event: Event) -> StepPath | None:
        """A token with the path of the one before it, if paths were requested."""
        if not self.wish.depth or event.token is None:
            return None
        return StepPath(token=event.token, previous=format_path(event.path))

    def finish(self) -> bytes:
        """The whole answer as JSON."""
        # one choice at a time, because encoding one blocks all other threads
        choices = [
            encode_shape(self._make_choice(index, sample))
            for index, sample in enumerate(self.list_samples())
        ]
        # quotes inside a text are escaped, so only the field itself matches
        return encode_shape(self._make_empty()).replace(
            b'"choices":[]', b'"choices":[%b]' % b",".join(choices), 1
        )

    @abstractmethod
    def _make_choice(self, index: int, sample: Sample) -> BaseModel:
        """One sample of the whole answer."""

    @abstractmethod
    def _make_empty(self) -> BaseModel:
        """The whole answer without its choices."""

    @abstractmethod
    def start_stream(self) -> Iterator[CompletionAnswer | ChatChunk]:
        """What is sent before the first token."""

    @abstractmethod
    def continue_stream(self, choice: int, event: Event) -> CompletionAnswer | ChatChunk | None:
        """The piece for an event; None if it has nothing to send yet."""

    @abstractmethod
    def end_stream(self) -> BaseModel:
        """The piece with the usage."""


class CompletionDraft(Draft):
    """The continuation of a text."""

    prefix = "cmpl"

    def __init__(
        self,
        model: ServedModel,
        wish: SamplingShape,
        prompts: list[list[int]],
        echoes: Sequence[str] | None = None,
    ) -> None:
        """`echoes` are the prompts' texts, if the answer repeats them."""
        super().__init__(model, wish, prompts)
        self.echoes = echoes
        # all samples of a prompt share its log-probabilities
        self._scored: dict[int, CompletionLogprobs] = {}

    def _make_choice(self, index: int, sample: Sample) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._echo(index) + (sample.text or ""),
            logprobs=self._list_logprobs(index, sample),
            finish_reason=name_finish(sample),
            depth=self.list_paths(index),
        )

    def _make_empty(self) -> CompletionAnswer:
        return self.end_stream()

    def start_stream(self) -> Iterator[CompletionAnswer]:
        if self.echoes is not None:
            for index in range(len(self.samples)):
                scored = self._score_prompt(index // self.wish.n) if self.scores else None
                piece = CompletionChoice(index=index, text=self._echo(index), logprobs=scored)
                yield self._make([piece])

    def continue_stream(self, choice: int, event: Event) -> CompletionAnswer | None:
        depth = self.make_step_path(event)
        if not event.text and event.result is None and depth is None and event.score is None:
            return None
        logprobs = None
        if event.token is not None and event.score is not None:
            start = self.starts[choice][-1] + len(self._echo(choice))
            logprobs = self._join_logprobs([event.token], [event.score], [start])
        piece = CompletionChoice(
            index=choice,
            text=event.text,
            logprobs=logprobs,
            finish_reason=None if event.result is None else name_finish(event.result),
            depth=depth,
        )
        return self._make([piece])

    def end_stream(self) -> CompletionAnswer:
        return self._make([], self.sum_usage())

    def _make(
        self, choices: list[CompletionChoice], usage: TokenUsage | None = None
    ) -> CompletionAnswer:
        name = self.model.name
        return CompletionAnswer(
            id=self.id, created=self.created, model=name, choices=choices, usage=usage
        )

    def _echo(self, index: int) -> str:
        return "" if self.echoes is None else self.echoes[index // self.wish.n]

    def _list_logprobs(self, index: int, sample: Sample) -> CompletionLogprobs | None:
        if sample.logprobs is None:
            return None
        num_before = len(self._echo(index))
        starts = [num_before + start for start in self.starts[index]]
        own = self._join_logprobs(sample.tokens, list_scores(sample), starts)
        if not self.scores:
            return own
        before = self._score_prompt(index // self.wish.n)
        tops = None
        if before.top_logprobs is not None and own.top_logprobs is not None:
            tops = before.top_logprobs + own.top_logprobs
        return CompletionLogprobs(
            tokens=before.tokens + own.tokens,
            token_logprobs=before.token_logprobs + own.token_logprobs,
            top_logprobs=tops,
            text_offset=before.text_offset + own.text_offset,
        )

    def _score_prompt(self, number: int) -> CompletionLogprobs:
        assert self.echoes is not None
        if number in self._scored:
            return self._scored[number]
        tokens, vocabulary = self.prompts[number], self.model.vocabulary
        begins = tokens[0] == vocabulary.end_token
        # the token that begins a document is not part of the text
        num_hidden = int(begins and not self.echoes[number].startswith(self.spell(tokens[0])[0]))
        text = TextStream(vocabulary.decode)
        starts, num_chars = [0] * num_hidden, 0
        for token in tokens[num_hidden:]:
            starts.append(num_chars)
            num_chars += len(text.add(token))
        self._scored[number] = self._join_logprobs(tokens, [None, *self.scores[number]], starts)
        return self._scored[number]

    def _join_logprobs(
        self, tokens: Sequence[int], scores: Sequence[TokenScore | None], starts: list[int]
    ) -> CompletionLogprobs:
        spell, tops = self.spell, None
        if self.wish.count_logprobs():
            # best first; of two tokens with the same spelling, the better one is kept
            tops = [
                dict(reversed({spell(t)[0]: p for t, p in reversed(score.top)}.items()))
                if score is not None
                else None
                for score in scores
            ]
        return CompletionLogprobs(
            tokens=[spell(token)[0] for token in tokens],
            token_logprobs=[None if score is None else score.logprob for score in scores],
            top_logprobs=tops,
            text_offset=starts,
        )


class ChatDraft(Draft):
    """An answer in a conversation."""

    prefix = "chatcmpl"

    def _make_choice(self, index: int, sample: Sample) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=sample.text or ""),
            logprobs=self._list_logprobs(sample.tokens, list_scores(sample)),
            finish_reason=name_finish(sample),
            depth=self.list_paths(index),
        )

    def _make_empty(self) -> ChatAnswer:
        name, usage = self.model.name, self.sum_usage()
        return ChatAnswer(id=self.id, created=self.created, model=name, choices=[], usage=usage)

    def start_stream(self) -> Iterator[ChatChunk]:
        for index in range(len(self.samples)):
            yield self._make([ChatDelta(index=index, delta={"role": "assistant", "content": ""})])

    def continue_stream(self, choice: int, event: Event) -> ChatChunk | None:
        depth = self.make_step_path(event)
        if not event.text and event.result is None and depth is None and event.score is None:
            return None
        logprobs = None
        if event.token is not None and event.score is not None:
            logprobs = self._list_logprobs([event.token], [event.score])
        piece = ChatDelta(
            index=choice,
            delta={"content": event.text} if event.text else {},
            logprobs=logprobs,
            finish_reason=None if event.result is None else name_finish(event.result),
            depth=depth,
        )
        return self._make([piece])

    def end_stream(self) -> ChatChunk:
        return self._make([], self.sum_usage())

    def _make(self, choices: list[ChatDelta], usage: TokenUsage | None = None) -> ChatChunk:
        name = self.model.name
        return ChatChunk(id=self.id, created=self.created, model=name, choices=choices, usage=usage)

    def _list_logprobs(
        self, tokens: Sequence[int], scores: Sequence[TokenScore]
    ) -> ChatLogprobs | None:
        if self.wish.count_logprobs() is None:
            return None
        spell, content = self.spell, list[TokenLogprob]()
        for token, score in zip(tokens, scores, strict=True):
            tops = list[TopLogprob]()
            for other, logprob in score.top:
                name, known = spell(other)
                tops.append({"token": name, "logprob": logprob, "bytes": known})
            name, known = spell(token)
            content.append(
                {"token": name, "logprob": score.logprob, "bytes": known, "top_logprobs": tops}
            )
        # built here, so checking them again would only cost time
        return ChatLogprobs.model_construct(content=content)


def list_scores(sample: Sample) -> list[TokenScore]:
    """Each token's log-probability and alternatives; empty if they were not requested."""
    logprobs = sample.logprobs or ()
    tops = sample.top_logprobs or ((),) * len(logprobs)
    return [TokenScore(*each) for each in zip(logprobs, tops, strict=True)]


def hide_token(event: Event) -> Event:
    """The event without its token, for requests that only want the prompt."""
    result = event.result
    if result is not None and result.finish != "failed":
        none: dict[str, Any] = {"tokens": (), "text": "", "finish": "length"}
        none |= {"logprobs": result.logprobs and (), "top_logprobs": result.top_logprobs and ()}
        result = result._replace(**none)
    return event._replace(token=None, text="", result=result, score=None)


def format_path(path: Path) -> str:
    """A 1 for each routed block that a token went through, a 0 for each that it skipped."""
    return "".join("1" if taken else "0" for taken in path)


def name_finish(sample: Sample) -> Literal["stop", "length"]:
    """Why a sample ended."""
    return "stop" if sample.finish == "stop" else "length"
