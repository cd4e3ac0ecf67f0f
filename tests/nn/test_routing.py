"""The strategies against plain Python: who is kept, in which order, and by what gate."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthmix.config import GATES, STRATEGIES
from depthmix.nn.routing import (
    RULES,
    Candidates,
    Kept,
    Routing,
    apply_gate,
    causal,
    expert_choice,
    keep_all,
    stochastic,
    survivors,
    token_choice,
)

Rows = list[list[bool]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, float, Candidates]:
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 10))

    def draw_mask() -> Tensor | None:
        row = st.lists(st.booleans(), min_size=length, max_size=length)
        rows = draw(st.none() | st.lists(row, min_size=batch, max_size=batch))
        return None if rows is None else torch.tensor(rows)

    value = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])
    scores = [[draw(value) for _ in range(length)] for _ in range(batch)]
    capacity = draw(st.sampled_from([0.07, 0.125, 0.3, 0.5, 0.7, 1.0]))
    masks = Candidates(present=draw_mask(), forced=draw_mask(), alive=draw_mask())
    return torch.tensor(scores), capacity, masks


def list_mask(mask: Tensor | None, like: Tensor, default: bool) -> Rows:
    return torch.full_like(like, default).bool().tolist() if mask is None else mask.tolist()


def count_places(capacity: float, num_tokens: int) -> int:
    # capacities are short decimals, so that ceil of the exact product is meant
    return math.ceil(round(capacity * 1000) * num_tokens / 1000)


def check_kept(kept: Kept, expected: list[list[int]], num_places: int) -> None:
    """`expected` first, ascending; then other tokens; `slot` the inverse."""
    batch, length = kept.slot.shape
    assert kept.index.shape == (batch, num_places)
    for row, tokens in enumerate(expected):
        count = len(tokens)
        assert kept.index[row, :count].tolist() == tokens
        assert len(set(kept.index[row].tolist())) == num_places
        taken = [place < count for place in range(num_places)]
        assert taken == ([True] * num_places if kept.valid is None else kept.valid[row].tolist())
        inverse = [tokens.index(t) if t in tokens else -1 for t in range(length)]
        assert kept.slot[row].tolist() == inverse


@settings(max_examples=200)
@given(cases())
def test_expert_choice_equals_a_sorted_list(case: tuple[Tensor, float, Candidates]) -> None:
    scores, capacity, candidates = case
    present = list_mask(candidates.present, scores, True)
    alive = list_mask(candidates.alive, scores, True)
    forced = list_mask(candidates.forced, scores, False)
    expected = []
    for row in range(scores.shape[0]):
        tokens = [t for t in range(scores.shape[1]) if present[row][t] and alive[row][t]]
        tokens.sort(key=lambda t, row=row: (not forced[row][t], -scores[row, t].item(), t))
        # forced tokens are all alike: the earlier ones go first
        tokens.sort(key=lambda t, row=row: t if forced[row][t] else math.inf)
        expected.append(sorted(tokens[: count_places(capacity, sum(present[row]))]))
    kept = expert_choice(scores, capacity, candidates)
    check_kept(kept, expected, count_places(capacity, scores.shape[1]))


@settings(max_examples=200)
@given(cases(), st.sampled_from([0.0, 0.125, 0.3]))
def test_token_choice_takes_positive_scores_in_order(
    case: tuple[Tensor, float, Candidates], reserved: float
) -> None:
    scores, capacity, candidates = case
    reserved = min(reserved, capacity)
    present = list_mask(candidates.present, scores, True)
    alive = list_mask(candidates.alive, scores, True)
    forced = list_mask(candidates.forced, scores, False)
    expected = []
    for row in range(scores.shape[0]):
        places = count_places(capacity, sum(present[row]))
        room = places - count_places(reserved, sum(present[row]))
        taken: list[int] = []
        others = 0
        for t in range(scores.shape[1]):
            if not (present[row][t] and alive[row][t]) or len(taken) == places:
                continue
            if forced[row][t]:
                taken.append(t)
            elif scores[row, t] > 0 and (others < room or candidates.forced is None):
                taken.append(t)
                others += 1
        expected.append(taken)
    kept = token_choice(scores, capacity, candidates._replace(reserved=reserved))
    check_kept(kept, expected, count_places(capacity, scores.shape[1]))


def test_reserved_places_are_counted_exactly() -> None:
    """0.07 · 100 is 7 places: three wait for the last tokens, four go to the first."""
    forced = torch.arange(100)[None] >= 97
    kept = token_choice(torch.ones(1, 100), 0.07, Candidates(forced=forced, reserved=0.03))
    assert kept.index.tolist() == [[0, 1, 2, 3, 97, 98, 99]]


@given(cases(), st.booleans())
def test_causal_takes_every_positive_score(
    case: tuple[Tensor, float, Candidates], everyone: bool
) -> None:
    scores, _, candidates = case
    present = list_mask(candidates.present, scores, True)
    alive = list_mask(candidates.alive, scores, True)
    forced = list_mask(candidates.forced, scores, False)
    expected = [
        [
            t
            for t in range(scores.shape[1])
            if present[row][t]
            and alive[row][t]
            and (forced[row][t] or scores[row, t] > 0 or everyone)
        ]
        for row in range(scores.shape[0])
    ]
    rule: Callable[[Tensor, Candidates], Kept] = keep_all if everyone else causal
    check_kept(rule(scores, candidates), expected, scores.shape[1])


def test_causal_skips_a_single_token_with_a_negative_score() -> None:
    kept = causal(torch.tensor([[-1.0], [0.0], [1.0]]), Candidates())
    assert (kept.slot >= 0).tolist() == [[False], [False], [True]]
    assert kept.valid is not None
    assert kept.valid.tolist() == [[False], [False], [True]]


@pytest.mark.parametrize("capacity", [0.07, 0.125, 0.3, 1.0])
@pytest.mark.parametrize("length", [1, 7, 8, 100])
def test_padded_rows_count_their_real_tokens(capacity: float, length: int) -> None:
    """ceil(C·T) with exact decimals: 0.07 · 100 is 7, not 8."""
    expected = count_places(capacity, length)
    alone = expert_choice(torch.randn(1, length), capacity, Candidates())
    assert alone.index.shape[1] == expected
    present = torch.arange(length + 3)[None] < length
    padded = expert_choice(torch.randn(1, length + 3), capacity, Candidates(present=present))
    assert int((padded.slot >= 0).sum()) == expected


def test_stochastic_depends_on_the_seed_only() -> None:
    scores = torch.arange(64.0).expand(2, -1)
    torch.manual_seed(5)
    first, second = stochastic(scores, 0.25, Candidates()), stochastic(scores, 0.25, Candidates())
    torch.manual_seed(5)
    again = stochastic(scores, 0.25, Candidates())
    assert torch.equal(first.index, again.index)
    assert not torch.equal(first.index, second.index)
    assert not torch.equal(first.index[0], first.index[1])
    assert first.index.shape == (2, 16)
    # top-k of the scores would be the last 16
    assert (first.index < 48).any()


def test_stochastic_is_uniform() -> None:
    torch.manual_seed(0)
    kept = stochastic(torch.zeros(4000, 8), 0.25, Candidates())
    share = (kept.slot >= 0).double().mean(dim=0)
    # four standard deviations of a share of 4,000
    assert (share - 0.25).abs().max() < 4 * math.sqrt(0.25 * 0.75 / 4000)


def make_routing(kept: Kept, scores: Tensor) -> Routing:
    weight, valid = torch.ones_like(kept.index).float(), torch.ones_like(kept.index).bool()
    return Routing(kept.index, weight, valid, scores, None, kept.slot, None, None)


@settings(max_examples=50)
@given(st.integers(0, 2**16), st.booleans())
def test_early_exit_sets_nest(seed: int, padded: bool) -> None:
    made = torch.Generator().manual_seed(seed)
    present = torch.rand(3, 16, generator=made) < 0.7 if padded else None
    candidates, previous, before = Candidates(present=present), None, None
    for capacity in (0.8, 0.5, 0.5, 0.2):
        scores = torch.randn(3, 16, generator=made)
        kept = expert_choice(scores, capacity, survivors(candidates, previous))
        inside = kept.slot >= 0
        for row in range(3):
            num_real = 16 if present is None else int(present[row].sum())
            assert int(inside[row].sum()) == count_places(capacity, num_real)
        if before is not None:
            assert not (inside & ~before).any()
            # the rest are chosen by this block's own scores
            best = scores.masked_fill(~before, -math.inf)
            for row in range(3):
                if inside[row].any() and (before & ~inside)[row].any():
                    left_out = best[row][(before & ~inside)[row]].max()
                    assert best[row][inside[row]].min() >= left_out
        previous, before = make_routing(kept, scores), inside


def test_without_a_previous_block_all_candidates_survive() -> None:
    candidates = Candidates(present=torch.tensor([[True, False]]))
    assert survivors(candidates, None) is candidates
    assert candidates.mask() is candidates.present
    assert Candidates().mask() is None
    alive = torch.tensor([[True, True]])
    assert Candidates(alive=alive).mask() is alive
    both = Candidates(present=candidates.present, alive=alive).mask()
    assert both is not None
    assert both.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("gate", "expected", "slope"),
    [
        ("raw", lambda r: r, lambda r: 1.0),
        (
            "sigmoid",
            lambda r: 1 / (1 + math.exp(-r)),
            lambda r: math.exp(-r) / (1 + math.exp(-r)) ** 2,
        ),
        ("tanh1", lambda r: 1 + math.tanh(r), lambda r: 1 - math.tanh(r) ** 2),
        ("unit", lambda r: 1.0, lambda r: 0.0),
    ],
)
def test_gates_by_hand(
    gate: str, expected: Callable[[float], float], slope: Callable[[float], float]
) -> None:
    values = [-2.0, -0.1, 0.0, 0.7, 3.0]
    scores = torch.tensor([values], dtype=torch.float64, requires_grad=True)
    weight = apply_gate(gate, scores)
    assert weight[0].tolist() == pytest.approx([expected(r) for r in values], abs=1e-15)
    if gate == "unit":
        assert not weight.requires_grad
        return
    weight.sum().backward()
    assert scores.grad is not None
    assert scores.grad[0].tolist() == pytest.approx([slope(r) for r in values], abs=1e-15)


def test_every_gate_has_its_formula() -> None:
    scores = torch.tensor([[-0.5, 0.0, 2.0]], dtype=torch.float64)
    names = {"exp": math.exp, "tanh": math.tanh}
    for name, rule in GATES.items():
        values = [eval(rule.formula, {**names, "r": r}) for r in scores[0].tolist()]
        assert apply_gate(name, scores)[0].tolist() == pytest.approx(values), name
        assert values[1] == rule.at_zero, name
        assert (len(set(values)) == 1) == rule.is_constant, name


def test_unknown_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown gate 'softmax'"):
        apply_gate("softmax", torch.zeros(1, 1))


def test_every_routing_strategy_has_a_rule() -> None:
    assert set(RULES) == set(STRATEGIES) - {"none"}
