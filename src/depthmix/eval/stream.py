"""Texts and data folders → a stream of tokens → windows → rows of a batch.

Cuts as training does. Knows nothing of what a model makes of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from depthmix.data.shards import Corpus
from depthmix.models import StoredModel, Vocabulary, begin_document
from depthmix.nn.losses import IGNORE


class Stream(NamedTuple):
    """A sequence of tokens, and the size of its text."""

    tokens: Sequence[int]
    num_bytes: float | None
    """UTF-8 bytes of the predicted tokens; None if unknown."""
    end_token: int | None
    """Begins a document; None if unknown."""


class Window(NamedTuple):
    """One row of the text, as training cuts its stream."""

    tokens: Int[Tensor, "1 T"]
    targets: Int[Tensor, " predicted"]
    """The next token of each; one fewer than tokens at the text's end."""
    documents: Int[Tensor, "1 T"] | None
    """Set if the window has more than one document."""


class Padded(NamedTuple):
    """Rows of unequal length as one batch."""

    tokens: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    """`IGNORE` where there is nothing to predict."""
    documents: Int[Tensor, "B T"] | None
    """Negative after the end of a row; None if all rows are full and have one document each."""


def read_texts(
    texts: Iterable[str], vocabulary: Vocabulary, max_tokens: int | None = None
) -> Stream:
    """Each text as a document that the end token begins, at most `max_tokens` of all.

    Without an end token the texts' first token is not predicted.
    """
    tokens: list[int] = []
    num_bytes = 0
    for text in texts:
        room = None if max_tokens is None else max_tokens - len(tokens)
        if room is not None and room < 1:
            break
        ids, num_chars = vocabulary.tokenize_start(text, room)
        num_bytes += len(text[:num_chars].encode())
        tokens += begin_document(ids, vocabulary.end_token)
    return Stream(tokens, num_bytes, vocabulary.end_token)


def read_stored(
    model: StoredModel,
    texts: Iterable[str] | None = None,
    data: Path | None = None,
    max_tokens: int | None = None,
    split: str = "val",
) -> Stream:
    """The tokens of texts or of a data folder; without either, of the data of the model's run."""
    if texts is not None:
        return read_texts(list(texts), model.vocabulary, max_tokens)
    if data is None:
        starts = [] if model.run is None else model.run.read_starts()
        used = starts[-1]["data"] if starts else {}
        if not used.get("hash"):
            raise ValueError(
                f"{model.path} has no data of its own: name some with --text or --data"
            )
        data = Path(used["folder"])
    return read_corpus(Corpus.open(data), max_tokens, split)


def read_corpus(corpus: Corpus, max_tokens: int | None = None, split: str = "val") -> Stream:
    """The documents of a split, as training reads them: each begins with an end token."""
    found = corpus.split(split)
    tokens = begin_document([], corpus.end_token)
    for number in range(found.num_documents):
        if max_tokens is not None and len(tokens) > max_tokens:
            break
        tokens += found.read(number).tolist()
    if max_tokens is not None:
        tokens = tokens[: max_tokens + 1]
    per_token = found.bytes_per_token
    num_bytes = None if per_token is None else per_token * (len(tokens) - 1)
    return Stream(tokens, num_bytes, corpus.end_token)


def cut_windows(stream: Sequence[int], length: int, end_token: int | None) -> Iterator[Window]:
    """Rows of `length` tokens, the last one shorter; an end token begins a document."""
    all_tokens = torch.tensor(stream)
    for start in range(0, len(stream), length):
        here = all_tokens[start : start + length]
        documents = None
        # the first token begins one in any case
        if end_token is not None and bool((here[1:] == end_token).any()):
            documents = (here == end_token).cumsum(0)[None]
        yield Window(here[None], all_tokens[start + 1 : start + 1 + length], documents)


def pad_rows(
    rows: Sequence[Window], device: torch.device, *, num_scored: Sequence[int] | None = None
) -> Padded:
    """Windows as rows of a batch; of each, the last `num_scored` targets count, or all."""
    length = max(row.tokens.shape[1] for row in rows)
    whole = all(row.documents is None and row.tokens.shape[1] == length for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    targets, documents = torch.full_like(tokens, IGNORE), torch.full_like(tokens, -1)
    for place, row in enumerate(rows):
        size, predicted = row.tokens.shape[1], len(row.targets)
        tokens[place, :size] = row.tokens[0]
        documents[place, :size] = 0 if row.documents is None else row.documents[0]
        first = 0 if num_scored is None else predicted - num_scored[place]
        targets[place, first:predicted] = row.targets[first:]
    return Padded(tokens.to(device), targets.to(device), None if whole else documents.to(device))
