"""A model on disk takes text and gives text, and knows how long that took."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import depthmix
from depthmix.cli import main
from depthmix.infer import Result, SamplingParams
from depthmix.models import open_model
from depthmix.sample import start_sampler
from text_runs import write_text_run

GREEDY = SamplingParams(max_tokens=5, temperature=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("sampler"))


def test_sampler_takes_and_gives_text(run: Path) -> None:
    sampler = start_sampler(open_model(run), device="cpu", max_batch=2)
    prompts = [sampler.vocabulary.encode("line 1"), sampler.vocabulary.encode("")]
    assert prompts[0][0] == 0
    assert prompts[1] == [0]
    # a document that is named as one is not begun twice
    assert sampler.vocabulary.encode("<|endoftext|>line 1") == prompts[0]
    assert sampler.vocabulary.decode(prompts[0]) == "<|endoftext|>line 1"
    assert sampler.vocabulary.tokenize("line 1") == prompts[0][1:]
    assert sampler.tokens_per_second is None
    for prompt in prompts:
        sampler.add(prompt, GREEDY)
    events = [event for step in sampler.run() for event in step]
    assert sampler.tokens_per_second is not None
    found = {event.request: event.result for event in events if event.result is not None}
    alone = sampler.engine.generate(prompts, GREEDY)
    assert [found[request] for request in sampler.requests] == [r.samples[0] for r in alone]


def test_loading_and_compiling_are_timed_apart(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = start_sampler(open_model(run), device="cpu")
    assert sampler.load_seconds > 0
    heard: list[tuple[object, ...]] = []

    asked: list[int] = []

    def generate(prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        asked.append(params.max_tokens)
        time.sleep(0.02)

    # there is nothing to compile for a CPU
    sampler.warm_up([[0]], GREEDY, lambda *done: heard.append(done))
    assert (sampler.compile_seconds, heard) == (0, [])
    monkeypatch.setattr(sampler.engine, "generate", generate)
    weight = SimpleNamespace(device=torch.device("cuda"))
    model = SimpleNamespace(embedding=SimpleNamespace(weight=weight))
    monkeypatch.setattr(sampler.engine, "model", model)
    sampler.warm_up([[0]], GREEDY, lambda *done: heard.append(done))
    # the requests themselves, begun and no more
    assert asked == [min(3, GREEDY.max_tokens)]
    assert sampler.compile_seconds >= 0.02
    assert heard == [()]
    assert sampler.tokens_per_second is None


def test_stopped_sampler_keeps_its_text(run: Path) -> None:
    sampler = start_sampler(open_model(run), device="cpu")
    for _ in range(2):
        sampler.add([0], GREEDY)
    wishes = iter([False, False, True])
    *_, last = sampler.run(lambda: next(wishes))
    assert [event.result.finish for event in last if event.result] == ["cancelled"] * 2
    assert all(len(event.result.tokens) == 2 for event in last if event.result)
    assert not sampler.engine.has_work


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="leave out --device cuda"):
        start_sampler(open_model(run), device="cuda")


def test_a_model_writes_after_a_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a line, and what the command writes."""
    model = depthmix.open_model(run)
    text = model.generate("line 12", max_tokens=9, temperature=0.8, seed=3)
    capsys.readouterr()
    wish = ("--prompt", "line 12", "--max-tokens", "9", "--temperature", "0.8", "--seed", "3")
    assert main(["sample", str(run), *wish, "--json"]) == 0
    assert text == json.loads(capsys.readouterr().out)["text"]
    assert text
    assert model.generate(["line 12", ""], GREEDY) == [
        model.generate("line 12", GREEDY),
        model.generate("", max_tokens=5, temperature=0),
    ]
    assert model.generate([]) == []
    # options go over what is given
    short = model.generate("line 12", GREEDY, max_tokens=2)
    assert model.generate("line 12", GREEDY).startswith(short)
    assert model.generate("line 12", GREEDY) != short


def test_a_text_ends_with_its_document(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = depthmix.open_model(run), []

    def generate(
        prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Result]:
        (each,) = params
        asked.append((prompts, each.stop_tokens))
        return []

    monkeypatch.setattr(model.engine, "generate", generate)
    prompt = [0, *model.vocabulary.tokenize("line")]
    assert model.generate(["line"]) == model.generate(["line"], stop_tokens=[7]) == []
    assert asked == [([prompt], (0,)), ([prompt], (7,))]


def test_generate_refuses_other_inputs(run: Path) -> None:
    model = depthmix.open_model(run)
    with pytest.raises(ValueError, match="n = 2: generate gives one text for each prompt"):
        model.generate("line", n=2)
    ids: Any = [1, 2]
    with pytest.raises(ValueError, match=r"a prompt is text: give token ids to engine\.generate"):
        model.generate(ids)
    with pytest.raises(ValueError, match="max_seq_len is 32: shorten it"):
        model.generate("word " * 50)
    with pytest.raises(ValueError, match="temperature = -1 must be 0 or more"):
        model.generate("line", temperature=-1)
