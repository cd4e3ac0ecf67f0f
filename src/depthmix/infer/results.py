"""The engine's output: events during generation, results when a request is done. Plain data."""

from typing import Literal, NamedTuple

from depthmix.infer.depth import Depth, Path

Finish = Literal["stop", "length", "cancelled", "failed"]


class Alternative(NamedTuple):
    """A token that could have been chosen, with its log-probability."""

    token: int
    logprob: float


class TokenScore(NamedTuple):
    """How probable a token was, under the model itself."""

    logprob: float
    top: tuple[Alternative, ...]
    """The most probable tokens at its position, as many as requested."""


class Sample(NamedTuple):
    """A finished sample."""

    tokens: tuple[int, ...]
    text: str | None
    """None if the engine was created without `decode`."""
    finish: Finish
    """stop: a stop token (which is the last of `tokens`) or string; length: max_tokens, or the
    model's max_seq_len; cancelled; failed: its text could not be decoded."""
    logprobs: tuple[float, ...] | None
    """Each token's, under the model itself; None unless requested."""
    top_logprobs: tuple[tuple[Alternative, ...], ...] | None
    """The most probable tokens at each position, as many as requested."""
    depth: Depth
    """Where its compute went."""
    error: BaseException | None = None
    """Why it failed."""


class Event(NamedTuple):
    """One new token of one sample, or its end, or both."""

    request: int
    sample: int
    """Index among the request's n samples."""
    token: int | None
    """None if the sample ended without a new token."""
    text: str
    """Text that is now final; empty while a character or a stop string may be incomplete."""
    path: Path
    """The routed blocks that the previous token went through."""
    result: Sample | None
    """The finished sample, if this event ends it."""
    score: TokenScore | None = None
    """The new token's; None unless requested."""


class Result(NamedTuple):
    """A finished request."""

    request: int
    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]


class Stats(NamedTuple):
    """The engine's current state."""

    num_running: int
    num_waiting: int
    num_preempted: int
    """How often a sequence has given up its pages for an older one."""
    cache_bytes: int
    """Memory of pages in use now."""
    cache_bytes_peak: int
    cache_bytes_total: int
    """Memory of all pages."""
