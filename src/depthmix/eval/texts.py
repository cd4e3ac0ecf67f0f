"""Texts and data folders → streams of tokens, with the bytes that they stand for.

Does not know what is done with them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from depthmix.data.shards import Corpus
from depthmix.eval.perplexity import Stream
from depthmix.models import begin_document

if TYPE_CHECKING:
    import tokenizers


def read_texts(
    texts: Sequence[str],
    tokenizer: "tokenizers.Tokenizer",
    end_token: int | None,
    max_tokens: int | None = None,
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
        found = tokenizer.encode(text, add_special_tokens=False)
        ids = found.ids[:room]
        # where the last token that is taken ends in the text
        end = len(text) if len(ids) == len(found.ids) else found.offsets[len(ids) - 1][1]
        num_bytes += len(text[:end].encode())
        tokens += begin_document(ids, end_token)
    return Stream(tokens, num_bytes, end_token)


def read_corpus(corpus: Corpus, max_tokens: int | None = None, split: str = "val") -> Stream:
    """The documents of a split, as training reads them: each begins with an end token."""
    found = corpus.split(split)
    tokens = [corpus.end_token]
    for number in range(found.num_documents):
        if max_tokens is not None and len(tokens) > max_tokens:
            break
        tokens += found.read(number).tolist()
    if max_tokens is not None:
        tokens = tokens[: max_tokens + 1]
    per_token = found.bytes_per_token
    num_bytes = None if per_token is None else per_token * (len(tokens) - 1)
    return Stream(tokens, num_bytes, corpus.end_token)
