"""A run on disk can be sampled from wherever it is, as long as a tokenizer can be found."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from depthmix.infer import SamplingParams
from depthmix.rundir import RunDir
from depthmix.sampler import find_checkpoint, find_vocabulary, open_sampler
from text_runs import write_text_run

GREEDY = SamplingParams(max_tokens=5, temperature=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("sampler"))


def test_a_sampler_speaks_text(run: Path) -> None:
    sampler = open_sampler(run, device="cpu", max_batch=2)
    prompts = [sampler.encode("line 1"), sampler.encode("")]
    assert prompts[0][0] == 0
    assert prompts[1] == [0]
    # a document that is named as one is not begun twice
    assert sampler.encode("<|endoftext|>line 1") == prompts[0]
    assert sampler.decode(prompts[0]) == "<|endoftext|>line 1"
    assert sampler.tokenize("line 1") == prompts[0][1:]
    assert sampler.tokens_per_second is None
    for prompt in prompts:
        sampler.add(prompt, GREEDY)
    events = [event for step in sampler.run() for event in step]
    assert sampler.tokens_per_second is not None
    found = {event.request: event.result for event in events if event.result is not None}
    alone = sampler.engine.generate(prompts, GREEDY)
    assert [found[request] for request in sampler.requests] == [r.samples[0] for r in alone]


def test_loading_and_compiling_are_timed_apart(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = open_sampler(run, device="cpu")
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


def test_who_is_stopped_keeps_what_there_is(run: Path) -> None:
    sampler = open_sampler(run, device="cpu")
    for _ in range(2):
        sampler.add([0], GREEDY)
    wishes = iter([False, False, True])
    *_, last = sampler.run(lambda: next(wishes))
    assert [event.result.finish for event in last if event.result] == ["cancelled"] * 2
    assert all(len(event.result.tokens) == 2 for event in last if event.result)
    assert not sampler.engine.has_work


def test_checkpoints_have_names(run: Path) -> None:
    folder = RunDir.open(run)
    second, fourth = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    assert find_checkpoint(folder, "newest") == fourth
    for name in ("2", "step-00000002", str(second)):
        assert find_checkpoint(folder, name) == second
    assert find_checkpoint(folder, None) == find_checkpoint(folder, "best")
    early, late = (open_sampler(run, checkpoint=name, device="cpu") for name in ("2", "4"))
    assert not torch.equal(early.engine.model.embedding.weight, late.engine.model.embedding.weight)
    with pytest.raises(ValueError, match="choose among best, newest, step-00000002"):
        find_checkpoint(folder, "step-3")


def forget_tokenizer(run: RunDir) -> None:
    """As runs were before they kept a copy of it."""
    (run.path / "tokenizer.json").unlink()
    provenance = run.read_json("provenance.json")
    for start in provenance["starts"]:
        del start["data"]["tokenizer_hash"], start["data"]["end_token"]
    (run.path / "provenance.json").write_text(json.dumps(provenance))


def test_a_run_keeps_its_tokenizer(run: Path, tmp_path: Path) -> None:
    """Moved, and without its data, it can be sampled; another tokenizer in its place is refused."""
    known = (run.parent / "data" / "tokenizer.json").read_bytes()
    assert (run / "tokenizer.json").read_bytes() == known
    moved = RunDir.open(shutil.copytree(run, tmp_path / "run"))
    (run.parent / "data").rename(run.parent / "elsewhere")
    try:
        sampler = open_sampler(moved.path, device="cpu")
        assert sampler.decode(sampler.encode("line 1")) == "<|endoftext|>line 1"
        # what the data says of its end is true, whatever the tokenizer's names are
        provenance = moved.read_json("provenance.json")
        provenance["starts"][-1]["data"]["end_token"] = 7
        (moved.path / "provenance.json").write_text(json.dumps(provenance))
        assert find_vocabulary(moved).end_token == 7
        (moved.path / "tokenizer.json").write_bytes(known.replace(b"<|endoftext|>", b"<|other|>"))
        with pytest.raises(ValueError, match=r"is not the tokenizer .* put that one back"):
            find_vocabulary(moved)
    finally:
        (run.parent / "elsewhere").rename(run.parent / "data")


def test_a_tokenizer_is_found_or_named(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.parent, tmp_path / "moved")
    moved = RunDir.open(tmp_path / "moved" / "run")
    forget_tokenizer(moved)
    # a run that moved still knows its data's old place
    known = find_vocabulary(moved)
    assert known.end_token == 0
    (run.parent / "data").rename(run.parent / "elsewhere")
    try:
        with pytest.raises(ValueError, match=r"is no longer there: name a tokenizer\.json"):
            find_vocabulary(moved)
        data = tmp_path / "moved" / "data"
        for place in (data, data / "tokenizer.json"):
            vocabulary = find_vocabulary(moved, str(place))
            assert vocabulary.end_token == 0
            assert vocabulary.tokenizer.to_str() == known.tokenizer.to_str()
        shutil.copy(data / "tokenizer.json", moved.path)
        found = find_vocabulary(moved)
        assert found.tokenizer.to_str() == known.tokenizer.to_str()
        assert found.end_token == 0
    finally:
        (run.parent / "elsewhere").rename(run.parent / "data")


def test_other_data_in_the_same_place_is_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "tokenizer.json").unlink()
    provenance = copy / "provenance.json"
    changed = provenance.read_text().replace('"hash": "', '"hash": "0')
    provenance.write_text(changed)
    with pytest.raises(ValueError, match=r"is not what .* was trained on"):
        find_vocabulary(RunDir.open(copy))
    provenance.unlink()
    with pytest.raises(ValueError, match="does not say what data"):
        find_vocabulary(RunDir.open(copy))


def test_a_tokenizer_without_an_end_needs_a_prompt(run: Path, tmp_path: Path) -> None:
    text = (run.parent / "data" / "tokenizer.json").read_text()
    path = tmp_path / "tokenizer.json"
    path.write_text(text.replace("<|endoftext|>", "<|nothing|>"))
    sampler = open_sampler(run, tokenizer=str(path), device="cpu")
    assert sampler.vocabulary.end_token is None
    assert sampler.encode("line") == sampler.tokenize("line")
    with pytest.raises(ValueError, match="give a prompt"):
        sampler.encode("")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="leave out --device cuda"):
        open_sampler(run, device="cuda")
