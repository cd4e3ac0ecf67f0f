"""Drawing in fixed shapes matches `sample`, row by row."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthmix.infer.paths.draw import TorchDrawer
from depthmix.infer.sampling import SamplingParams, pack_settings, sample, unpack_settings

VOCABULARY = 23
DEVICE = torch.device("cpu")

# as fields, not objects: run-time type checking draws random numbers of its own
fields = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.5, 1.0]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.7]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.6]),
        "presence_penalty": st.sampled_from([0.0, -0.8]),
    }
)
batches = st.lists(st.lists(fields, min_size=1, max_size=6), min_size=1, max_size=5)


def make_rows(count: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, VOCABULARY, generator=generator).mul(3).to(dtype))


def make_seen(params: list[SamplingParams], seed: int) -> list[Tensor | None]:
    rows = make_rows(len(params), seed + 1)
    pairs = zip(rows, params, strict=True)
    return [row.clamp(min=0).int() if wish.penalizes else None for row, wish in pairs]


def draw_alone(
    logits: Tensor, wish: SamplingParams, seed: int, step: int, seen: Tensor | None
) -> tuple[int, float]:
    settings = unpack_settings(*pack_settings([wish], [seed], [step]))
    drawn = sample(logits[None], settings, None if seen is None else seen[None])
    return int(drawn.token), float(drawn.logprob)


@pytest.mark.parametrize("record", [False, True])
@given(batches, st.integers(0, 9))
def test_rows_are_drawn_as_if_alone(
    record: bool, calls: list[list[dict[str, Any]]], seed: int
) -> None:
    drawer = TorchDrawer(VOCABULARY, DEVICE, record=record)
    # in sequence: leftovers of earlier calls in a cached step must not matter
    for number, wishes in enumerate(calls):
        params = [SamplingParams(**wish) for wish in wishes]
        logits, seen = make_rows(len(params), seed + 10 * number), make_seen(params, seed + number)
        seeds, steps = range(seed, seed + len(params)), [number] * len(params)
        tokens, logprobs = drawer.draw(logits, params, seeds, steps, seen)
        rows = zip(logits, params, seeds, steps, seen, strict=True)
        expected = [draw_alone(*row) for row in rows]
        assert tokens == [token for token, _ in expected]
        assert logprobs == pytest.approx([logprob for _, logprob in expected])


def test_few_sizes_are_kept() -> None:
    drawer, wish = TorchDrawer(VOCABULARY, DEVICE, record=True), SamplingParams()
    for count in (1, 2, 3, 4, 5, 3):
        drawer.draw(make_rows(count, 0), [wish] * count, [0] * count, [0] * count, [None] * count)
    assert list(drawer.steps) == [(n, False, False) for n in (1, 2, 4, 8)]
    drawer = TorchDrawer(VOCABULARY, DEVICE, record=False)
    drawer.draw(make_rows(2, 0), [wish] * 2, [0] * 2, [0] * 2, [None] * 2)
    assert drawer.steps == {}


def test_logits_of_any_type() -> None:
    drawer, wish = TorchDrawer(VOCABULARY, DEVICE, record=True), SamplingParams(top_k=5)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        (row,) = make_rows(1, 3, dtype)
        tokens, logprobs = drawer.draw([row], [wish], [5], [2], [None])
        token, logprob = draw_alone(row, wish, 5, 2, None)
        assert (tokens, logprobs) == ([token], [pytest.approx(logprob)])
