"""The reference kernels against plain Python: sorting lists, looping over tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthmix.kernels import reference
from variants import rotate_by_hand


def sort_by_hand(scores: list[float], count: int) -> list[int]:
    """Positions of the `count` largest scores, ties to the earlier one, ascending."""
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return sorted(ranked[:count])


@st.composite
def score_rows(draw: st.DrawFn) -> tuple[list[list[float]], int, list[int] | None]:
    batch, length = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    # few distinct values, so that ties are the rule
    value = st.sampled_from([-1.5, -0.0, 0.0, 1.0, 2.0, float("inf"), -float("inf")])
    row = st.lists(value, min_size=length, max_size=length)
    scores = draw(st.lists(row, min_size=batch, max_size=batch))
    num_kept = draw(st.integers(1, length))
    counts = st.lists(st.integers(0, num_kept), min_size=batch, max_size=batch)
    return scores, num_kept, draw(st.none() | counts)


@given(score_rows(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_select_topk_equals_a_sorted_list(
    case: tuple[list[list[float]], int, list[int] | None], dtype: torch.dtype
) -> None:
    scores, num_kept, counts = case
    given_counts = None if counts is None else torch.tensor(counts)
    index, slot = reference.select_topk(torch.tensor(scores, dtype=dtype), num_kept, given_counts)
    assert index.shape == (len(scores), num_kept)
    for number, row in enumerate(scores):
        count = num_kept if counts is None else counts[number]
        expected = sort_by_hand(row, count)
        assert index[number, :count].tolist() == expected
        by_hand = [expected.index(i) if i in expected else -1 for i in range(len(row))]
        assert slot[number].tolist() == by_hand
        # the rest are other tokens: no index appears twice, so a scatter never collides
        assert len(set(index[number].tolist())) == num_kept


def test_select_topk_keeps_exactly_k_of_equal_scores() -> None:
    index, slot = reference.select_topk(torch.zeros(2, 2048, dtype=torch.bfloat16), 256)
    assert torch.equal(index, torch.arange(256).expand(2, -1))
    assert (slot >= 0).sum(dim=1).tolist() == [256, 256]


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4), st.data())
def test_pack_tokens_puts_the_kept_first(kept: list[list[bool]], data: st.DataObject) -> None:
    num_places = data.draw(st.integers(1, 7))
    index, slot = reference.pack_tokens(torch.tensor(kept), num_places)
    for number, row in enumerate(kept):
        chosen = [i for i, keep in enumerate(row) if keep]
        others = [i for i, keep in enumerate(row) if not keep]
        assert index[number].tolist() == [*chosen, *others][:num_places]
        placed = chosen[:num_places]
        assert slot[number].tolist() == [placed.index(i) if i in placed else -1 for i in range(7)]


def make_case(batch: int, length: int, places: int, width: int) -> tuple[Tensor, ...]:
    x = torch.randn(batch, length, width, dtype=torch.float64, requires_grad=True)
    update = torch.randn(batch, places, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(batch, places, dtype=torch.float64, requires_grad=True)
    counts = torch.randint(0, places + 1, (batch,))
    index, slot = reference.select_topk(torch.randn(batch, length), places, counts)
    return x, update, weight, index, slot, counts


def test_gather_equals_a_loop_and_empty_places_pass_no_gradient() -> None:
    x, _, _, index, slot, counts = make_case(3, 9, 5, 4)
    taken, rest = reference.gather_tokens(x, index, slot)
    assert rest is x
    for row in range(3):
        for place in range(5):
            assert torch.equal(taken[row, place], x[row, index[row, place]])
    taken.backward(torch.ones_like(taken))
    assert x.grad is not None
    assert torch.equal(x.grad[..., 0], (slot >= 0).double())
    assert int(x.grad[..., 0].sum()) == int(counts.sum())


def test_scatter_add_equals_a_loop() -> None:
    x, update, weight, index, slot, counts = make_case(3, 9, 5, 4)
    expected = x.detach().clone()
    for row in range(3):
        for place in range(int(counts[row])):
            expected[row, index[row, place]] += (weight[row, place] * update[row, place]).detach()
    summed = reference.scatter_add_tokens(x, update, weight, index, slot)
    torch.testing.assert_close(summed, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_scatter_add_ignores_what_stands_in_empty_places(poison: float) -> None:
    x, update, weight, index, slot, counts = make_case(3, 9, 5, 4)
    empty = torch.arange(5)[None] >= counts[:, None]
    assert empty.any()
    dirty = update.detach().masked_fill(empty[:, :, None], poison)
    clean = reference.scatter_add_tokens(x, update, weight, index, slot)
    assert torch.equal(reference.scatter_add_tokens(x, dirty, weight, index, slot), clean)


def test_scatter_add_gradients_are_right() -> None:
    x, update, weight, index, slot, _ = make_case(2, 5, 3, 2)
    assert torch.autograd.gradcheck(
        lambda x, u, w: reference.scatter_add_tokens(x, u, w, index, slot), (x, update, weight)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scatter_add_keeps_the_residual_dtype(dtype: torch.dtype) -> None:
    x, update, weight, index, slot, _ = make_case(2, 5, 3, 2)
    summed = reference.scatter_add_tokens(
        x.to(dtype), update.to(dtype), weight.float(), index, slot
    )
    assert summed.dtype == dtype


def make_phase(positions: list[int], width: int) -> Tensor:
    """Cosines and sines of angles that differ from pair to pair."""
    angles = torch.tensor(positions)[:, None] * 10.0 ** -torch.arange(width // 2)
    return torch.stack([angles.double().cos(), angles.double().sin()], dim=1)[None]


def test_rotation_is_a_complex_product() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    phase = make_phase([0, 1, 5, 9, 10], 8)
    expected = rotate_by_hand(x, phase)
    torch.testing.assert_close(reference.rotate_heads(x, phase), expected, rtol=0, atol=1e-14)
    query, key = reference.rotate_split(x, phase, 2)
    torch.testing.assert_close(query, expected[:, :, :2], rtol=0, atol=1e-14)
    torch.testing.assert_close(key, expected[:, :, 2:], rtol=0, atol=1e-14)


def test_rotated_products_depend_on_the_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(at_query: int, at_key: int) -> float:
        turned = [
            reference.rotate_heads(x, make_phase([at], 8))
            for x, at in ((query, at_query), (key, at_key))
        ]
        return (turned[0] * turned[1]).sum().item()

    # the angles were rounded to float32
    assert product(9, 4) == pytest.approx(product(45, 40), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_rotation_in_bf16_is_rounded_once() -> None:
    x, phase = torch.randn(2, 5, 3, 8).bfloat16(), make_phase([0, 1, 5, 9, 10], 8).float()
    expected = reference.rotate_heads(x.float(), phase).bfloat16()
    assert torch.equal(reference.rotate_heads(x, phase), expected)
