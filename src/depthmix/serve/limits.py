"""Every limit of the server, with its default. Plain data."""

from dataclasses import dataclass

from depthmix.config.fields import Count, NotNegative, Positive, check_bounds

# `float` alone refuses 1 where types are checked at run time
Seconds = float | int

# fixed bounds of the interface: the cost of a request grows with each of them
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_MESSAGES = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client may ask for, and what all of them may together."""

    max_body_bytes: Count = 4 << 20
    """Largest body of a request."""
    max_bodies_bytes: Count = 256 << 20
    """All bodies of open requests together, of which one always fits; more are answered 429."""
    max_prompt_tokens: Count | None = None
    """Longest prompt; None leaves it to the model's max_seq_len."""
    max_n: Count = 16
    """Most samples of one prompt."""
    max_samples: Count = 128
    """Most samples of one request: its prompts times n."""
    max_queue: NotNegative[int] = 256
    """Most samples that wait for a row; more are answered 429."""
    max_connections: Count = 512
    """Most connections at a time; more are answered 503."""
    max_header_bytes: Count = 32 << 10
    """Largest head of a request."""
    header_seconds: Positive[Seconds] = 10.0
    """Time for the head of a request to arrive."""
    body_seconds: Positive[Seconds] = 30.0
    """Time for its body to arrive."""
    idle_seconds: Positive[Seconds] = 75.0
    """How long a connection without a request stays open."""
    write_seconds: Positive[Seconds] = 60.0
    """How long a client may leave an answer unread before it is cut off."""
    drain_seconds: NotNegative[Seconds] = 30.0
    """Time for requests to finish after SIGTERM."""

    def __post_init__(self) -> None:
        check_bounds(self)
