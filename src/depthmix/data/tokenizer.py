"""Tokenizers: training a byte-level BPE, loading one, and helpers around it.

Imports `tokenizers` only when it is used.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tokenizers

__all__ = [
    "END_OF_TEXT",
    "TOKENIZER_FILE",
    "count_ids",
    "find_end_token",
    "load_tokenizer",
    "measure_tokens",
    "train_tokenizer",
]

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
SMALLEST_VOCABULARY = 257

# tried in this order: a model may have several of them
END_TOKENS = (
    END_OF_TEXT,
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "<|eot_id|>",
    "[SEP]",
    "[EOS]",
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, parallel: bool = True
) -> "tokenizers.Tokenizer":
    """Train a lossless byte-level BPE; id 0 is `<|endoftext|>`.

    It has fewer than `vocab_size` ids if the texts do not have enough pairs to merge.
    """
    check_vocab_size(vocab_size)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # every byte has an id, whether it occurs in the texts or not
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with set_parallelism(parallel):
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_vocab_size(vocab_size: int) -> None:
    """Refuse a vocabulary too small to have every byte."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"a vocabulary of {vocab_size} ids is too small: use at least {SMALLEST_VOCABULARY}, "
            f"one for each byte and one for {END_OF_TEXT}"
        )


def load_tokenizer(path_or_name: str | Path) -> "tokenizers.Tokenizer":
    """Load a tokenizer from `tokenizer.json`, a folder with one, or the Hugging Face hub."""
    from tokenizers import Tokenizer

    path = Path(path_or_name).expanduser()
    if path.is_dir():
        path = path / TOKENIZER_FILE
        if not path.is_file():
            raise ValueError(f"the folder {path.parent} has no {TOKENIZER_FILE}")
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        # the library raises a bare Exception
        except Exception as error:
            raise ValueError(
                f"{path} is not a tokenizer of the 'tokenizers' library: {error}"
            ) from error
    name = str(path_or_name)
    if path.suffix == ".json" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no tokenizer at {path}: check the path")
    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(
            f"no tokenizer '{name}' could be downloaded from the hub ({say_why(error)}): "
            f"check the name and the network, or give the path of a {TOKENIZER_FILE}"
        ) from error


def say_why(error: Exception) -> str:
    """The first line of a library's error message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), repr(error))


def find_end_token(tokenizer: "tokenizers.Tokenizer") -> int:
    """The id that ends a document."""
    for token in END_TOKENS:
        number = tokenizer.token_to_id(token)
        if number is not None:
            return number
    raise ValueError(
        f"this tokenizer has none of the usual end tokens ({', '.join(END_TOKENS[:4])}, …): "
        f"give the id that ends a document with --end-token"
    )


def count_ids(tokenizer: "tokenizers.Tokenizer") -> int:
    """Largest id + 1: a vocabulary may have gaps, so its length is not enough."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def measure_tokens(tokenizer: "tokenizers.Tokenizer") -> np.ndarray | None:
    """UTF-8 bytes of each id; None if they depend on the neighbouring tokens."""
    tree = json.loads(tokenizer.to_str())
    # a byte-level token has one character per byte; others merge spaces or add prefixes
    decoder = tree.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    if [part.get("type") for part in parts] != ["ByteLevel"]:
        return None
    added = {token["id"] for token in tree.get("added_tokens", [])}
    num_bytes = np.zeros(count_ids(tokenizer), dtype=np.int64)
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        num_bytes[number] = len(token.encode()) if number in added else len(token)
    return num_bytes


@contextmanager
def set_parallelism(parallel: bool) -> Iterator[None]:
    """Set whether the library uses its own threads, until the block ends."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if parallel else "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
