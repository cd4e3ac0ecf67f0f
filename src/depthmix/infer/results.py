"""What the engine tells: events while it works, results when a request is done. Plain data."""

from typing import Literal, NamedTuple

from depthmix.infer.depth import Depth, Path

Finish = Literal["stop", "length", "cancelled", "failed"]


class Alternative(NamedTuple):
    """A token that could have been, with its log-probability."""

    token: int
    logprob: float


class Sample(NamedTuple):
    """A finished sample."""

    tokens: tuple[int, ...]
    text: str | None
    """None where the engine was given no `decode`."""
    finish: Finish
    """stop: a stop token (which is the last of `tokens`) or string; length: max_tokens, or the
    model's max_seq_len; cancelled; failed: its text could not be decoded."""
    logprobs: tuple[float, ...] | None
    """Of each token, under the model itself; None unless asked for."""
    top_logprobs: tuple[tuple[Alternative, ...], ...] | None
    """The most probable tokens at each place, as many as were asked for."""
    depth: Depth
    """Where its compute went."""
    error: Exception | None = None
    """Why it failed."""


class Event(NamedTuple):
    """One new token of one sample, or its end, or both."""

    request: int
    sample: int
    """Which of the request's n samples."""
    token: int | None
    """None where a sample ended without a new token."""
    text: str
    """What is certain now; empty while bytes of a character or a stop string may be under way."""
    path: Path
    """The routed blocks that the token before this one went through."""
    result: Sample | None
    """The whole sample where this is its end."""


class Result(NamedTuple):
    """A finished request."""

    request: int
    prompt: tuple[int, ...]
    samples: tuple[Sample, ...]


class Stats(NamedTuple):
    """Where the engine stands."""

    num_running: int
    num_waiting: int
    num_preempted: int
    """Times that a sequence gave up its pages for an older one, so far."""
    cache_bytes: int
    """Pages in use now."""
    cache_bytes_peak: int
    cache_bytes_total: int
    """All pages that there are."""
