"""Texts and data folders become streams whose bytes are those of what is predicted."""

from pathlib import Path

import pytest

from depthmix.data.prepare import prepare
from depthmix.data.shards import Corpus
from depthmix.data.tokenizer import train_tokenizer
from depthmix.eval.texts import read_corpus, read_texts

LINES = [f"line {i} says {i * i} and no more ä\n" for i in range(60)]
TOKENIZER = train_tokenizer(LINES, 300, parallel=False)


def test_texts_are_documents() -> None:
    stream = read_texts(LINES[:2], TOKENIZER, 0)
    ids = [TOKENIZER.encode(line).ids for line in LINES[:2]]
    assert stream.tokens == [0, *ids[0], 0, *ids[1]]
    assert stream.num_bytes == len("".join(LINES[:2]).encode())
    assert read_texts(LINES[:1], TOKENIZER, None).tokens == ids[0]
    # one that begins with the end token has it once
    assert read_texts(["<|endoftext|>" + LINES[0]], TOKENIZER, 0).tokens == [0, *ids[0]]


@pytest.mark.parametrize("count", [1, 5, 30])
def test_bytes_are_those_of_the_tokens_that_are_taken(count: int) -> None:
    stream = read_texts(LINES[:3], TOKENIZER, 0, count)
    assert len(stream.tokens) in (count, count + 1)
    text = TOKENIZER.decode([token for token in stream.tokens if token], skip_special_tokens=False)
    assert stream.num_bytes == len(text.encode())


def test_a_folders_documents_as_training_reads_them(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text("<|endoftext|>".join(LINES))
    prepare([str(source)], tmp_path / "data", vocab_size=300, num_workers=1, val_fraction=0.3)
    corpus = Corpus.open(tmp_path / "data")
    val = corpus.split("val")
    stream = read_corpus(corpus)
    wanted = [t for n in range(val.num_documents) for t in val.read(n).tolist()]
    assert stream.tokens == [corpus.end_token, *wanted]
    assert stream.num_bytes == pytest.approx(val.num_bytes)
    assert val.bytes_per_token is not None
    part = read_corpus(corpus, 10)
    assert part.tokens == stream.tokens[:11]
    assert part.num_bytes == pytest.approx(10 * val.bytes_per_token)
    assert len(read_corpus(corpus, split="train").tokens) > len(stream.tokens)
