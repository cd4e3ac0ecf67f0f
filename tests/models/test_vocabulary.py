"""A run's tokenizer is found wherever it is, and a document begins as in the training data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthmix.models import begin_document, open_model
from depthmix.models.vocabulary import find_vocabulary, read_vocabulary
from depthmix.runs.folder import RunDir
from text_runs import write_text_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("vocabulary"))


def test_a_document_begins_with_the_end_token_once() -> None:
    assert begin_document([5, 6], 0) == [0, 5, 6]
    assert begin_document([0, 5], 0) == [0, 5]
    assert begin_document((), 0) == [0]
    # if it is unknown, a document is only its text
    assert begin_document((5, 6), None) == [5, 6]
    assert begin_document([], None) == []


def test_long_texts_are_encoded_as_batches_which_other_threads_do_not_wait_for(run: Path) -> None:
    vocabulary = open_model(run).vocabulary
    text = "line 1 é\n" * 1000
    asked: list[list[str]] = []

    class Watched:
        """The tokenizer, without the call that stops all threads."""

        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            asked.append(texts)
            return vocabulary.tokenizer.encode_batch(texts, **options)

    watched = vocabulary._replace(tokenizer=Watched())  # pyrefly: ignore[bad-argument-type]
    truth = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    assert watched.tokenize(text) == truth
    assert asked == [[text]]
    with pytest.raises(ValueError, match="is not valid UTF-8"):
        vocabulary.tokenize("\ud800" * 5000)


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
        vocabulary = open_model(moved.path).vocabulary
        assert vocabulary.decode(vocabulary.encode("line 1")) == "<|endoftext|>line 1"
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
        with pytest.raises(ValueError, match=r"is no longer there: give a tokenizer\.json"):
            find_vocabulary(moved)
        data = tmp_path / "moved" / "data"
        for place in (data, data / "tokenizer.json"):
            vocabulary = read_vocabulary(str(place))
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
    with pytest.raises(ValueError, match="does not record its data"):
        find_vocabulary(RunDir.open(copy))


def test_a_tokenizer_without_an_end_needs_a_prompt(run: Path, tmp_path: Path) -> None:
    text = (run.parent / "data" / "tokenizer.json").read_text()
    path = tmp_path / "tokenizer.json"
    path.write_text(text.replace("<|endoftext|>", "<|nothing|>"))
    vocabulary = open_model(run, tokenizer=str(path)).vocabulary
    assert vocabulary.end_token is None
    assert vocabulary.encode("line") == vocabulary.tokenize("line")
    with pytest.raises(ValueError, match="give a prompt"):
        vocabulary.encode("")
