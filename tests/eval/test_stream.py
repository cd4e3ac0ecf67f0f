"""Streams hold texts as training reads them, and windows hold every token once."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depthmix.data.prepare import prepare
from depthmix.data.shards import Corpus
from depthmix.data.tokenizer import train_tokenizer
from depthmix.eval.stream import cut_windows, pad_rows, read_corpus, read_texts
from depthmix.models import Vocabulary
from depthmix.nn.losses import IGNORE

LINES = [f"line {i} says {i * i} and no more ä\n" for i in range(60)]
TOKENIZER = train_tokenizer(LINES, 300, parallel=False)
VOCABULARY = Vocabulary(TOKENIZER, 0)


def test_texts_are_documents() -> None:
    stream = read_texts(LINES[:2], VOCABULARY)
    ids = [TOKENIZER.encode(line).ids for line in LINES[:2]]
    assert stream.tokens == [0, *ids[0], 0, *ids[1]]
    assert stream.num_bytes == len("".join(LINES[:2]).encode())
    assert read_texts(LINES[:1], VOCABULARY._replace(end_token=None)).tokens == ids[0]
    # one that begins with the end token has it once
    assert read_texts(["<|endoftext|>" + LINES[0]], VOCABULARY).tokens == [0, *ids[0]]


@pytest.mark.parametrize("count", [1, 5, 30])
def test_bytes_are_those_of_the_tokens_that_are_taken(count: int) -> None:
    stream = read_texts(LINES[:3], VOCABULARY, count)
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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 9))
def test_windows_hold_every_token_once(stream: list[int], length: int) -> None:
    windows = list(cut_windows(stream, length, 0))
    assert [int(t) for window in windows for t in window.tokens[0]] == stream
    assert [int(t) for window in windows for t in window.targets] == stream[1:]
    assert all(len(window.tokens[0]) == length for window in windows[:-1])
    for window in windows:
        inside = (window.tokens[0, 1:] == 0).nonzero()[:, 0] + 1
        if window.documents is None:
            assert len(inside) == 0
        else:
            steps = window.documents[0].diff().nonzero()[:, 0] + 1
            assert steps.tolist() == inside.tolist()


def test_only_the_last_targets_count_where_that_is_asked() -> None:
    windows = list(cut_windows([0, *range(1, 11), 0, *range(12, 20)], 16, None))
    batch = pad_rows(windows, torch.device("cpu"), num_scored=[2, 3])
    assert batch.tokens.shape == (2, 16)
    assert (batch.targets != IGNORE).sum(1).tolist() == [2, 3]
    assert batch.targets[0, 14:].tolist() == windows[0].targets[14:].tolist()
    assert batch.targets[1, :3].tolist() == windows[1].targets.tolist()
    assert batch.documents is not None
    assert (batch.documents[1] >= 0).tolist() == [True] * 4 + [False] * 12
