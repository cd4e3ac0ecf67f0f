"""A trace says what the model itself decides, window by window, and loses nothing of the text."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthmix.data.tokenizer import load_tokenizer, train_tokenizer
from depthmix.eval.trace import (
    cut_text,
    measure_predictions,
    trace_model,
    trace_tokens,
)
from depthmix.infer.scores import CHUNK_TOKENS
from depthmix.models import Vocabulary, open_model
from depthmix.nn import Transformer
from depthmix.report.traces import check_trace
from text_runs import write_text_run
from variants import causal_selectors, make_config, make_model, make_tokens

ROUTED = ("mod", "mod_first_tokens", "mod_kv", "token_choice", "early_exit", "mode_staged")


def small_model(name: str, **overrides: object) -> Transformer:
    config = make_config(name, max_seq_len=16, **overrides)
    return make_model(config, dtype=torch.float32)


@pytest.mark.parametrize("name", ROUTED)
def test_decisions_are_the_models_own(name: str) -> None:
    model = small_model(name)
    tokens = [t % 63 + 1 for t in make_tokens(model.config, 40).tolist()]
    trace = trace_tokens(model, tokens, end_token=0)
    stream = [0, *tokens]
    assert trace["tokens"] == stream
    assert (trace["num_added"], trace["window_starts"]) == (1, [0, 16, 32])
    assert set(trace["rules"]) == {"topk", "causal"}
    for rule in trace["rules"].values():
        selector = rule["selector"]
        assert selector in causal_selectors(model.config) or selector is None
        for start in trace["window_starts"]:
            here = slice(start, start + 16)
            with torch.inference_mode():
                output = model(torch.tensor([stream[here]]), selector=selector)
            for layer, block, routing in zip(
                model.config.routed_layers, rule["blocks"], output.routings, strict=True
            ):
                assert block["layer"] == layer
                kept = {int(i) for i in routing.index[0][routing.valid[0]]}
                wanted = [int(i in kept) for i in range(len(stream[here]))]
                assert block["routed"][here] == wanted
                assert block["score"][here] == pytest.approx(routing.logits[0].tolist(), abs=1e-4)
                if routing.predictor_logits is None:
                    assert block["predictor"] is None
                else:
                    told = routing.predictor_logits[0].tolist()
                    assert block["predictor"][here] == pytest.approx(told, abs=1e-4)
            log = output.logits[0].double().log_softmax(-1)
            spread = torch.distributions.Categorical(logits=log).entropy()
            assert rule["entropy"][here] == pytest.approx(spread.tolist(), abs=1e-3)
            # the last token of a window is followed by the first of the next
            missed = [-float(log[i, t]) for i, t in enumerate(stream[start + 1 : start + 17])]
            found = [value for value in rule["loss"][here] if value is not None]
            assert found == pytest.approx(missed, abs=1e-3)
        assert rule["loss"][-1] is None
        assert None not in rule["loss"][:-1]


def test_rules_are_distinguished() -> None:
    trace = trace_tokens(small_model("mod"), list(range(1, 33)))
    topk, causal = (trace["rules"][name] for name in ("topk", "causal"))
    assert (topk["label"], topk["selector"]) == ("top-k", None)
    assert (causal["label"], causal["selector"]) == ("causal", "predictor")
    assert topk["blocks"] != causal["blocks"]
    # a quarter of each window of 16 tokens, whatever the scores
    assert [sum(block["routed"]) for block in topk["blocks"]] == [8] * len(topk["blocks"])
    assert trace["num_added"] == 0


def test_progress_counts_the_tokens_of_both_rules() -> None:
    model, told = small_model("mod"), []
    length = model.config.max_seq_len
    tokens = [1] * (2 * length + 3)
    trace_tokens(model, tokens, report=lambda *counts: told.append(counts))
    total = 2 * len(tokens)
    ends = [length, 2 * length, len(tokens)]
    assert told == [(end + before, total) for before in (0, len(tokens)) for end in ends]


def test_strategy_without_causal_head_has_one_rule() -> None:
    for overrides in ({"routing.strategy": "stochastic"}, {"routing.predictor": False}):
        trace = trace_tokens(small_model("mod", **overrides), [1, 2, 3])
        assert list(trace["rules"]) == ["topk"]


def test_an_end_token_inside_begins_a_document() -> None:
    model = small_model("mod")
    tokens = [5, 6, 7, 0, 8, 9]
    documents = torch.tensor([[1, 1, 1, 1, 2, 2, 2]])
    for mask in (True, False):
        trace = trace_tokens(model, tokens, end_token=0, document_mask=mask)
        with torch.inference_mode():
            ids = documents if mask else None
            output = model(torch.tensor([[0, *tokens]]), document_ids=ids)
        told = trace["rules"]["topk"]["blocks"][-1]["score"]
        assert told == pytest.approx(output.routings[-1].logits[0].tolist(), abs=1e-4)
    # a text that begins with it is not begun twice
    assert trace_tokens(model, [0, 5], end_token=0)["num_added"] == 0


def test_predictions_are_measured_in_parts() -> None:
    model = small_model("mod")
    hidden = torch.randn(CHUNK_TOKENS + 5, model.config.width)
    targets = torch.randint(64, (CHUNK_TOKENS + 4,))
    with torch.inference_mode():
        spread, missed = measure_predictions(model, hidden, targets)
        logits = model.head(hidden)
    loss = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
    torch.testing.assert_close(missed, loss)
    assert spread.shape == (CHUNK_TOKENS + 5,)
    assert float(spread.min()) > 0
    assert float(spread.max()) <= math.log(64) + 1e-4


@settings(max_examples=50)
@given(st.text(st.sampled_from("ab \né€𝄞"), min_size=1, max_size=40))
def test_texts_join_to_the_text(text: str) -> None:
    tokenizer = train_tokenizer(["ab a b"], 260, parallel=False)
    vocabulary = Vocabulary(tokenizer, None)
    ids = vocabulary.tokenize(text)
    pieces = cut_text(vocabulary.decode, ids)
    assert "".join(pieces) == text
    assert len(pieces) == len(ids)
    # cut inside a character, too
    short = cut_text(vocabulary.decode, ids[:-1])
    assert "".join(short) == tokenizer.decode(ids[:-1], skip_special_tokens=False)


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(ValueError, match="a text that is not empty"):
        trace_tokens(small_model("mod"), [])
    with pytest.raises(ValueError, match="has no routed block"):
        trace_tokens(small_model("dense"), [1])
    with pytest.raises(ValueError, match="gives token 64, but the model has 64"):
        trace_tokens(small_model("mod"), [1, 64])


def test_a_model_that_diverged_is_refused() -> None:
    model = small_model("mod")
    with torch.no_grad():
        model.head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="its training diverged; choose another --checkpoint"):
        trace_tokens(model, [1, 2])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("trace"))


def test_a_checkpoint_is_traced_with_words(run: Path) -> None:
    tokenizer = load_tokenizer(run.with_name("data"))
    words = "line 12 says 144 and née 𝄞\n" * 4
    place = run / "checkpoints" / "step-00000002"
    trace = trace_model(open_model(place), words, text="here", device="cpu")
    check_trace(trace, "this")
    assert "".join(trace["texts"]) == words
    assert trace["texts"][0] == ""
    assert len(trace["window_starts"]) > 1
    again = trace_tokens(open_model(place).network, tokenizer.encode(words).ids, 0)
    assert again == {key: value for key, value in trace.items() if key not in ("origin", "texts")}
    short = trace_model(open_model(place), words, text="here", max_tokens=3, device="cpu")
    assert len(short["tokens"]) == 4
    assert words.startswith("".join(short["texts"]))


def test_a_trace_says_where_it_comes_from(run: Path) -> None:
    words = "line 12 says 144\n"
    for model in (
        open_model(run, checkpoint="2"),
        open_model(run / "checkpoints" / "step-00000002"),
    ):
        trace = trace_model(model, words, text="a letter", device="cpu")
        check_trace(trace, "this")
        assert "".join(trace["texts"]) == words
        origin = trace["origin"]
        assert (origin["run"], origin["text"]) == (str(run), "a letter")
        assert (origin["checkpoint"], origin["device"]) == ("step-00000002", "cpu")
        assert "torch" in origin["versions"]
    short = trace_model(open_model(run), words, text="a letter", max_tokens=3, device="cpu")
    assert len(short["tokens"]) - short["num_added"] == 3


def test_missing_gpu_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is visible"):
        trace_model(open_model(run), "words", text="a letter", device="cuda")
    assert trace_model(open_model(run), "words", text="a letter")["origin"]["device"] == "cpu"


def test_empty_text_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="there are no tokens to trace"):
        trace_model(open_model(run), "", text="a letter", device="cpu")
