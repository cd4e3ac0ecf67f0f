"""What ids mean in one data folder: the tokenizer that is given, trained, or missing.

Owns the agreement of tokenizer, vocabulary size, end token and ready-made ids. Does not write.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from depthmix.data.pieces import Reading, sample_texts
from depthmix.data.readers import Unit, read_documents
from depthmix.data.tokenizer import (
    TOKENIZER_FILE,
    check_vocab_size,
    count_ids,
    find_end_token,
    load_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    import tokenizers

# a tokenizer sees this much text at least, and this much for each id that it may have
SAMPLE_BYTES = 1 << 23
SAMPLE_BYTES_PER_ID = 1 << 11
# the most that is read to find the sample
READ_BYTES = 1 << 30


class TokenizerFile(NamedTuple):
    """A tokenizer and its file's content (None: ids come ready-made), its size and end token."""

    tokenizer: "tokenizers.Tokenizer | None"
    content: bytes | None
    size: int
    end_token: int

    @property
    def hash(self) -> str | None:
        """Sha256 of the tokenizer's file."""
        return None if self.content is None else hashlib.sha256(self.content).hexdigest()


def load_vocabulary(
    units: Sequence[Unit],
    tokenizer: str | Path | None,
    vocab_size: int | None,
    end_token: int | None,
) -> TokenizerFile | None:
    """What is known before anything is trained; None where a tokenizer is to be trained.

    `tokenizer`, `vocab_size` and `end_token` are the user's; `units` must agree with them.
    """
    ready = [unit for unit in units if unit.kind == "tokens"]
    largest = max(ready, key=lambda unit: unit.largest_id, default=None)
    loaded = content = None
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        path = Path(tokenizer).expanduser()
        path = path / TOKENIZER_FILE if path.is_dir() else path
        # as it is, so that what it does not show here is kept too
        content = path.read_bytes() if path.is_file() else loaded.to_str(pretty=True).encode()
        size = count_ids(loaded)
        if vocab_size is not None and vocab_size < size:
            raise ValueError(
                f"the tokenizer has {size} ids, more than --vocab-size {vocab_size}: leave the "
                f"option out, or make it larger"
            )
        size = vocab_size or size
        end_token = find_end_token(loaded) if end_token is None else end_token
    elif largest is None:
        if end_token not in (None, 0):
            raise ValueError(
                "a tokenizer that is trained here ends documents with id 0: leave --end-token out, "
                "or give a --tokenizer"
            )
        if vocab_size is not None:
            check_vocab_size(vocab_size)
        return None
    else:
        if len(ready) < len(units):
            raise ValueError(
                f"{largest.name} holds ids and other sources hold text: give the tokenizer that "
                f"made the ids with --tokenizer"
            )
        if end_token is None:
            raise ValueError(
                f"{largest.name} does not say which id ends a document: add --end-token, or "
                f"--tokenizer with the tokenizer that made it"
            )
        size = vocab_size or max(largest.largest_id, end_token) + 1
    if largest is not None and largest.largest_id >= size:
        raise ValueError(
            f"{largest.name} holds the id {largest.largest_id}, but the vocabulary has {size} ids: "
            f"give the tokenizer that made it, and check the ids' size (--token-dtype)"
        )
    if not 0 <= end_token < size:
        raise ValueError(f"--end-token {end_token} is not one of the {size} ids")
    return TokenizerFile(loaded, content, size, end_token)


def train_vocabulary(reading: Reading, vocab_size: int, num_workers: int) -> TokenizerFile:
    """Train a tokenizer on a sample of what is read, spread over all of it."""
    budget = max(SAMPLE_BYTES, SAMPLE_BYTES_PER_ID * vocab_size)
    # the library's threads are worth their start on a large sample only, and a process that has
    # used them warns when it forks
    parallel = num_workers > 1 and budget > SAMPLE_BYTES
    tokenizer = train_tokenizer(_sample(reading, budget), vocab_size, parallel=parallel)
    content = tokenizer.to_str(pretty=True).encode()
    return TokenizerFile(tokenizer, content, count_ids(tokenizer), find_end_token(tokenizer))


def _sample(reading: Reading, budget_bytes: int) -> Iterator[str]:
    total_bytes = max(1, sum(unit.num_bytes for unit in reading.units))
    share = min(1.0, READ_BYTES / total_bytes)

    def read() -> Iterator[str]:
        for unit in reading.units:
            num_chars = 0
            for document in read_documents(unit, text_field=reading.text_field):
                assert isinstance(document.content, str)
                yield document.content
                num_chars += len(document.content)
                enough = unit.num_bytes * share if unit.num_bytes else budget_bytes
                if (document.offset_bytes if unit.num_bytes else num_chars) >= enough:
                    break

    return sample_texts(read(), min(1.0, budget_bytes / (total_bytes * share)))
