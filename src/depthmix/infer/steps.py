"""The interface between the engine and the runners that compute its steps.

Every runner implements it; this module depends on none of them.
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
    """The result of a step, chunk by chunk in plan order."""

    token: Sequence[int | None]
    """The next token of each chunk that samples one."""
    logprob: Sequence[float]
    top: Sequence[Top | None]
    """The most probable tokens, if any sample requested them."""
    taken: Sequence[bytes]
    """Which routed blocks the tokens went through: one byte per token and block."""
    stored: np.ndarray
    """(chunks, layers): number of tokens stored by each layer."""

    def take(self, numbers: np.ndarray) -> "Report":
        """Select these chunks, in this order."""
        at = numbers.tolist()
        return Report(
            [self.token[number] for number in at],
            [self.logprob[number] for number in at],
            [self.top[number] for number in at],
            [self.taken[number] for number in at],
            self.stored[numbers],
        )


def join_reports(reports: Sequence[Report]) -> Report:
    """Concatenate the reports of several steps."""
    return Report(
        [token for report in reports for token in report.token],
        [logprob for report in reports for logprob in report.logprob],
        [top for report in reports for top in report.top],
        [taken for report in reports for taken in report.taken],
        np.concatenate([report.stored for report in reports]),
    )


@runtime_checkable
class Flight(Protocol):
    """A step in flight."""

    def is_ready(self) -> bool:
        """Whether the device had already finished: if so, the host is the bottleneck."""
        ...

    def wait(self) -> Sequence[Report]:
        """One report for each round of the step."""
        ...


class Ready(NamedTuple):
    """A step that has already finished."""

    report: Report

    def is_ready(self) -> bool:
        return False

    def wait(self) -> Sequence[Report]:
        return (self.report,)


@runtime_checkable
class StepRunner(Protocol):
    """What the engine needs from a runner."""

    cache: PagedCache
    selector: str | None
    depth: int
    """Maximum number of steps in flight."""
    can_retry: bool
    """Whether a failed step leaves the cache unchanged."""
    most_rounds: int
    """Maximum number of rounds of a step."""

    def launch(self, plan: Plan, tracks: Sequence[Track]) -> Flight:
        """Start a step with these chunks, whose samples are `tracks`."""
        ...

    def take_usage(self, row: int) -> Usage:
        """Return the work spent on the tokens in a row's cache, before the row is given up."""
        ...

    def warm_up(self, progress: Callable[[int, int], None] | None) -> float: ...

    def forget(self) -> None:
        """Discard assumptions about the device's state, after a failed step."""
        ...

    def check_weights(self) -> None:
        """Raise if the model's weights are no longer those the runner was built for."""
        ...

    def mark_seen(self, tokens: Sequence[int], params: SamplingParams) -> Tensor | None:
        """Return a prompt's occurrences, if penalised and not kept by the runner itself."""
        ...
