"""One file or dataset → its documents, from the beginning and in order, in little memory.

Owns the formats: text, JSON lines, Parquet, token files, compression, Hugging Face datasets. Does
not know how a command line names them, nor what becomes of the documents.
"""

import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from depthmix.data.tokenizer import END_OF_TEXT

Kind = Literal["text", "jsonl", "parquet", "tokens", "hub", "made"]

BLOCK_BYTES = 1 << 22
COMPRESSIONS = (".gz", ".xz")


class Document(NamedTuple):
    """Text, or ids without their end token, and how far into the file on disk it ends."""

    content: str | np.ndarray
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Something that is read from its beginning: a file, a dataset, a text made on the spot."""

    kind: Kind
    name: str
    """For people: the path as it was reached, the dataset's name."""
    key: str
    """For comparing: the same wherever the source lies."""
    num_bytes: int = 0
    """Size on disk; 0 where nobody knows."""
    path: Path = Path()
    dtype: str = ""
    """Of a token file's items, as numpy writes it."""
    largest_id: int = -1
    """Of a token file."""
    make: Callable[[], list[str]] | None = None
    """Gives the documents of a `made` unit."""


def read_documents(
    unit: Unit, *, text_field: str = "text", end_token: int | None = None, num_skipped: int = 0
) -> Iterator[Document]:
    """The documents of a unit after the first `num_skipped`; some may be empty."""
    if unit.kind == "hub":
        return _read_hub(unit, text_field, num_skipped)
    if unit.kind == "text":
        documents = _read_text(unit)
    elif unit.kind == "jsonl":
        documents = _read_lines(unit, text_field)
    elif unit.kind == "parquet":
        documents = _read_parquet(unit, text_field)
    elif unit.kind == "tokens":
        assert end_token is not None
        documents = _read_tokens(unit, end_token)
    else:
        assert unit.make is not None
        documents = (Document(text, 0) for text in unit.make())
    return islice(documents, num_skipped, None)


@contextmanager
def open_stream(path: Path) -> Iterator[tuple[BufferedIOBase, Callable[[], int]]]:
    """A file's bytes, unpacked, and a function that tells how many were read on disk."""
    with open(path, "rb") as raw:
        suffix = path.suffix.lower()
        try:
            if suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as packed:
                    yield packed, raw.tell
            elif suffix == ".xz":
                with lzma.LZMAFile(raw) as packed:
                    yield packed, raw.tell
            else:
                yield raw, raw.tell
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{path} is damaged ({error}): get it anew") from error


def decode_blocks(stream: BufferedIOBase, name: str) -> Iterator[str]:
    """A stream's UTF-8 text in blocks."""
    # a byte order mark at the beginning is no part of the text
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    num_read = 0
    while True:
        block = stream.read(BLOCK_BYTES)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            place = max(0, num_read - len(error.object) + len(block)) + error.start
            raise ValueError(
                f"{name} is not UTF-8 text (see byte {place}): convert it to UTF-8, or leave it out"
            ) from error
        num_read += len(block)
        if text:
            yield text
        if not block:
            return


def parse_line(line: bytes, name: str, number: int, text_field: str) -> str:
    """The text of one line of a JSON lines file; an explicit null is an empty text."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name}, line {number} is not JSON ({error}): every line must be one JSON object"
        ) from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{name}, line {number} is not a JSON object: every line must be like "
            f'{{"{text_field}": "…"}}'
        )
    return _take_field(record, text_field, f"{name}, line {number}")


def check_columns(unit: Unit, text_field: str) -> None:
    """Refuse a Parquet file without the text column, before anything is read."""
    columns = _open_parquet(unit).schema_arrow.names
    if text_field not in columns:
        raise ValueError(
            f"{unit.name} has no column '{text_field}' (its columns are {', '.join(columns)}): "
            f"name another with --text-field"
        )


def clean_text(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _take_field(record: dict[str, object], text_field: str, place: str) -> str:
    if text_field not in record:
        known = ", ".join(str(name) for name in record) or "none"
        raise ValueError(
            f"{place} has no field '{text_field}' (its fields are {known}): "
            f"name another with --text-field"
        )
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: the field '{text_field}' is not text but {type(text).__name__}: "
            f"name another with --text-field"
        )
    return clean_text(text)


def _read_text(unit: Unit) -> Iterator[Document]:
    """Documents between `<|endoftext|>` marks; a line end beside a mark belongs to the mark."""
    parts: list[str] = []
    tail, first = "", True
    with open_stream(unit.path) as (stream, tell):
        for block in decode_blocks(stream, unit.name):
            *done, rest = (tail + block).split(END_OF_TEXT)
            for piece in done:
                text = "".join([*parts, piece])
                parts = []
                yield Document(_trim(text, head=not first, foot=True), tell())
                first = False
            # a mark may lie across two blocks; only that much is looked at again
            cut = max(0, len(rest) - len(END_OF_TEXT))
            parts.append(rest[:cut])
            tail = rest[cut:]
        yield Document(_trim("".join([*parts, tail]), head=not first, foot=False), tell())


def _trim(text: str, *, head: bool, foot: bool) -> str:
    if head:
        text = text.removeprefix("\r").removeprefix("\n")
    if foot:
        text = text.removesuffix("\n").removesuffix("\r")
    return text


def _read_lines(unit: Unit, text_field: str) -> Iterator[Document]:
    with open_stream(unit.path) as (stream, tell):
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield Document(parse_line(line, unit.name, number, text_field), tell())


def _open_parquet(unit: Unit):
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(
            f"reading {unit.name} needs pyarrow: pip install 'depthmix[parquet]'"
        ) from error
    try:
        return parquet.ParquetFile(unit.path)
    except ArrowException as error:
        raise ValueError(f"{unit.name} is not a Parquet file ({error}): get it anew") from error


def _read_parquet(unit: Unit, text_field: str) -> Iterator[Document]:
    check_columns(unit, text_field)
    with _open_parquet(unit) as table:
        num_rows, num_read = max(1, table.metadata.num_rows), 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                num_read += 1
                record = {text_field: text}
                place = f"{unit.name}, row {num_read}"
                offset_bytes = unit.num_bytes * num_read // num_rows
                yield Document(_take_field(record, text_field, place), offset_bytes)


def read_ids(unit: Unit) -> Iterator[tuple[np.ndarray, int]]:
    """A token file's items in blocks, with the offset on disk."""
    dtype = np.dtype(unit.dtype)
    with open_stream(unit.path) as (stream, tell):
        while block := stream.read(BLOCK_BYTES):
            if len(block) % dtype.itemsize:
                raise ValueError(
                    f"{unit.name} does not hold a whole number of {dtype.itemsize}-byte ids: it is "
                    f"cut off, or its ids have another size (see --token-dtype)"
                )
            yield np.frombuffer(block, dtype=dtype), tell()


def _read_tokens(unit: Unit, end_token: int) -> Iterator[Document]:
    parts: list[np.ndarray] = []
    offset_bytes = 0
    for block, offset_bytes in read_ids(unit):
        start = 0
        for end in np.flatnonzero(block == end_token).tolist():
            yield Document(np.concatenate([*parts, block[start:end]]), offset_bytes)
            parts, start = [], end + 1
        parts.append(block[start:])
    if parts:
        yield Document(np.concatenate(parts), offset_bytes)


def _read_hub(unit: Unit, text_field: str, num_skipped: int) -> Iterator[Document]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"reading {unit.name} needs datasets: pip install 'depthmix[datasets]'"
        ) from error
    name, config, split = split_hub_name(unit.name)
    records = None
    number = num_skipped
    while True:
        try:
            if records is None:
                dataset = load_dataset(name, config, split=split, streaming=True)
                records = iter(dataset.skip(num_skipped) if num_skipped else dataset)
            record = next(records, None)
        # the library and the network below it raise what they like
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ValueError(
                f"{unit.name} could not be read from the Hugging Face hub ({reason}): check the "
                f"name and the network, then run the same command again"
            ) from error
        if record is None:
            return
        number += 1
        yield Document(_take_field(record, text_field, f"{unit.name}, record {number}"), 0)


def split_hub_name(source: str) -> tuple[str, str | None, str]:
    """`hf:owner/name:config:split` → name, configuration (None: the only one) and split."""
    parts = source.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 3:
        raise ValueError(
            f"'{source}' is not a dataset: write hf:owner/name or hf:owner/name:config:split"
        )
    name, config, split = (*parts, "", "")[:3]
    return name, config or None, split or "train"
