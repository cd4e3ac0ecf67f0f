"""Token sampling against slow plain Python, and the noise against its expected statistics."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from depthmix.infer.sampling import (
    Sampled,
    SamplingParams,
    Settings,
    draw_gumbel,
    keep_tokens,
    mark_seen,
    pack_settings,
    sample,
    top_logprobs,
    unpack_settings,
)

INF = math.inf
MASK = (1 << 64) - 1


class OnEdgeError(Exception):
    """A probability is so close to a filter's limit that it may round to either side."""


def make_settings(
    params: Sequence[SamplingParams], seeds: Sequence[int], steps: Sequence[int]
) -> Settings:
    return unpack_settings(*pack_settings(params, seeds, steps))


def is_below(value: float, limit: float) -> bool:
    if abs(value - limit) < 1e-9:
        raise OnEdgeError
    return value < limit


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_noise(seed: int, step: int, token: int) -> float:
    key = mix(mix(seed & MASK) + step)
    bits = mix((key + token) * 0x9E3779B97F4A7C15)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def normalize(weights: dict[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def plain_penalties(
    row: Sequence[float], seen: Sequence[int], params: SamplingParams
) -> list[float]:
    factor, penalized = params.repetition_penalty, []
    for logit, occurred in zip(row, seen, strict=True):
        score, times = logit, occurred // 2
        if occurred:
            score = round_float(score / factor if score > 0 else score * factor)
        if times:
            score -= params.frequency_penalty * times + params.presence_penalty
        penalized.append(round_float(score))
    return penalized


def round_float(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def plain_filter(row: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Probabilities of the remaining tokens; each filter works on the renormalised result."""
    best = max(row)
    left = normalize({t: math.exp((x - best) / params.temperature) for t, x in enumerate(row)})
    order = sorted(left, key=lambda t: (-row[t], t))
    if params.top_k:
        order = order[: params.top_k]
        left = normalize({t: left[t] for t in order})
    if params.top_p < 1:
        above = {t: math.fsum(left[o] for o in order[:rank]) for rank, t in enumerate(order)}
        left = normalize({t: left[t] for t in order if is_below(above[t], params.top_p)})
    if params.min_p:
        best = max(left.values())
        left = {t: p for t, p in left.items() if p == best or not is_below(p, params.min_p * best)}
    return normalize(left)


def plain_token(row: Sequence[float], params: SamplingParams, seed: int, step: int) -> int:
    if params.temperature == 0:
        return row.index(max(row))
    left = {t: p for t, p in plain_filter(row, params).items() if p > 0}
    return max(left, key=lambda t: math.log(left[t]) + plain_noise(seed, step, t))


class Case(NamedTuple):
    logits: Tensor
    seen: Tensor
    choices: list[dict[str, Any]]
    seeds: list[int]
    steps: list[int]

    @property
    def params(self) -> list[SamplingParams]:
        # created here: a strategy must not trigger type checks at random points
        return [SamplingParams(**chosen) for chosen in self.choices]

    def settings(self) -> Settings:
        return make_settings(self.params, self.seeds, self.steps)


FILTERS = {
    "top_k": st.integers(0, 8),
    "top_p": st.sampled_from([0.05, 0.37, 0.71, 0.93, 1.0]),
    "min_p": st.sampled_from([0.0, 0.07, 0.4, 1.0]),
}
OTHERS = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    "repetition_penalty": st.sampled_from([0.6, 1.0, 1.3]),
    # float32 represents these
    "frequency_penalty": st.sampled_from([0.0, 0.75, -2.0]),
    "presence_penalty": st.sampled_from([0.0, 1.5, -0.25]),
}
ROW_CHOICES = st.fixed_dictionaries(FILTERS | OTHERS)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, vocabulary = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    # few values, so that there are ties
    value = st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 1.0, 2.0]) | st.floats(-4, 4, width=32)

    def draw_rows(item: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [[draw(item) for _ in range(vocabulary)] for _ in range(batch)]

    rows = draw_rows(value)
    for row in rows:
        if max(row) == -INF:
            row[draw(st.integers(0, vocabulary - 1))] = 1.0
    return Case(
        torch.tensor(rows),
        torch.tensor(draw_rows(st.integers(0, 9)), dtype=torch.int32),
        [draw(ROW_CHOICES) for _ in range(batch)],
        [draw(st.integers(-(2**63), 2**63 - 1)) for _ in range(batch)],
        [draw(st.integers(0, 10**6)) for _ in range(batch)],
    )


@settings(max_examples=300)
@given(cases())
def test_tokens_equal_plain_python(case: Case) -> None:
    expected = []
    for row, params in enumerate(case.params):
        logits, seen = case.logits[row].tolist(), case.seen[row].tolist()
        penalized = plain_penalties(logits, seen, params)
        try:
            expected.append(plain_token(penalized, params, case.seeds[row], case.steps[row]))
        except OnEdgeError:
            reject()
    drawn = sample(case.logits, case.settings(), case.seen)
    assert drawn.token.tolist() == expected
    for row, token in enumerate(expected):
        logits = case.logits[row].tolist()
        if logits[token] == -INF:
            assert drawn.logprob[row] == -INF
        else:
            total = math.log(math.fsum(map(math.exp, logits)))
            assert drawn.logprob[row].item() == pytest.approx(logits[token] - total, abs=1e-5)


@given(cases())
def test_the_short_way_gives_the_same_tokens(case: Case) -> None:
    unfiltered = [{name: chosen[name] for name in OTHERS} for chosen in case.choices]
    case = case._replace(choices=unfiltered)
    long, short = (
        sample(case.logits, case.settings(), case.seen, filtered=filtered)
        for filtered in (True, False)
    )
    assert torch.equal(long.token, short.token)
    assert torch.equal(long.logprob, short.logprob)


@given(cases(), st.data())
def test_a_row_does_not_depend_on_the_others(case: Case, data: st.DataObject) -> None:
    together = sample(case.logits, case.settings(), case.seen)
    rows = data.draw(st.lists(st.integers(0, len(case.seeds) - 1), max_size=6))
    chosen = Settings(*(tensor[rows] for tensor in case.settings()))
    apart = sample(case.logits[rows], chosen, case.seen[rows])
    assert torch.equal(apart.token, together.token[rows])
    assert torch.equal(apart.logprob, together.logprob[rows])


def draw_many(row: Sequence[float], params: SamplingParams, count: int, seed: int = 0) -> Sampled:
    """Draw `count` tokens from the same logits, with one seed."""
    case = make_settings([params] * count, [seed] * count, range(count))
    return sample(torch.tensor([row] * count), case, None)


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> float:
    return sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.15),
        SamplingParams(temperature=1.5, top_k=5, top_p=0.9, min_p=0.2),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, -7])
def test_frequencies_are_the_probabilities(params: SamplingParams, seed: int) -> None:
    row, count = [0.5, 2.0, -1.0, 1.0, 0.0, 1.5], 20_000
    left = plain_filter(row, params)
    drawn = torch.bincount(draw_many(row, params, count, seed).token, minlength=len(row)).tolist()
    assert {t for t, n in enumerate(drawn) if n} == set(left)
    # 99.99% of chi-square values with 5 degrees of freedom are below 25.7
    assert chi_square([drawn[t] for t in left], [count * p for p in left.values()]) < 25.7


def test_noise_is_the_hash_of_plain_python() -> None:
    seeds, steps, ids = [0, 1, -(2**63), 2**63 - 1], [0, 5, 10**9, 2**40], [0, 1, 77, 131_071]
    drawn = draw_gumbel(torch.tensor(seeds), torch.tensor(steps), torch.tensor([ids] * len(seeds)))
    for row, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        expected = [plain_noise(seed, step, token) for token in ids]
        assert drawn[row].tolist() == pytest.approx(expected, rel=1e-14)


def test_noise_is_uniform_and_pairs_are_independent() -> None:
    # neighbours in every direction: the inputs of the hash differ by one
    seeds, steps, ids = torch.meshgrid(*(torch.arange(48),) * 3, indexing="ij")
    noise = draw_gumbel(seeds[..., 0].flatten(), steps[..., 0].flatten(), ids.reshape(-1, 48))
    # the Gumbel distribution function maps it to uniform
    uniform = (-(-noise).exp()).exp().reshape(48, 48, 48)
    bins = (uniform * 16).long()
    # 99.99% of chi-square values with 15 degrees of freedom are below 44.3, with 255 below 347
    assert chi_square(torch.bincount(bins.flatten()).tolist(), [48**3 / 16] * 16) < 44.3
    for dim in range(3):
        pairs = bins.narrow(dim, 0, 47) * 16 + bins.narrow(dim, 1, 47)
        assert (
            chi_square(torch.bincount(pairs.flatten()).tolist(), [pairs.numel() / 256] * 256) < 347
        )


def test_seeds_and_steps_give_other_tokens() -> None:
    row, count = [0.0] * 1000, 200
    by_step = draw_many(row, SamplingParams(), count).token
    assert torch.equal(by_step, draw_many(row, SamplingParams(), count).token)
    assert len(by_step.unique()) > 150
    # one token in a thousand agrees by chance
    assert (by_step == draw_many(row, SamplingParams(), count, seed=1).token).sum() < 5


def draw_one(
    row: Sequence[float], params: SamplingParams, seen: Sequence[int] | None = None
) -> int:
    case = make_settings([params], [3], [0])
    occurred = None if seen is None else torch.tensor([seen])
    return int(sample(torch.tensor([row]), case, occurred).token)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    row = [1.0, 3.0, 2.0, 3.0]
    assert draw_one(row, SamplingParams(temperature=0)) == 1
    params = SamplingParams(temperature=0, top_k=3, top_p=0.4, min_p=0.1)
    assert draw_one(row, params) == 1


def kept_tokens(row: Sequence[float], params: SamplingParams) -> set[int]:
    return set(draw_many(row, params, 400).token.tolist())


def test_filters_break_ties_by_id() -> None:
    row = [0.0, 1.0, 1.0, 1.0]
    assert kept_tokens(row, SamplingParams(top_k=1)) == {1}
    assert kept_tokens(row, SamplingParams(top_k=2)) == {1, 2}
    assert kept_tokens(row, SamplingParams(top_p=0.5)) == {1, 2}


@pytest.mark.parametrize(("count", "share"), [(4, 0.5), (10, 0.3), (10, 0.7), (7, 3 / 7)])
def test_top_p_that_is_reached_exactly_needs_no_other_token(count: int, share: float) -> None:
    kept = kept_tokens([0.5] * count, SamplingParams(top_p=share))
    assert kept == set(range(round(count * share)))


def test_each_filter_sees_what_the_one_before_left() -> None:
    row = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # 0.4 alone does not reach 0.5, but it is 0.57 of the two that top_k keeps
    assert kept_tokens(row, SamplingParams(top_p=0.5)) == {0, 1}
    assert kept_tokens(row, SamplingParams(top_p=0.5, top_k=2)) == {0}
    # the temperature is applied before the filters
    assert kept_tokens(row, SamplingParams(min_p=0.6)) == {0, 1}
    assert kept_tokens(row, SamplingParams(min_p=0.6, temperature=2.0)) == {0, 1, 2}


def test_filters_that_are_off_keep_the_most_improbable_token() -> None:
    rows = [SamplingParams(), SamplingParams(top_p=1 - 1e-9), SamplingParams(top_k=2**62)]
    scores = torch.tensor([[0.0, -10.0, -50.0, -1000.0, -INF]] * 3).double()
    kept = keep_tokens(scores, make_settings(rows, [0] * 3, [0] * 3))
    assert kept.sum(dim=1).tolist() == [5, 2, 5]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
@pytest.mark.parametrize("filtered", [True, False])
def test_small_temperatures_become_greedy(temperature: float, filtered: bool) -> None:
    logits = torch.randn(50, 20) * 10
    warm = make_settings([SamplingParams(temperature=temperature)] * 50, range(50), [1] * 50)
    drawn = sample(logits, warm, None, filtered=filtered)
    assert torch.equal(drawn.token, logits.argmax(dim=1))
    # equal tokens stay equally likely
    tied = sample(torch.ones(50, 2), warm, None, filtered=filtered)
    assert set(tied.token.tolist()) == {0, 1}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    greedy = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert draw_one([3.0, 2.0], greedy, [1, 0]) == 1
    assert draw_one([3.0, 1.0], greedy, [1, 0]) == 0
    assert draw_one([-1.0, -1.5], greedy, [1, 0]) == 1
    assert draw_one([-1.0, -2.5], greedy, [1, 0]) == 0
    assert draw_one([-1.0, 2.0, 1.5], greedy, [1, 2, 3]) == 1
    assert draw_one([0.0, -1.0], replace(greedy, repetition_penalty=1e300), [1, 0]) == 0
    # the penalty does not change the model's log-probability
    case = make_settings([greedy], [0], [0])
    drawn = sample(torch.tensor([[3.0, 2.0]]), case, torch.tensor([[1, 0]]))
    assert drawn.logprob.item() == pytest.approx(-math.log(1 + math.e), abs=1e-6)


def test_frequency_and_presence_count_generated_tokens_only() -> None:
    greedy = SamplingParams(temperature=0)
    often, once = replace(greedy, frequency_penalty=0.5), replace(greedy, presence_penalty=0.5)
    in_prompt, generated, thrice, both = 1, 2, 6, 7
    for params in (often, once):
        assert draw_one([1.0, 0.6], params, [in_prompt, 0]) == 0
        assert draw_one([1.0, 0.6], params, [generated, 0]) == 1
        assert draw_one([-1.0, -1.4], params, [generated, 0]) == 1
    for occurred in (thrice, both):
        assert draw_one([1.0, 0.4], once, [occurred, 0]) == 0
        assert draw_one([1.0, -0.4], often, [occurred, 0]) == 1
        assert draw_one([1.0, -0.6], often, [occurred, 0]) == 0
    # repetition comes first: 4 / 2 - 0.5 = 1.5
    every = replace(often, repetition_penalty=2.0)
    assert draw_one([4.0, 1.4], every, [generated, 0]) == 0
    assert draw_one([4.0, 1.6], every, [generated, 0]) == 1
    # a negative penalty makes a token more likely
    assert draw_one([1.0, 1.9], replace(often, frequency_penalty=-1), [generated, 0]) == 0


def test_occurrences_of_prompt_and_output() -> None:
    assert mark_seen([3, 3, 1], [1, 4, 4], 6).tolist() == [0, 3, 0, 1, 4, 0]
    assert mark_seen([0], [], 2).tolist() == [1, 0]


@pytest.mark.parametrize("filtered", [True, False])
def test_impossible_tokens_are_never_drawn(filtered: bool) -> None:
    logits = torch.tensor([[-INF, 0.0, -INF, 1.0]]).repeat(500, 1)
    case = make_settings([SamplingParams(temperature=100.0)] * 500, [0] * 500, range(500))
    assert set(sample(logits, case, None, filtered=filtered).token.tolist()) == {1, 3}


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_a_token_and_leave_the_other_rows_alone(
    temperature: float, filtered: bool
) -> None:
    nan = math.nan
    logits = torch.tensor(
        [[1.0, 2.0, 0.0], [nan, 2.0, nan], [nan] * 3, [-INF] * 3, [0.0, INF, 0.0]]
    )
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    params = replace(params, frequency_penalty=0.1)
    # in the prompt, and generated once
    seen = 3 * (logits > 1).int()
    case = make_settings([params] * 5, [0] * 5, [0] * 5)
    drawn = sample(logits, case, seen, filtered=filtered)
    assert drawn.token[1:].tolist() == [1, 0, 0, 1]
    alone = sample(logits[:1], Settings(*(t[:1] for t in case)), seen[:1], filtered=filtered)
    assert drawn.token[0] == alone.token[0]
    assert drawn.logprob[0].isfinite()
    assert drawn.logprob[1:].isnan().all()


@pytest.mark.parametrize("filtered", [True, False])
def test_no_rows_and_one_token(filtered: bool) -> None:
    none = sample(torch.zeros(0, 5), make_settings([], [], []), None, filtered=filtered)
    assert none.token.shape == none.logprob.shape == (0,)
    params = SamplingParams(top_k=3, top_p=0.5, min_p=1.0, repetition_penalty=2.0)
    case = make_settings([params] * 2, [0, 1], [0, 0])
    one = sample(torch.tensor([[3.0], [-5.0]]), case, torch.ones(2, 1).int(), filtered=filtered)
    assert one.token.tolist() == [0, 0]
    assert one.logprob.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_type_are_read_as_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(8, 30).to(dtype)
    case = make_settings([SamplingParams(top_p=0.9)] * 8, range(8), [0] * 8)
    drawn, expected = sample(logits, case, None), sample(logits.float(), case, None)
    assert drawn.logprob.dtype == torch.float32
    assert torch.equal(drawn.token, expected.token)
    assert torch.equal(drawn.logprob, expected.logprob)


@pytest.mark.compile
@pytest.mark.parametrize("filtered", [True, False])
def test_sample_compiles_into_one_graph(filtered: bool) -> None:
    compiled = torch.compile(sample, fullgraph=True, backend="aot_eager")
    params = SamplingParams(top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    params = replace(params, frequency_penalty=0.3, presence_penalty=0.1)
    rows = [params, replace(params, temperature=0.0), SamplingParams(), params]
    case = make_settings(rows, range(4), [5] * 4)
    logits, seen = torch.randn(4, 50), torch.randint(0, 4, (4, 50))
    expected = sample(logits, case, seen, filtered=filtered)
    drawn = compiled(logits, case, seen, filtered=filtered)
    assert torch.equal(drawn.token, expected.token)
    torch.testing.assert_close(drawn.logprob, expected.logprob)


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_code_makes_the_same_noise() -> None:
    """Compiled by inductor, which must not fold the ids into an address."""

    def draw(seed: Tensor, step: Tensor) -> Tensor:
        return draw_gumbel(seed, step, torch.arange(50)[None, :].expand(len(seed), 50))

    seed, step = torch.tensor([0, -5, 2**62]), torch.tensor([0, 1, 2])
    compiled = torch.compile(draw, fullgraph=True)
    torch.testing.assert_close(compiled(seed, step), draw(seed, step), rtol=1e-12, atol=1e-12)


def test_top_logprobs_are_the_highest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, -INF, 0.0, 0.0]])
    values, ids = top_logprobs(logits, 3)
    assert ids.tolist() == [[1, 2, 0], [0, 2, 3]]
    torch.testing.assert_close(values, logits.log_softmax(dim=1).gather(1, ids))
    assert [t.shape for t in top_logprobs(logits, 0)] == [(2, 0), (2, 0)]
    assert top_logprobs(logits, 9)[1].tolist() == [[1, 2, 0, 3], [0, 2, 3, 1]]


def test_settings_keep_every_number() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.1, seed=1
    )
    params = replace(params, frequency_penalty=-0.5, presence_penalty=0.1)
    case = make_settings([params, SamplingParams(temperature=0)], [2**63 - 1, -4], [7, 8])
    assert [tensor.tolist() for tensor in case] == [
        *([0.7, 0.0], [5, 0], [0.9, 1.0], [0.05, 0.0], [1.1, 1.0]),
        *([-0.5, 0.0], [np.float32(0.1), 0.0]),
        *([2**63 - 1, -4], [7, 8]),
    ]
    with pytest.raises(ValueError, match="2 params, 1 seeds and 2 steps"):
        make_settings([params, params], [0], [0, 0])


def test_params_are_a_value() -> None:
    params = SamplingParams(stop=["a", "b"], stop_tokens=[3])
    assert params.stop == ("a", "b")
    assert params.stop_tokens == (3,)
    assert params == SamplingParams(stop=("a", "b"), stop_tokens=(3,))
    assert len({params, SamplingParams(), SamplingParams(temperature=1)}) == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.01}, True),
        ({"top_k": 1, "temperature": 0}, False),
        ({"repetition_penalty": 1.5}, False),
    ],
)
def test_whether_params_filter(changes: dict[str, Any], expected: bool) -> None:
    assert SamplingParams(**changes).filters is expected


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_whether_params_penalize(name: str) -> None:
    greedy = SamplingParams(temperature=0)
    assert not greedy.penalizes
    assert greedy.is_plain
    given: dict[str, Any] = {"temperature": 0, name: 0.5}
    params = SamplingParams(**given)
    assert params.penalizes
    assert not params.is_plain


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ({"n": -1}, "n = -1 must be at least 1"),
        ({"temperature": -0.1}, "temperature = -0.1 must be 0 or more"),
        ({"temperature": math.nan}, "temperature = nan must be a finite number, 0 or more"),
        ({"temperature": INF}, "temperature = inf must be a finite number, 0 or more"),
        ({"top_k": -1}, "top_k = -1 must lie in [0, 2^63)"),
        ({"top_k": 2**63}, "must lie in [0, 2^63): 0 means all"),
        ({"top_p": 0.0}, "top_p = 0.0 must lie in (0, 1]: 1 means all"),
        ({"top_p": 1.01}, "top_p = 1.01 must lie in (0, 1]"),
        ({"min_p": -0.1}, "min_p = -0.1 must lie between 0 and 1: 0 means all"),
        ({"min_p": 1.1}, "min_p = 1.1 must lie between 0 and 1"),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty = 0.0 must be greater than 0: 1 changes nothing",
        ),
        (
            {"repetition_penalty": INF},
            "repetition_penalty = inf must be a finite number, greater than 0",
        ),
        (
            {"frequency_penalty": 2.1},
            "frequency_penalty = 2.1 must lie between -2 and 2: 0 changes nothing",
        ),
        ({"presence_penalty": True}, "presence_penalty = True does not fit: it must be a number"),
        ({"logprobs": -1}, "logprobs = -1 must be 0 or more"),
        ({"stop_tokens": [4, -1]}, "stop_tokens = -1 must be 0 or more"),
        ({"stop": ["a", ""]}, "stop must not contain an empty string"),
        ({"stop": "end"}, "stop = 'end' does not fit: it must be a list of strings"),
        ({"max_tokens": True}, "max_tokens = True does not fit: it must be a whole number"),
        ({"seed": 2**63}, f"seed = {2**63} must lie in [-2^63, 2^63)"),
        ({"seed": -(2**63) - 1}, "must lie in"),
    ],
)
def test_bad_params_are_refused_by_name(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SamplingParams(**changes)
    assert sentence in str(caught.value)
