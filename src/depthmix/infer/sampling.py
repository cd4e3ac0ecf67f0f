"""How the next token is drawn: penalties, temperature, filters, and noise derived from a seed.

Owns `SamplingParams` and the pure function from logits to tokens. Knows nothing of requests, the
rest of the batch, or the origin of the logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthmix.config.fields import Bounds, Count, NotNegative, check_bounds

# `float` alone rejects 0 and 1 where types are checked at run time
Number = float | int

# SplitMix64's constants, as int64 represents them
_GOLDEN, _FIRST, _SECOND = (
    bits - (1 << 64) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """A request's options: how to sample tokens, when to stop, and what to return.

    >>> SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, stop=["end"], seed=1).stop
    ('end',)
    """

    max_tokens: Count = 128
    """Maximum number of tokens to generate."""
    temperature: Annotated[Number, Bounds(least=0)] = 1.0
    """Divisor of the logits; 0 always takes the most probable token."""
    # the filters compare with int64
    top_k: Annotated[int, Bounds(least=0, below=1 << 63, hint="0 means all tokens")] = 0
    """Draw from this many most probable tokens; 0 means all."""
    top_p: Annotated[Number, Bounds(above=0, most=1, hint="1 means all tokens")] = 1.0
    """Draw from the fewest tokens whose total probability reaches this, in (0, 1]; 1 means all."""
    min_p: Annotated[Number, Bounds(least=0, most=1, hint="0 means all tokens")] = 0.0
    """Draw from tokens at least this fraction as probable as the best one; 0 means all."""
    repetition_penalty: Annotated[Number, Bounds(above=0, hint="1 changes nothing")] = 1.0
    """Divides positive logits and multiplies negative ones, for tokens in the prompt or in the
    output so far; 1 changes nothing."""
    frequency_penalty: Annotated[Number, Bounds(least=-2, most=2, hint="0 changes nothing")] = 0.0
    """Subtracted from a token's logit for each time it was generated; 0 changes nothing."""
    presence_penalty: Annotated[Number, Bounds(least=-2, most=2, hint="0 changes nothing")] = 0.0
    """Subtracted once from the logits of tokens that were generated; 0 changes nothing."""
    stop_tokens: Sequence[NotNegative[int]] = ()
    """Token ids that end a sample."""
    stop: Sequence[str] = ()
    """Strings that end a sample; its text ends before them."""
    logprobs: NotNegative[int] | None = None
    """Number of alternatives whose log-probabilities are returned with the chosen token's; 0
    returns the chosen token's only, None returns nothing."""
    n: Count = 1
    """Number of samples."""
    seed: Annotated[int, Bounds(least=-(1 << 63), below=1 << 63)] | None = None
    """Seed of the random numbers; None lets the engine choose."""

    def __post_init__(self) -> None:
        problem = next(_find_misfits(self), None)
        if problem is not None:
            raise ValueError(problem)
        for name in ("stop_tokens", "stop"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_bounds(self)
        if "" in self.stop:
            raise ValueError("stop must not contain an empty string, which matches everywhere")

    @property
    def filters(self) -> bool:
        """Whether tokens with non-zero probability may be excluded.

        Greedy sampling needs no filter: every filter keeps the most probable token.
        """
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        """Whether tokens are more or less likely because they occurred before."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def is_plain(self) -> bool:
        """Whether only the most probable token is requested."""
        return self.temperature == 0 and not self.penalizes and self.logprobs is None


class Settings(NamedTuple):
    """What `sample` needs to know about each row."""

    temperature: Float[Tensor, " B"]
    """float64; 0 is greedy."""
    top_k: Int[Tensor, " B"]
    """0 is off."""
    top_p: Float[Tensor, " B"]
    """float64; 1 is off."""
    min_p: Float[Tensor, " B"]
    """float64; 0 is off."""
    repetition: Float[Tensor, " B"]
    """float64; 1 is off."""
    frequency: Float[Tensor, " B"]
    """float64 with the precision of float32; 0 is off."""
    presence: Float[Tensor, " B"]
    """float64 with the precision of float32; 0 is off."""
    seed: Int[Tensor, " B"]
    """int64."""
    step: Int[Tensor, " B"]
    """int64: index of the new token in its sequence, so that each token gets its own noise."""


class Sampled(NamedTuple):
    """The next token of every row."""

    token: Int[Tensor, " B"]
    logprob: Float[Tensor, " B"]
    """The token's, under the model itself: temperature 1, no penalties, no filter."""


def pack_settings(
    params: Sequence[SamplingParams], seeds: Sequence[int], steps: Sequence[int]
) -> tuple[Float[Tensor, "6 B"], Int[Tensor, "3 B"]]:
    """Pack the settings of all rows into two tensors on the host."""
    if not len(params) == len(seeds) == len(steps):
        raise ValueError(
            f"there are {len(params)} params, {len(seeds)} seeds and {len(steps)} steps: give one "
            f"of each per row"
        )
    shares = [
        [p.temperature for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [p.repetition_penalty for p in params],
        [p.frequency_penalty for p in params],
        [p.presence_penalty for p in params],
    ]
    counts = [[p.top_k for p in params], list(seeds), list(steps)]
    # via NumPy arrays, which convert lists in a third of the time
    packed = np.array(shares, dtype=np.float64), np.array(counts, dtype=np.int64)
    # so few bits that a count times a penalty is exact, and sums are the same on every device
    packed[0][4:] = packed[0][4:].astype(np.float32)
    return torch.from_numpy(packed[0]), torch.from_numpy(packed[1])


def unpack_settings(shares: Float[Tensor, "6 B"], counts: Int[Tensor, "3 B"]) -> Settings:
    """Inverse of `pack_settings`, as views."""
    temperature_B, top_p_B, min_p_B, *penalties = shares.unbind()
    repetition_B, frequency_B, presence_B = penalties
    top_k_B, seed_B, step_B = counts.unbind()
    return Settings(
        temperature=temperature_B,
        top_k=top_k_B,
        top_p=top_p_B,
        min_p=min_p_B,
        repetition=repetition_B,
        frequency=frequency_B,
        presence=presence_B,
        seed=seed_B,
        step=step_B,
    )


def mark_seen(
    prompt: Sequence[int], generated: Sequence[int], vocab_size: int
) -> Int[Tensor, " V"]:
    """Return where each token occurred, for penalties.

    A token's number is twice the times it was generated, plus 1 if it is in the prompt.
    """
    seen_V = torch.zeros(vocab_size, dtype=torch.int32)
    seen_V[list(prompt)] = 1
    return seen_V.index_add_(
        0,
        torch.tensor(generated, dtype=torch.int64),
        torch.full((len(generated),), 2, dtype=torch.int32),
    )


def sample(
    logits: Float[Tensor, "B V"],
    settings: Settings,
    seen: Int[Tensor, "B V"] | None,
    *,
    filtered: bool = True,
) -> Sampled:
    """Draw each row's next token by the Gumbel-max trick: argmax of log p + noise.

    A row's token depends only on its own logits and settings, not on its place in the batch.
    `seen` says which tokens to penalise; see `mark_seen`. `filtered=False` is a shortcut for
    batches in which no row filters: it gives the same tokens without sorting.
    """
    scores_BV = logits.float()
    if seen is not None:
        scores_BV = _penalize(scores_BV, settings, seen)
    # whatever the model's output, no NaN can arise below, and every row gets a token
    scores_BV = scores_BV.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    ids_BV = torch.arange(logits.shape[1], device=logits.device)[None, :].expand_as(scores_BV)
    if filtered:
        # stable: ties go to the lowest id, on every device
        scores_BV, ids_BV = scores_BV.sort(dim=1, descending=True, stable=True)
    top_B1 = scores_BV.amax(dim=1, keepdim=True).clamp(min=-_LARGEST)
    greedy_B1 = settings.temperature[:, None] == 0
    temperature_B1 = settings.temperature[:, None].masked_fill(greedy_B1, 1.0)
    # subtract the maximum before dividing: a small temperature gives -inf, never inf - inf
    scores_BV = (scores_BV.double() - top_B1) / temperature_B1
    if filtered:
        scores_BV = scores_BV.masked_fill(~keep_tokens(scores_BV, settings), -torch.inf)
    noise_BV = draw_gumbel(settings.seed, settings.step, ids_BV)
    place_B1 = (scores_BV + noise_BV.masked_fill(greedy_B1, 0.0)).argmax(dim=1, keepdim=True)
    token_B1 = ids_BV.gather(1, place_B1)
    logprob_B1 = logits.float().log_softmax(dim=1).gather(1, token_B1)
    return Sampled(token_B1.squeeze(1), logprob_B1.squeeze(1))


def top_logprobs(
    logits: Float[Tensor, "B V"], k: int
) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the model's own k highest log-probabilities and their ids, highest first.

    Ties go to the lowest id. A vocabulary smaller than k gives fewer.
    """
    values_BV, ids_BV = logits.float().log_softmax(dim=1).sort(dim=1, descending=True, stable=True)
    return values_BV[:, :k], ids_BV[:, :k]


def keep_tokens(scores: Float[Tensor, "B V"], settings: Settings) -> Bool[Tensor, "B V"]:
    """Return which tokens pass the filters: top_k, then top_p, then min_p.

    `scores` are log-probabilities minus the best one, float64 and in descending order. Each filter
    works on the probabilities that the previous one kept. Ties go to earlier tokens.
    """
    top_k_B1, top_p_B1 = settings.top_k[:, None], settings.top_p[:, None]
    rank_V = torch.arange(scores.shape[1], device=scores.device)
    kept_BV = (rank_V < top_k_B1) | (top_k_B1 == 0)
    # p relative to the best token's p; renormalising would scale both alike
    ratio_BV = scores.exp()
    # Integer sums do not depend on the order of addition, so a sum at the very edge of top_p does
    # not depend on the device or on the number of rows. 2^40 leaves room for 2^22 tokens.
    mass_BV = (ratio_BV * 2.0**40).round().long().masked_fill(~kept_BV, 0)
    above_BV = mass_BV.cumsum(dim=1) - mass_BV
    reached_BV = above_BV >= top_p_B1 * mass_BV.sum(dim=1, keepdim=True)
    kept_BV = kept_BV & (~reached_BV | (top_p_B1 >= 1))
    return kept_BV & (ratio_BV >= settings.min_p[:, None])


def draw_gumbel(
    seed: Int[Tensor, " B"], step: Int[Tensor, " B"], ids: Int[Tensor, "B V"]
) -> Float[Tensor, "B V"]:
    """Return float64 Gumbel noise: a hash of seed, step and token id, and nothing else.

    The bits are the same on every device. Logarithms round differently by device, but in float64
    by far too little to change which sum is largest.
    """
    key_B = _mix(_mix(seed) + step)
    # Ids are added before the multiplication: compiled by inductor (torch 2.13), a range times a
    # constant this large gave wrong noise or corrupted memory.
    bits_BV = _mix((key_B[:, None] + ids) * _GOLDEN)
    # 52 bits plus one half: exact in float64, and never 0 or 1, whose noise would be infinite
    uniform_BV = (_shift_right(bits_BV, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform_BV))


def _penalize(
    scores_BV: Tensor, settings: Settings, seen_BV: Int[Tensor, "B V"]
) -> Float[Tensor, "B V"]:
    """Make seen tokens less likely.

    Repetition as in arXiv:1909.05858, Sec. 4.1, but negative logits are multiplied; then frequency
    and presence, of generated tokens only.
    """
    factor_B1 = settings.repetition[:, None]
    penalized_BV = torch.where(scores_BV > 0, scores_BV / factor_B1, scores_BV * factor_B1)
    scores_BV = torch.where(seen_BV != 0, penalized_BV.float(), scores_BV)
    times_BV = (seen_BV >> 1).double()
    less_BV = settings.frequency[:, None] * times_BV + settings.presence[:, None]
    return torch.where(times_BV > 0, (scores_BV.double() - less_BV).float(), scores_BV)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's step: every bit of the int64 input changes about half of the output's."""
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    # `>>` alone replicates the sign bit
    return (x >> count) & ((1 << (64 - count)) - 1)


def _find_misfits(params: SamplingParams) -> Iterator[str]:
    """Yield a sentence for every value of a wrong type; nothing is converted."""
    whole, number = "a whole number", "a number"
    for name in ("max_tokens", "top_k", "n"):
        yield from _misfit(name, getattr(params, name), int, whole)
    for name in ("logprobs", "seed"):
        yield from _misfit(name, getattr(params, name), int | None, f"{whole} or None")
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    for name in ("temperature", "top_p", "min_p", *penalties):
        yield from _misfit(name, getattr(params, name), Number, number)
    for name, kind, items in (("stop_tokens", int, "token ids"), ("stop", str, "strings")):
        value = getattr(params, name)
        # a lone string is a sequence too, but its characters are not what was meant
        yield from _misfit(name, value, list | tuple, f"a list of {items}")
        for item in value:
            yield from _misfit(name, item, kind, f"a list of {items}")


def _misfit(name: str, value: Any, kind: Any, meant: str) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, kind):
        yield f"{name} = {value!r} does not fit: it must be {meant}"
