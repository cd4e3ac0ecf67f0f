"""Shards: the ids of a split on disk, written document by document and memory-mapped for reading.

A shard has two files, `train-00000.bin` (ids) and `train-00000.idx` (where documents begin). A
writer that is killed at any time can resume, and a folder is opened only if all its files are
complete.
"""

import dataclasses
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from jaxtyping import Int, Int64

from depthmix.data.manifest import (
    TEST_SPLIT,
    Manifest,
    Shard,
    SplitSummary,
    explain_writing,
    read_manifest,
)
from depthmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from depthmix.files import PART, hash_file, replace_file, sync_file, sync_folder

if TYPE_CHECKING:
    import tokenizers

__all__ = ["Corpus", "ShardWriter", "Split"]

INDEX_DTYPE = np.dtype("<u8")


class ShardWriter:
    """Appends documents; `record` returns the state that a later writer needs to resume."""

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        dtype: str,
        end_token: int,
        shard_tokens: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """With a `state` from `record`, resume there and drop everything later."""
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.end = np.array([end_token], dtype=self.dtype).tobytes()
        state = state or {}
        self.shards = [Shard(**shard) for shard in state.get("shards", [])]
        self.part_tokens: int = state.get("part_tokens", 0)
        self.part_documents: int = state.get("part_documents", 0)
        self.num_bytes: int | None = state.get("num_bytes", 0)
        self.last_bytes: int | None = state.get("last_bytes", 0)
        # the document being written
        self.open_tokens: int = 0
        self.open_bytes: int | None = 0
        self._recover()
        self._open()

    @property
    def num_tokens(self) -> int:
        """Tokens of complete documents."""
        return sum(s.num_tokens for s in self.shards) + self.part_tokens

    @property
    def num_documents(self) -> int:
        """Complete documents."""
        return sum(s.num_documents for s in self.shards) + self.part_documents

    def append(self, ids: np.ndarray, num_bytes: int | None) -> None:
        """Add a piece to the document being written."""
        assert ids.dtype == self.dtype
        # before a document, not after one, so that the last document is never in a closed shard
        if self.part_tokens >= self.shard_tokens:
            self._close_shard()
            self._open()
        with explain_writing(self.bin_path):
            self.bin.write(ids.tobytes())
        self.open_tokens += len(ids)
        self.open_bytes = add_bytes(self.open_bytes, num_bytes)

    def end_document(self) -> None:
        """Complete the document being written."""
        self.part_tokens += self.open_tokens + 1
        self.part_documents += 1
        with explain_writing(self.bin_path):
            self.bin.write(self.end)
            self.idx.write(np.array([self.part_tokens], dtype=INDEX_DTYPE).tobytes())
        self.last_bytes = self.open_bytes
        self.num_bytes = add_bytes(self.num_bytes, self.open_bytes)
        self.open_tokens, self.open_bytes = 0, 0

    def take_last(self) -> tuple[np.ndarray, int | None]:
        """Remove and return the last document, without its end token; works only once."""
        assert self.part_documents > 0
        assert self.open_tokens == 0
        with explain_writing(self.bin_path):
            self.idx.flush()
            self.bin.flush()
            self.idx.seek(INDEX_DTYPE.itemsize * (self.part_documents - 1))
            start = int(np.frombuffer(self.idx.read(INDEX_DTYPE.itemsize), INDEX_DTYPE)[0])
            self.bin.seek(start * self.dtype.itemsize)
            ids = np.frombuffer(self.bin.read(), dtype=self.dtype)[:-1]
        num_bytes = self.last_bytes
        self.part_tokens, self.part_documents = start, self.part_documents - 1
        if self.num_bytes is not None and num_bytes is not None:
            self.num_bytes -= num_bytes
        self._truncate()
        return ids, num_bytes

    def record(self) -> dict[str, Any]:
        """Flush everything to disk; returns what is there as plain data."""
        assert self.open_tokens == 0
        with explain_writing(self.bin_path):
            sync_file(self.bin)
            sync_file(self.idx)
        return {
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
            "part_tokens": self.part_tokens,
            "part_documents": self.part_documents,
            "num_bytes": self.num_bytes,
            "last_bytes": self.last_bytes,
        }

    def finish(self) -> SplitSummary:
        """Complete the last shard."""
        if self.part_documents:
            self._close_shard()
        else:
            self.close()
            for path in self._part_paths():
                path.unlink()
        return SplitSummary(
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_bytes=self.num_bytes,
            shards=tuple(self.shards),
        )

    def close(self) -> None:
        """Close the files."""
        # on a full disk, unwritten data was never recorded, and its error is already being raised
        with suppress(OSError):
            self._files.close()

    @property
    def bin_path(self) -> Path:
        """Path of the current shard's ids."""
        return self.folder / f"{self.split}-{len(self.shards):05d}.bin"

    @property
    def idx_path(self) -> Path:
        """Path of the current shard's index."""
        return self.bin_path.with_suffix(".idx")

    def _part_paths(self) -> list[Path]:
        return [path.with_name(path.name + PART) for path in (self.bin_path, self.idx_path)]

    def _part_sizes(self) -> list[int]:
        """Bytes of the current shard's two files, up to the last complete document."""
        ids, entries = self.part_tokens, self.part_documents + 1
        return [ids * self.dtype.itemsize, entries * INDEX_DTYPE.itemsize]

    def _recover(self) -> None:
        """Undo everything after the state: later shards, and the end of the current one."""
        kept = {name for shard in self.shards for name in (shard.file, shard.index)}
        if self.part_documents:
            paths = (self.bin_path, self.idx_path)
            parts = zip(paths, self._part_paths(), self._part_sizes(), strict=True)
            for path, part, size in parts:
                kept.add(part.name)
                if path.exists():
                    os.replace(path, part)
                if not part.exists() or part.stat().st_size < size:
                    raise ValueError(
                        f"{part} is shorter than it was: remove {self.folder} and start again"
                    )
        for path in self.folder.glob(f"{self.split}-[0-9]*"):
            if path.name not in kept:
                path.unlink()

    def _open(self) -> None:
        with explain_writing(self.bin_path):
            self._files = ExitStack()
            self.bin, self.idx = (
                self._files.enter_context(_open_part(part)) for part in self._part_paths()
            )
            if self.part_documents == 0:
                self.idx.write(bytes(INDEX_DTYPE.itemsize))
        self._truncate()

    def _truncate(self) -> None:
        """Truncate the files to complete documents, and continue at their end."""
        for file, size in zip((self.bin, self.idx), self._part_sizes(), strict=True):
            with explain_writing(Path(file.name)):
                file.flush()
                file.seek(size)
                file.truncate()

    def _close_shard(self) -> None:
        assert self.open_tokens == 0
        with explain_writing(self.bin_path):
            sync_file(self.bin)
            sync_file(self.idx)
            self.close()
            hashes = [hash_file(part) for part in self._part_paths()]
            for path, part in zip((self.bin_path, self.idx_path), self._part_paths(), strict=True):
                os.replace(part, path)
            sync_folder(self.folder)
        shard = Shard(
            file=self.bin_path.name,
            index=self.idx_path.name,
            num_tokens=self.part_tokens,
            num_documents=self.part_documents,
            sha256=hashes[0],
            index_sha256=hashes[1],
        )
        self.shards.append(shard)
        self.part_tokens = self.part_documents = 0


def add_bytes(total: int | None, part: int | None) -> int | None:
    """A sum of bytes; None if any part is unknown."""
    return None if total is None or part is None else total + part


def _open_part(path: Path) -> BinaryIO:
    # unlike "a+b", this mode can truncate; unlike "w+b", it keeps the content
    path.touch()
    return open(path, "r+b", buffering=1 << 20)


# hashing this much takes a second or two
FULL_CHECK_BYTES = 2**30


class Split:
    """The documents of one split, numbered across its shards."""

    def __init__(self, folder: Path, name: str, summary: SplitSummary, dtype: str) -> None:
        """Map the shards, without reading them."""
        self.name = name
        self.num_tokens = summary.num_tokens
        self.num_documents = summary.num_documents
        self.num_bytes = summary.num_bytes
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._files = [folder / shard.file for shard in summary.shards]
        self._maps = [_map_file(path) for path in self._files]
        self._shards = [np.frombuffer(mapped, dtype=self._dtype) for mapped in self._maps]
        self._indices = [folder / shard.index for shard in summary.shards]
        counts = [shard.num_tokens for shard in summary.shards]
        # number of each shard's first token, and the total number of tokens
        self._shard_starts = np.cumsum([0, *counts], dtype=np.int64)

    @cached_property
    def document_starts(self) -> Int64[np.ndarray, "documents_plus_1"]:
        """Number of the first token of each document in the split; the last entry is the total."""
        parts = [np.zeros(1, dtype=np.int64)]
        for number, path in enumerate(self._indices):
            offsets = np.fromfile(path, dtype=INDEX_DTYPE).astype(np.int64)
            num_tokens = len(self._shards[number])
            if offsets[0] != 0 or offsets[-1] != num_tokens or (np.diff(offsets) <= 0).any():
                raise ValueError(f"{path} does not fit its shard: prepare the folder again")
            parts.append(offsets[1:] + self._shard_starts[number])
        return np.concatenate(parts)

    @cached_property
    def document_lengths(self) -> Int64[np.ndarray, "documents"]:
        """Tokens of each document, including its end token."""
        return np.diff(self.document_starts)

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token, counting end tokens; None if unknown."""
        return self.num_bytes / self.num_tokens if self.num_bytes and self.num_tokens else None

    def read(self, document_number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ids `start` to `stop` of a document; the last one is its end token."""
        if not 0 <= document_number < self.num_documents:
            raise IndexError(
                f"there is no document {document_number} in '{self.name}', which has "
                f"{self.num_documents}"
            )
        first, after = self.document_starts[document_number : document_number + 2].tolist()
        start, stop, _ = slice(start, stop).indices(after - first)
        shard = int(np.searchsorted(self._shard_starts, first, side="right")) - 1
        offset = first - int(self._shard_starts[shard])
        return self._find_shard(shard)[offset + start : offset + stop]

    def gather(self, numbers: Int64[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """The ids at the given token numbers of the split, as int64."""
        if len(self._shards) == 1:
            return self._find_shard(0)[numbers].astype(np.int64)
        ids = np.empty(numbers.shape, dtype=np.int64)
        shards = np.searchsorted(self._shard_starts, numbers, side="right") - 1
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            ids[chosen] = self._find_shard(shard)[numbers[chosen] - self._shard_starts[shard]]
        return ids

    def _find_shard(self, number: int) -> np.ndarray:
        # reading a map beyond the end of a truncated file would kill the process
        if self._maps[number].size() < self._shards[number].nbytes:
            raise ValueError(
                f"{self._files[number]} was cut short while it was in use: copy it again, or "
                f"prepare the folder again"
            )
        return self._shards[number]


class Corpus:
    """A data folder whose files have been checked."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Use `Corpus.open`, which checks the folder."""
        self.folder, self.manifest = folder, manifest
        self.vocab_size = manifest.vocab_size
        self.end_token = manifest.end_token
        self.manifest_hash = manifest.hash
        self._stamps = {path: _stamp(path) for path, _, _ in self._list_shards()}

    @staticmethod
    def open(folder: str | Path, *, verify: Literal["size", "full", "auto"] = "size") -> "Corpus":
        """Open a folder after checking every file's size or, with "full", its content.

        "auto" checks the content of up to `FULL_CHECK_BYTES`, and otherwise only the sizes.
        """
        folder = Path(folder).expanduser()
        manifest = read_manifest(folder)
        itemsize = np.dtype(manifest.dtype).itemsize
        if verify == "auto":
            num_bytes = itemsize * sum(split.num_tokens for split in manifest.splits.values())
            verify = "full" if num_bytes <= FULL_CHECK_BYTES else "size"
        for split in manifest.splits.values():
            for shard in split.shards:
                files = (
                    (shard.file, shard.num_tokens * itemsize, shard.sha256),
                    (
                        shard.index,
                        (shard.num_documents + 1) * INDEX_DTYPE.itemsize,
                        shard.index_sha256,
                    ),
                )
                for name, size, sha256 in files:
                    _check_file(folder / name, size, sha256 if verify == "full" else None)
        manifest.check_tokenizer(folder)
        return Corpus(folder, manifest)

    def check_unchanged(self) -> None:
        """Refuse shards that have changed since they were opened; fast if they were not touched."""
        for path, size, sha256 in self._list_shards():
            found = _stamp(path)
            if found != self._stamps[path]:
                # a file that was touched or copied again may still be the same
                _check_file(path, size, sha256)
                self._stamps[path] = found

    def _list_shards(self) -> Iterator[tuple[Path, int, str]]:
        """File, size in bytes and sha256 of every shard."""
        itemsize = np.dtype(self.manifest.dtype).itemsize
        for split in self.manifest.splits.values():
            for shard in split.shards:
                yield self.folder / shard.file, shard.num_tokens * itemsize, shard.sha256

    def split(self, name: str) -> Split:
        """The split `train` or `val`, or `test` if there is one."""
        if name == TEST_SPLIT and name not in self.manifest.splits:
            raise ValueError(
                f"{self.folder} has no test split: prepare the text again, in another folder, with "
                f"--test-fraction 0.02 or --test SOURCE"
            )
        if name not in self.manifest.splits:
            raise ValueError(f"there is no split '{name}': use {' or '.join(self.manifest.splits)}")
        return Split(self.folder, name, self.manifest.splits[name], self.manifest.dtype)

    def load_tokenizer(self) -> "tokenizers.Tokenizer":
        """The tokenizer that made the ids."""
        if self.manifest.tokenizer is None:
            raise ValueError(
                f"{self.folder} was prepared from ids without a tokenizer: prepare it again with "
                f"--tokenizer to turn ids into text"
            )
        return load_tokenizer(self.folder / self.manifest.tokenizer)

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer's file to another folder, unless it already has one."""
        copy, name = folder / TOKENIZER_FILE, self.manifest.tokenizer
        if name is not None and not copy.exists():
            replace_file(copy, (self.folder / name).read_bytes())

    def describe_origin(self) -> dict[str, Any]:
        """What a run records about its data, to find and recognise it later."""
        name = self.manifest.tokenizer
        return {
            "folder": str(self.folder.resolve()),
            "hash": self.manifest_hash,
            "end_token": self.end_token,
            "tokenizer_hash": None if name is None else hash_file(self.folder / name),
        }

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token of the training split; None if unknown."""
        train = self.manifest.splits["train"]
        return train.num_bytes / train.num_tokens if train.num_bytes and train.num_tokens else None


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Size and times, which change when a file does; None if it is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_file(path: Path, size: int, sha256: str | None) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing: copy it again, or prepare the folder again")
    found = path.stat().st_size
    if found != size:
        raise ValueError(
            f"{path} has {found} bytes, but the manifest says {size}: copy it again, or "
            f"prepare the folder again"
        )
    if sha256 is not None and hash_file(path) != sha256:
        raise ValueError(
            f"{path} has changed (its sha256 differs from the manifest's): copy it again, "
            f"or prepare the folder again"
        )
