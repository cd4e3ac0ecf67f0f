"""Tokenizer, vocabulary size, end token and ready-made ids agree, or a sentence says why not."""

from pathlib import Path

import numpy as np
import pytest

from depthmix.data import vocabulary
from depthmix.data.pieces import Reading
from depthmix.data.readers import Unit
from depthmix.data.sources import list_source
from depthmix.data.tokenizer import train_tokenizer
from depthmix.data.vocabulary import load_vocabulary, train_vocabulary


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    # a detail that the library would not write itself
    path.write_text(train_tokenizer(["abab"], 258, parallel=False).to_str() + "\n\n")
    return path


@pytest.fixture
def ids(tmp_path: Path) -> Unit:
    file = tmp_path / "a.u16"
    file.write_bytes(np.array([3, 257, 0], dtype="<u2").tobytes())
    return list_source(str(file)).units[0]


TEXT = Unit(kind="made", name="text", key="text", make=lambda: ["some text"])


def test_a_tokenizer_is_taken_as_it_is(path: Path, ids: Unit) -> None:
    found = load_vocabulary([TEXT, ids], path, None, None)
    assert found is not None
    assert (found.size, found.end_token, found.content) == (258, 0, path.read_bytes())
    in_folder = load_vocabulary([TEXT], path.parent, None, None)
    assert in_folder is not None
    assert in_folder.hash == found.hash


def test_a_vocabulary_may_be_larger_than_its_tokenizer(path: Path) -> None:
    found = load_vocabulary([TEXT], path, 320, 5)
    assert found is not None
    assert (found.size, found.end_token) == (320, 5)


def test_text_alone_is_for_training() -> None:
    assert load_vocabulary([TEXT], None, 300, None) is None
    assert load_vocabulary([TEXT], None, None, 0) is None


def test_ids_alone_need_no_tokenizer(ids: Unit) -> None:
    found = load_vocabulary([ids], None, None, 0)
    assert found is not None
    assert found[:] == (None, None, 258, 0)
    assert found.hash is None
    rare = load_vocabulary([ids], None, None, 400)
    assert rare is not None
    assert rare.size == 401
    given = load_vocabulary([ids], None, 512, 0)
    assert given is not None
    assert given.size == 512


@pytest.mark.parametrize(
    ("with_ids", "with_text", "with_path", "vocab_size", "end_token", "words"),
    [
        (False, True, False, 100, None, "100 ids is too small"),
        (False, True, False, None, 7, "ends documents with id 0"),
        (False, True, True, 257, None, "has 258 ids, more than --vocab-size 257"),
        (False, True, True, None, 258, "--end-token 258 is not one of the 258 ids"),
        (True, True, False, None, 0, "a.u16 holds ids and other sources hold text"),
        (True, False, False, None, None, "a.u16 does not say which id ends a document"),
        (True, False, False, 257, 0, "a.u16 holds the id 257, but the vocabulary has 257 ids"),
    ],
)
def test_what_does_not_agree(
    path: Path,
    ids: Unit,
    with_ids: bool,
    with_text: bool,
    with_path: bool,
    vocab_size: int | None,
    end_token: int | None,
    words: str,
) -> None:
    units = [ids] * with_ids + [TEXT] * with_text
    with pytest.raises(ValueError, match=words):
        load_vocabulary(units, path if with_path else None, vocab_size, end_token)


def test_training_sees_all_of_a_small_corpus() -> None:
    unit = Unit(kind="made", name="m", key="m", make=lambda: ["abcabc " * 9, "xyzxyz " * 9])
    found = train_vocabulary(Reading(units=[unit]), 262, 1)
    assert (found.size, found.end_token) == (262, 0)
    assert found.tokenizer is not None
    assert found.content == found.tokenizer.to_str(pretty=True).encode()
    assert {"abcabc", "xyzxyz"} & set(found.tokenizer.get_vocab()) or found.size == 262


def test_a_sample_reads_the_beginning_of_each_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, letter in (("1.jsonl", "a"), ("2.jsonl", "b")):
        lines = [f'{{"text": "{letter}{i:03d}"}}' for i in range(1000)]
        (tmp_path / name).write_text("\n".join(lines))
    monkeypatch.setattr("depthmix.data.readers.BLOCK_BYTES", 64)
    monkeypatch.setattr(vocabulary, "READ_BYTES", 18)
    reading = Reading(units=list_source(str(tmp_path)).units)
    texts = list(vocabulary._sample(reading, 10**9))
    assert texts[0] == "a000"
    assert "b000" in texts
    assert len(texts) < 2000
    monkeypatch.setattr(vocabulary, "READ_BYTES", 1 << 30)
    half = list(vocabulary._sample(reading, reading.total_bytes // 2))
    assert len(half) == 1000
