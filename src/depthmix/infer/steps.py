"""What the engine and those who compute its steps say to each other.

One interface for every way to compute a step. Knows none of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from depthmix.infer.cache import PagedCache
from depthmix.infer.depth import Usage
from depthmix.infer.sampling import SamplingParams, Wish
from depthmix.infer.scheduler import Chunk


class Work(NamedTuple):
    """A chunk and its tokens."""

    chunk: Chunk
    tokens: Sequence[int]
    """None where its one token is drawn by a step that is under way."""
    wish: Wish | None = None
    """How the next token is drawn, where the chunk samples one."""


class Outcome(NamedTuple):
    """What became of a chunk, and the token that follows it."""

    token: int | None
    """Where one was asked for."""
    logprob: float
    top: tuple[list[int], list[float]] | None
    """The most probable tokens and their log-probabilities, where anybody asked for some."""
    used: Usage
    paths: Sequence[tuple[bool, ...]]
    """For each of its tokens, which routed blocks it went through."""


class Report(NamedTuple):
    """What became of a step: its chunks in the order in which they were given."""

    outcomes: list[Outcome]
    stored: np.ndarray
    """(chunks, layers): how many tokens each layer stored."""


@runtime_checkable
class Flight(Protocol):
    """A step that is under way."""

    def wait(self) -> Report: ...


class Ready(NamedTuple):
    """A step that is done."""

    report: Report

    def wait(self) -> Report:
        return self.report


@runtime_checkable
class StepRunner(Protocol):
    """What the engine asks of a runner."""

    cache: PagedCache
    selector: str | None
    depth: int
    """Steps that may be under way at a time."""
    can_retry: bool
    """Whether the cache is what it was after a step that failed."""

    def launch(self, works: Sequence[Work]) -> Flight: ...

    def warm_up(self, progress: Callable[[int, int], None] | None) -> float: ...

    def forget(self) -> None:
        """A step failed: nobody knows what the device holds."""
        ...

    def check_weights(self) -> None:
        """Refuse to go on where the model's weights are no longer those that it was made for."""
        ...

    def mark_seen(self, tokens: Sequence[int], params: SamplingParams) -> Tensor | None:
        """The tokens as a mask, where repetition is penalised and the mask is not kept here."""
        ...
