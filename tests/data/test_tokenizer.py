"""Tokenizers: lossless, deterministic, found by path, and refused with a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from depthmix.data.tokenizer import (
    END_OF_TEXT,
    count_ids,
    find_end_token,
    load_tokenizer,
    measure_tokens,
    set_parallelism,
    train_tokenizer,
)

TEXTS = [
    "the cat sat on the mat\n" * 20,
    "def route(tokens):\n    return tokens\n" * 20,
    "日本語 é",
]

TOKENIZER = train_tokenizer(TEXTS, 300, parallel=False)


def word_tokenizer(*words: str) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate(words)}
    return Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_every_text_is_decoded_to_itself(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    ["", " leading", "trailing ", "\0\x01\x7f", "a\r\nb\t\n\n  c", END_OF_TEXT, "🙂‍↔️ e\u0301"],
)
def test_odd_text_is_decoded_to_itself(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_training_merges_frequent_pairs_and_ends_with_id_0() -> None:
    assert TOKENIZER.token_to_id(END_OF_TEXT) == 0
    assert count_ids(TOKENIZER) == 300
    assert "Ġtokens" in TOKENIZER.encode("return tokens").tokens


def test_a_small_corpus_has_fewer_ids() -> None:
    assert count_ids(train_tokenizer(["ab ab"], 1000, parallel=False)) < 270


def test_training_is_the_same_in_every_process_and_with_threads() -> None:
    script = (
        "import sys; from depthmix.data.tokenizer import train_tokenizer;"
        f"t = train_tokenizer({TEXTS!r}, 300, parallel=True); sys.stdout.write(t.to_str())"
    )
    seeds = ("1", "2")
    done = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        for seed in seeds
    ]
    assert [run.stdout.decode() for run in done] == [TOKENIZER.to_str()] * 2


def test_a_vocabulary_must_hold_every_byte() -> None:
    with pytest.raises(ValueError, match="256 ids is too small: use at least 257"):
        train_tokenizer(TEXTS, 256)


def test_loads_a_file_and_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(str(path))
    for where in (path, str(path), tmp_path):
        assert load_tokenizer(where).to_str() == TOKENIZER.to_str()


def test_a_wrong_path_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"there is no tokenizer at .*gone\.json"):
        load_tokenizer(tmp_path / "gone.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json is not a tokenizer"):
        load_tokenizer(broken)


def test_a_wrong_hub_name_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Tokenizer:
        raise Exception("offline\nsecond line")

    monkeypatch.setattr("tokenizers.Tokenizer", type("Fake", (), {"from_pretrained": fail}))
    with pytest.raises(
        ValueError, match=r"'owner/name' .* hub \(offline\): check the name"
    ) as info:
        load_tokenizer("owner/name")
    assert "second line" not in str(info.value)


@pytest.mark.parametrize(
    "token", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>"]
)
def test_finds_the_end_token(token: str) -> None:
    assert find_end_token(word_tokenizer("a", "b", token)) == 2


def test_an_unknown_end_token_is_requested() -> None:
    with pytest.raises(ValueError, match="--end-token"):
        find_end_token(word_tokenizer("a", "b"))


def test_ids_are_counted_over_holes() -> None:
    assert count_ids(Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))) == 8


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_tokens_are_measured_in_bytes(text: str) -> None:
    table = measure_tokens(TOKENIZER)
    assert table is not None
    assert table[TOKENIZER.encode(text).ids].sum() == len(text.encode())


def test_tokens_that_are_not_bytes_are_not_measured() -> None:
    tokenizer = word_tokenizer("a", "b")
    assert measure_tokens(tokenizer) is None
    tokenizer.decoder = decoders.WordPiece()
    assert measure_tokens(tokenizer) is None


@pytest.mark.parametrize("before", [None, "true"])
def test_the_environment_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with set_parallelism(False):
        assert os.environ[name] == "false"
    assert os.environ.get(name) == before
