"""One sample while it is made: its tokens, its text, its numbers, and when it ends.

Knows nothing of the model, of the cache or of other samples.
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from depthmix.infer.depth import DepthMeter, Trail
from depthmix.infer.results import Alternative, Finish, Sample
from depthmix.infer.sampling import SamplingParams
from depthmix.infer.text import TextStream


@dataclass(slots=True, kw_only=True)
class Track:
    """What the engine keeps of a sample until it is done."""

    request: int
    number: int
    """Which of the request's samples."""
    params: SamplingParams
    seed: int
    prompt: np.ndarray
    """Its prompt's tokens, as runners take them."""
    tokens: list[int]
    """The prompt's, then its own as far as they are known."""
    num_prompt: int
    max_new: int
    meter: DepthMeter
    stream: TextStream | None
    seen: Tensor | None
    """Tokens of the prompt and its own, as a mask, where repetition is penalised and the runner
    does not keep one."""
    trail: Trail = field(default_factory=Trail)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[Alternative, ...]] = field(default_factory=list)

    @property
    def num_new(self) -> int:
        """Tokens that it made."""
        return len(self.tokens) - self.num_prompt

    def list_tokens(self, start: int, count: int) -> np.ndarray | list[int]:
        """Tokens from position `start` on; fewer where a step under way has yet to draw them."""
        if start + count <= self.num_prompt:
            return self.prompt[start : start + count]
        return self.tokens[start : start + count]

    def take(
        self, token: int, logprob: float, top: tuple[list[int], list[float]] | None = None
    ) -> tuple[str, Finish | None]:
        """A new token: the text that is certain now, and why it was the last, if it was.

        `top` are the most probable tokens at its place and their log-probabilities, of which it
        may have asked for some.
        """
        tokens, params = self.tokens, self.params
        tokens.append(token)
        if params.logprobs is not None:
            self.logprobs.append(logprob)
            if top is not None and params.logprobs:
                places = zip(top[0][: params.logprobs], top[1], strict=False)
                self.top_logprobs.append(tuple(Alternative(*place) for place in places))
        if self.seen is not None:
            self.seen[token] = True
        if token in params.stop_tokens:
            # which is no text
            return "", "stop"
        text = ""
        if self.stream is not None:
            text = self.stream.add(token)
            self.text += text
            if self.stream.stopped:
                return text, "stop"
        return text, "length" if len(tokens) - self.num_prompt == self.max_new else None

    def end(self, finish: Finish, error: Exception | None = None) -> tuple[str, Sample]:
        """Text that was held back, and the finished sample."""
        rest = "" if self.stream is None or error is not None else self.stream.finish()
        wish = self.params.logprobs
        return rest, Sample(
            tokens=tuple(self.tokens[self.num_prompt :]),
            text=None if self.stream is None else self.text + rest,
            finish=finish,
            logprobs=None if wish is None else tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs) if wish else None,
            # each of its tokens was drawn from logits of one
            depth=self.meter.read(self.num_new, self.trail.read()),
            error=error,
        )
