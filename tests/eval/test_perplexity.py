"""Losses of a text equal those of one window at a time, however windows are batched."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthmix import flops
from depthmix.eval.perplexity import measure_stream, score_rows
from depthmix.eval.stream import Stream, cut_windows, pad_rows
from depthmix.eval.trace import trace_tokens
from depthmix.nn import Transformer
from variants import enlarge_updates, make_config

pytestmark = pytest.mark.slow

END = 0


def make_model(name: str) -> Transformer:
    torch.manual_seed(0)
    model = enlarge_updates(Transformer(make_config(name, max_seq_len=16))).eval()
    with torch.no_grad():
        # far from uniform, so that tokens matter
        model.norm.weight.mul_(20)
    return model


def make_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 64, (count,), generator=generator)
    tokens[::11] = END
    return tokens.tolist()


def make_distinct_tokens(count: int) -> list[int]:
    """No token twice in a window.

    Before the first attention equal tokens have equal scores. Which of them top-k keeps is then
    decided by the rounding of a product, which depends on its shape.
    """
    order = 1 + torch.randperm(63, generator=torch.Generator().manual_seed(0))
    tokens = order.repeat(count // 63 + 1)[:count]
    tokens[::17] = END
    return tokens.tolist()


@pytest.mark.parametrize("name", ["mod", "mod_aux", "token_choice"])
def test_losses_are_those_of_a_trace(name: str) -> None:
    model, tokens = make_model(name), make_tokens(75)
    found = measure_stream(model, Stream(tokens, 150, END), batch_size=3)
    trace = trace_tokens(model, tokens, END)
    assert found["rules"].keys() == trace["rules"].keys()
    for rule, told in found["rules"].items():
        losses = [loss for loss in trace["rules"][rule]["loss"] if loss is not None]
        assert len(losses) == found["num_tokens"] == 74
        mean = sum(losses) / 74
        assert told["loss"] == pytest.approx(mean, abs=1e-4)
        assert told["perplexity"] == pytest.approx(math.exp(mean), rel=1e-3)
        assert told["bits_per_byte"] == pytest.approx(mean * 74 / math.log(2) / 150, abs=1e-3)
        blocks = [block["routed"] for block in trace["rules"][rule]["blocks"]]
        share = sum(map(sum, blocks)) / sum(map(len, blocks))
        assert told["share_routed"] == pytest.approx(share, abs=1e-9)


@settings(max_examples=25)
@given(
    st.sampled_from(["dense", "mod", "mod_first_tokens", "early_exit"]),
    st.integers(2, 80),
    st.integers(1, 16),
    st.integers(2, 9),
)
def test_batch_size_does_not_change_a_score(
    name: str, count: int, seq_len: int, batch_size: int
) -> None:
    model, stream = make_model(name), Stream(make_distinct_tokens(count), None, END)
    alone = measure_stream(model, stream, seq_len=seq_len, batch_size=1)
    together = measure_stream(model, stream, seq_len=seq_len, batch_size=batch_size)
    assert alone["rules"].keys() == together["rules"].keys()
    for rule, told in alone["rules"].items():
        assert together["rules"][rule]["loss"] == pytest.approx(told["loss"], abs=1e-4)
        assert together["rules"][rule]["share_routed"] == told["share_routed"]
        assert told["bits_per_byte"] is None


@pytest.mark.parametrize("selector", [None, "predictor"])
def test_the_length_of_other_rows_does_not_change_a_score(selector: str | None) -> None:
    model = make_model("mod")
    (short,) = cut_windows(make_tokens(6), 16, None)
    (long,) = cut_windows(make_tokens(16, seed=1), 16, None)
    device = torch.device("cpu")
    alone, best, _ = score_rows(model, pad_rows([short], device), selector)
    both, others, _ = score_rows(model, pad_rows([short, long], device), selector)
    torch.testing.assert_close(both[0, :5], alone[0, :5], rtol=0, atol=1e-4)
    assert torch.equal(others[0, :5], best[0, :5])
    assert not both[0, 5:].any()
    assert both[1, :15].all()


def test_documents_are_separate_by_default() -> None:
    model, stream = make_model("dense"), Stream(make_tokens(60), None, END)
    apart = measure_stream(model, stream)["rules"]["dense"]["loss"]
    joined = measure_stream(model, stream, document_mask=False)["rules"]["dense"]["loss"]
    assert apart != pytest.approx(joined, abs=1e-3)


def test_compute_is_reported() -> None:
    model = make_model("mod")
    found = measure_stream(model, Stream(make_tokens(40), None, None), seq_len=8)
    dense = flops.forward_flops(model.config.dense_twin(), seq_len=8)
    assert found["seq_len"] == 8
    assert found["flops_of_dense"] == flops.forward_flops(model.config, seq_len=8) / dense
    assert measure_stream(model, Stream([1, 2], None, None), seq_len=999)["seq_len"] == 16


@pytest.mark.parametrize(
    ("tokens", "options", "told"),
    [
        ([1], {}, "at least two tokens"),
        ([1, 64], {}, "has token 64, but the model has 64"),
        ([1, 2], {"batch_size": 0}, "batch_size = 0"),
        ([1, 2], {"seq_len": -1}, "seq_len = -1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tokens: list[int], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        measure_stream(make_model("dense"), Stream(tokens, None, None), **options)
