"""A run and some words give a trace that says where it comes from."""

import pytest
import torch

from depthmix.report.traces import check_trace
from depthmix.rundir import RunDir
from depthmix.tracing import trace_run
from text_runs import write_text_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return RunDir.open(write_text_run(tmp_path_factory.mktemp("tracing")))


def test_a_trace_says_where_it_comes_from(run: RunDir) -> None:
    words = "line 12 says 144\n"
    trace = trace_run(run, words, text="a letter", checkpoint="2", device="cpu")
    check_trace(trace, "this")
    assert "".join(trace["texts"]) == words
    origin = trace["origin"]
    assert (origin["run"], origin["text"]) == (str(run.path), "a letter")
    assert (origin["checkpoint"], origin["device"]) == ("step-00000002", "cpu")
    assert "torch" in origin["versions"]
    short = trace_run(run, words, text="a letter", max_tokens=3, device="cpu")
    assert len(short["tokens"]) - short["num_added"] == 3


def test_a_gpu_that_is_not_there(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is visible"):
        trace_run(run, "words", text="a letter", device="cuda")
    assert trace_run(run, "words", text="a letter")["origin"]["device"] == "cpu"


def test_words_and_checkpoint_must_be_there(run: RunDir) -> None:
    with pytest.raises(ValueError, match="there is no token to trace"):
        trace_run(run, "", text="a letter", device="cpu")
    with pytest.raises(ValueError, match="has no checkpoint '7'"):
        trace_run(run, "words", text="a letter", checkpoint="7", device="cpu")
