"""Sources: expand a source into units, check them, and read their documents.

A source is a file, a folder, `hf:owner/name` or `stdlib`; formats are text, JSON lines, Parquet,
token files, compressed files and Hugging Face datasets. All units are checked before any work
begins. Documents are streamed in order, in little memory.
"""

import codecs
import gzip
import json
import lzma
import os
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from depthmix.data import stdlib
from depthmix.data.tokenizer import END_OF_TEXT, say_why
from depthmix.files import hash_content

Kind = Literal["text", "jsonl", "parquet", "tokens", "hub", "made"]

COMPRESSIONS = (".gz", ".xz")
LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
TOKEN_SUFFIXES = {".u16": "uint16", ".u32": "uint32", ".bin": None}
TOKEN_DTYPES = {"uint16": "<u2", "uint32": "<u4"}

BLOCK_BYTES = 1 << 22
# how much of each file is checked beforehand: all of most files, but little of a huge corpus
CHECK_BYTES = 1 << 24


class Document(NamedTuple):
    """Text, or ids without their end token, and the offset on disk where it ends."""

    content: str | np.ndarray
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A file, a dataset or a generated text, read from its beginning."""

    kind: Kind
    name: str
    """For messages: the path as it was given, or the dataset's name."""
    key: str
    """For comparison: independent of where the source is."""
    num_bytes: int = 0
    """Size on disk; 0 if unknown."""
    path: Path = Path()
    dtype: str = ""
    """Dtype of a token file's items, in numpy's notation."""
    largest_id: int = -1
    """The largest id of a token file."""
    make: Callable[[], list[str]] | None = None
    """Generates the documents of a `made` unit."""


class Listing(NamedTuple):
    """The units of a source, and how many of a folder's files were not text."""

    units: tuple[Unit, ...]
    num_skipped: int


def list_source(
    source: str,
    *,
    text_field: str = "text",
    token_dtype: str | None = None,
    exclude: Path | None = None,
) -> Listing:
    """The units of a source in a fixed order; anything wrong with it is reported here.

    `exclude` is a folder to skip: the one that is being written.
    """
    if source == "stdlib":
        return Listing(tuple(_list_stdlib()), 0)
    if source.startswith("hf:"):
        split_hub_name(source)
        return Listing((Unit(kind="hub", name=source, key=source),), 0)
    path = Path(source).expanduser()
    if path.is_dir():
        return _list_folder(path, text_field, exclude)
    if not path.exists():
        raise ValueError(
            f"there is no file or folder {source}: check the path (a dataset of the Hugging Face "
            f"hub is written hf:owner/name)"
        )
    if not path.is_file():
        raise ValueError(f"{source} is neither a file nor a folder")
    unit = _describe_file(path, path.name, token_dtype)
    if unit.num_bytes == 0:
        raise ValueError(f"{source} is empty: there is nothing to prepare")
    return Listing((check_unit(unit, text_field),), 0)


def hash_units(units: Iterable[Unit]) -> str | None:
    """An identity for a list of units, from their names below their source and their sizes."""
    listed = [[unit.kind, unit.key, unit.num_bytes, unit.dtype] for unit in units]
    return hash_content(json.dumps(listed)) if listed else None


def check_unit(unit: Unit, text_field: str) -> Unit:
    """Refuse a file that does not match its name; find the largest id of a token file."""
    if unit.kind == "parquet":
        check_columns(unit, text_field)
    elif unit.kind == "jsonl":
        _check_lines(unit, text_field)
    elif unit.kind == "tokens":
        largest = max((int(block.max()) for block, _ in read_ids(unit)), default=-1)
        if largest < 0:
            raise ValueError(f"{unit.name} is empty: there is nothing to prepare")
        return replace(unit, largest_id=largest)
    elif unit.kind == "text" and not any(_read_beginning(unit)):
        raise ValueError(f"{unit.name} is empty: there is nothing to prepare")
    return unit


def _describe_file(path: Path, key: str, token_dtype: str | None) -> Unit:
    packed = path.suffix.lower() in COMPRESSIONS
    suffix = (path.with_suffix("") if packed else path).suffix.lower()
    kind: Kind = "text"
    dtype = ""
    if suffix in LINE_SUFFIXES:
        kind = "jsonl"
    elif suffix == ".parquet":
        kind = "parquet"
        if packed:
            raise ValueError(f"{path} is a compressed Parquet file: decompress it first")
    elif suffix in TOKEN_SUFFIXES:
        kind = "tokens"
        known = TOKEN_SUFFIXES[suffix] or token_dtype
        if known is None:
            raise ValueError(
                f"{path} does not record the size of its ids: add --token-dtype uint16 or uint32"
            )
        if known not in TOKEN_DTYPES:
            raise ValueError(f"unknown token dtype '{known}': use uint16 or uint32")
        dtype = TOKEN_DTYPES[known]
    size = path.stat().st_size
    return Unit(kind=kind, name=str(path), key=key, num_bytes=size, path=path, dtype=dtype)


def _list_folder(folder: Path, text_field: str, exclude: Path | None) -> Listing:
    units, num_skipped = [], 0
    for path in sorted(_walk(folder, exclude), key=lambda p: p.relative_to(folder).parts):
        if path.stat().st_size == 0:
            continue
        suffixes = [suffix.lower() for suffix in path.suffixes]
        if any(suffix in TOKEN_SUFFIXES for suffix in suffixes[-2:]):
            num_skipped += 1
            continue
        unit = _describe_file(path, path.relative_to(folder).as_posix(), None)
        if unit.kind == "jsonl" and ".json" in suffixes[-2:] and not _has_lines(unit, text_field):
            unit = replace(unit, kind="text")
        if unit.kind == "text" and not _is_text(unit):
            num_skipped += 1
            continue
        units.append(check_unit(unit, text_field))
    if not units:
        beside = f" ({num_skipped} binary files were skipped)" if num_skipped else ""
        raise ValueError(
            f"the folder {folder} has no text{beside}: it needs text, JSON lines or Parquet files"
        )
    return Listing(tuple(units), num_skipped)


def _list_stdlib() -> list[Unit]:
    """The standard library as units: its source files, help topics and module documentation."""
    files = stdlib.find_files()
    units = []
    for name, path, num_bytes in files:
        if name != stdlib.TOPICS and num_bytes and stdlib.is_text(path):
            key = f"stdlib/{name}"
            units.append(Unit(kind="text", name=str(path), key=key, num_bytes=num_bytes, path=path))
    if not units:
        raise ValueError(
            f"there are no source files in {sysconfig.get_path('stdlib')}, so the source 'stdlib' "
            f"is empty here: give a text file or a folder"
        )
    version = platform.python_version()
    topics = [path for name, path, _ in files if name == stdlib.TOPICS]
    render = partial(stdlib.render_topics, topics[0]) if topics else list
    made = {"topics": render, "modules": stdlib.render_modules}
    for name, make in made.items():
        label = f"{name} of Python {version}"
        units.append(Unit(kind="made", name=label, key=f"stdlib/{label}", make=make))
    return units


def _walk(folder: Path, exclude: Path | None) -> Iterator[Path]:
    """Files below a folder, except hidden ones."""
    for root, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and Path(root, name).resolve() != exclude
        ]
        for name in names:
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read_beginning(unit: Unit) -> Iterator[str]:
    num_read = 0
    with open_stream(unit.path) as (stream, _):
        for text in decode_blocks(stream, unit.name):
            yield text
            num_read += len(text)
            if num_read >= CHECK_BYTES:
                return


def _is_text(unit: Unit) -> bool:
    """Whether a file found in a folder looks like text."""
    try:
        empty = True
        for text in _read_beginning(unit):
            empty = False
            # many binary formats decode by chance, but few have no zero byte
            if "\0" in text:
                return False
    except ValueError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        return False
    return not empty


def _has_lines(unit: Unit, text_field: str) -> bool:
    """Whether a `.json` file is JSON lines with the field, rather than one JSON document."""
    try:
        with open_stream(unit.path) as (stream, _):
            parse_line(stream.readline(CHECK_BYTES), unit.name, 1, text_field)
    except ValueError:
        return False
    return True


def _check_lines(unit: Unit, text_field: str) -> None:
    num_read, empty = 0, True
    with open_stream(unit.path) as (stream, _):
        for number, line in enumerate(stream, 1):
            if line.strip():
                parse_line(line, unit.name, number, text_field)
                empty = False
            num_read += len(line)
            if num_read >= CHECK_BYTES:
                break
    if empty:
        raise ValueError(f"{unit.name} is empty: there is nothing to prepare")


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
    """A file's decompressed bytes, and a function that returns the bytes read on disk."""
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
            raise ValueError(f"{path} is damaged ({error}): download it again") from error


def decode_blocks(stream: BufferedIOBase, name: str) -> Iterator[str]:
    """A stream's UTF-8 text in blocks."""
    # a leading byte order mark is not part of the text
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
    """The text of one line of a JSON lines file; null means an empty text."""
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
    """Refuse a Parquet file without the text column, before reading it."""
    columns = _open_parquet(unit).schema_arrow.names
    if text_field not in columns:
        raise ValueError(
            f"{unit.name} has no column '{text_field}' (its columns are {', '.join(columns)}): "
            f"name another with --text-field"
        )


def clean_text(text: str) -> str:
    """Replace lone surrogates, which JSON can represent and UTF-8 cannot."""
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
    """Documents between `<|endoftext|>` marks; a newline next to a mark belongs to the mark."""
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
            # a mark may span two blocks, so keep that much of the first
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
        raise ValueError(
            f"{unit.name} is not a Parquet file ({error}): download it again"
        ) from error


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
                    f"{unit.name} does not contain a whole number of {dtype.itemsize}-byte ids: it "
                    f"is cut off, or its ids have another size (see --token-dtype)"
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
        # the library and its network stack raise many types
        except Exception as error:
            raise ValueError(
                f"{unit.name} could not be read from the Hugging Face hub ({say_why(error)}): "
                f"check the name and the network, then run the same command again"
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
