"""What the engine and those who compute its steps say to each other.

One interface for every way to compute a step. Knows none of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from depthmix.infer.cache import PagedCache
from depthmix.infer.depth import Usage
from depthmix.infer.sampling import SamplingParams
from depthmix.infer.scheduler import Plan
from depthmix.infer.track import Track

Top = tuple[list[int], list[float]]
"""The most probable tokens and their log-probabilities."""


class Report(NamedTuple):
    """What became of a step, chunk by chunk in the order of its plan."""

    token: Sequence[int | None]
    """The next token of each chunk that samples one."""
    logprob: Sequence[float]
    top: Sequence[Top | None]
    """Where anybody asked for some."""
    taken: Sequence[bytes]
    """Which routed blocks its tokens went through: a byte for each token and block."""
    stored: np.ndarray
    """(chunks, layers): how many tokens each layer stored."""

    def take(self, numbers: np.ndarray) -> "Report":
        """These chunks, in this order."""
        at = numbers.tolist()
        return Report(
            [self.token[number] for number in at],
            [self.logprob[number] for number in at],
            [self.top[number] for number in at],
            [self.taken[number] for number in at],
            self.stored[numbers],
        )


def join_reports(reports: Sequence[Report]) -> Report:
    """Several steps' chunks as those of one."""
    return Report(
        [token for report in reports for token in report.token],
        [logprob for report in reports for logprob in report.logprob],
        [top for report in reports for top in report.top],
        [taken for report in reports for taken in report.taken],
        np.concatenate([report.stored for report in reports]),
    )


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

    def launch(self, plan: Plan, tracks: Sequence[Track]) -> Flight:
        """Start a step with these chunks, whose samples are `tracks`."""
        ...

    def take_usage(self, row: int) -> Usage:
        """What was computed for the tokens that a row's cache holds, before it is given up."""
        ...

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
