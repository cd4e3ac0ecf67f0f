"""A model on disk, measured by one call: the same numbers as its parts give."""

from pathlib import Path
from typing import Any

import pytest

from depthmix.eval.evaluate import describe_results, evaluate_model
from depthmix.eval.options import EvalOptions
from depthmix.eval.perplexity import measure_stream
from depthmix.eval.stream import read_stored, read_texts
from depthmix.models import open_model
from text_runs import write_text_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("evaluate"))


def test_text_and_data_are_measured(run: Path) -> None:
    model, text = open_model(run), "line 3 says 9 and no more\n"
    options = EvalOptions(texts=iter([text]), seq_len=16, batch_size=2)
    found = evaluate_model(model, options, device="cpu")
    stream = read_texts([text], model.vocabulary)
    assert found["text"] == measure_stream(model.network, stream, seq_len=16, batch_size=2)
    assert found["model"] == str(run)
    first, *rest = describe_results(found)
    assert first.startswith(f"{run}: {found['text']['num_tokens']} tokens")
    assert len(rest) == len(found["text"]["rules"])
    own = evaluate_model(model, EvalOptions(), device="cpu")
    assert own["text"] == measure_stream(model.network, read_stored(model))


def test_refusals_come_before_the_weights_are_read(run: Path) -> None:
    model = open_model(next((run / "checkpoints").glob("step-*")))
    with pytest.raises(ValueError, match=r"--keep is for a run, and .*step-"):
        evaluate_model(model, EvalOptions(test=True, keep=True), device="cpu")
    with pytest.raises(ValueError, match="has no chat template"):
        evaluate_model(model, EvalOptions(tasks=["x"], chat=True), device="cpu")
    pytest.importorskip("lm_eval")
    with pytest.raises(ValueError, match="unknown selector 'magic'"):
        evaluate_model(model, EvalOptions(tasks=["x"], selector="magic"), device="cpu")
    with pytest.raises(ValueError, match="there is no task 'nothing_such'"):
        evaluate_model(model, EvalOptions(tasks=["nothing_such"]), device="cpu")
    assert "network" not in vars(model)


def test_tasks_are_scored_by_the_selector_that_was_chosen(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = pytest.importorskip("depthmix.eval.tasks", exc_type=ImportError)
    used: list[str | None] = []
    original = tasks.TaskModel.loglikelihood

    def spy(self: Any, requests: Any, **options: Any) -> Any:
        used.append(self.selector)
        return original(self, requests, **options)

    monkeypatch.setattr(tasks.TaskModel, "loglikelihood", spy)
    for selector, wanted in ((None, "predictor"), ("router", "router"), ("topk", "topk")):
        options = EvalOptions(tasks=["python_syntax"], limit=1, selector=selector)
        assert evaluate_model(open_model(run), options, device="cpu")["selector"] == wanted
        assert used.pop() == wanted
