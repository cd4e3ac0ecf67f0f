"""A SOURCE as a command line names it → units to read, checked before any work.

Owns what a source can be: a file, a folder, `hf:owner/name`, `stdlib`. Does not read documents
beyond their check, and knows nothing of splits or of tokenizers.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from depthmix.data.readers import (
    COMPRESSIONS,
    Kind,
    Unit,
    check_columns,
    decode_blocks,
    open_stream,
    parse_line,
    read_ids,
    split_hub_name,
)
from depthmix.data.stdlib import list_stdlib

TOKEN_DTYPES = {"uint16": "<u2", "uint32": "<u4"}

# what is looked at of each file beforehand: all of most files, and little of a huge corpus
CHECK_BYTES = 1 << 24

LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
TOKEN_SUFFIXES = {".u16": "uint16", ".u32": "uint32", ".bin": None}


class Listing(NamedTuple):
    """What a source holds, and how many of a folder's files were no text."""

    units: tuple[Unit, ...]
    num_skipped: int


def list_source(
    source: str,
    *,
    text_field: str = "text",
    token_dtype: str | None = None,
    exclude: Path | None = None,
) -> Listing:
    """The units of a source, in a fixed order; whatever is wrong with it is said here.

    `exclude` is a folder to stay out of: the one that is being written.
    """
    if source == "stdlib":
        return Listing(tuple(list_stdlib()), 0)
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


def check_unit(unit: Unit, text_field: str) -> Unit:
    """Refuse a file that cannot be what its name says; a token file learns its largest id."""
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
            raise ValueError(f"{path} is a packed Parquet file: unpack it first")
    elif suffix in TOKEN_SUFFIXES:
        kind = "tokens"
        known = TOKEN_SUFFIXES[suffix] or token_dtype
        if known is None:
            raise ValueError(
                f"{path} does not say how large its ids are: add --token-dtype uint16 or uint32"
            )
        if known not in TOKEN_DTYPES:
            raise ValueError(f"there is no token dtype '{known}': use uint16 or uint32")
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
            f"the folder {folder} holds no text{beside}: it needs text, JSON lines or Parquet files"
        )
    return Listing(tuple(units), num_skipped)


def _walk(folder: Path, exclude: Path | None) -> Iterator[Path]:
    """Files below a folder, hidden ones left out."""
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
    """Whether a file that nobody named looks like text."""
    try:
        empty = True
        for text in _read_beginning(unit):
            empty = False
            # many binary formats decode by chance, few are without a zero
            if "\0" in text:
                return False
    except ValueError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        return False
    return not empty


def _has_lines(unit: Unit, text_field: str) -> bool:
    """Whether a `.json` file is JSON lines with the field, and not one JSON text."""
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
