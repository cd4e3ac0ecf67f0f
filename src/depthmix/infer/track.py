"""State of one sample during generation: tokens, text, log-probabilities, and stop conditions.

Knows nothing of the model, the cache or other samples.
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from depthmix.infer.depth import DepthMeter, Trail
from depthmix.infer.results import Alternative, Finish, Sample, TokenScore
from depthmix.infer.sampling import SamplingParams
from depthmix.infer.text import TextStream


@dataclass(slots=True, kw_only=True)
class Track:
    """What the engine keeps for a sample until it is finished."""

    request: int
    number: int
    """Index among the request's samples."""
    params: SamplingParams
    seed: int
    prompt: np.ndarray
    """The prompt's tokens, shared by all samples of the request."""
    max_new: int
    meter: DepthMeter
    stream: TextStream | None
    seen: Tensor | None
    """The occurrences of tokens (`sampling.mark_seen`), if they are penalised and the runner does
    not keep them itself."""
    new: list[int] = field(default_factory=list)
    """The tokens generated and known so far."""
    trail: Trail = field(default_factory=Trail)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[Alternative, ...]] = field(default_factory=list)

    @property
    def num_new(self) -> int:
        """Number of tokens generated."""
        return len(self.new)

    def read_score(self) -> TokenScore | None:
        """The newest token's log-probabilities, if they were requested."""
        if not self.logprobs:
            return None
        return TokenScore(self.logprobs[-1], self.top_logprobs[-1] if self.top_logprobs else ())

    def list_tokens(self, start: int, count: int) -> np.ndarray | list[int]:
        """Tokens from position `start` on; fewer if a step in flight has yet to draw some."""
        # places among the generated tokens
        first, stop = start - len(self.prompt), start + count - len(self.prompt)
        if stop <= 0:
            return self.prompt[start : start + count]
        if first >= 0:
            return self.new[first:stop]
        return self.prompt[start:].tolist() + self.new[:stop]

    def take(
        self, token: int, logprob: float, top: tuple[list[int], list[float]] | None = None
    ) -> tuple[str, Finish | None]:
        """Add a new token; return the text that is now final, and the finish reason, if any.

        `top` holds the most probable tokens at this position and their log-probabilities; only as
        many as the sample requested are kept.
        """
        params = self.params
        self.new.append(token)
        if params.logprobs is not None:
            self.logprobs.append(logprob)
            if top is not None and params.logprobs:
                places = zip(top[0][: params.logprobs], top[1], strict=False)
                self.top_logprobs.append(tuple(Alternative(*place) for place in places))
        if self.seen is not None:
            self.seen[token] += 2
        if token in params.stop_tokens:
            # a stop token has no text
            return "", "stop"
        text = ""
        if self.stream is not None:
            text = self.stream.add(token)
            self.text += text
            if self.stream.stopped:
                return text, "stop"
        return text, "length" if len(self.new) == self.max_new else None

    def flush(self) -> str:
        """Return the text that was held back, which is final now."""
        rest = "" if self.stream is None else self.stream.finish()
        self.text += rest
        return rest

    def end(self, finish: Finish, error: BaseException | None = None) -> Sample:
        """Return the finished sample."""
        wish = self.params.logprobs
        return Sample(
            tokens=tuple(self.new),
            text=None if self.stream is None else self.text,
            finish=finish,
            logprobs=None if wish is None else tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs) if wish else None,
            # each generated token needed the logits of one token
            depth=self.meter.read(self.num_new, self.trail.read()),
            error=error,
        )
