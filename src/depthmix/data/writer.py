"""Documents' ids → the shards of one split, appended so that a killed process can go on.

Owns a shard's two files: `train-00000.bin` (ids) and `train-00000.idx` (where documents begin).
Does not know what is in the documents, nor when progress is recorded.
"""

import dataclasses
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from depthmix.data.folder import explain_writing
from depthmix.data.manifest import Shard, SplitSummary
from depthmix.files import PART, hash_file, sync_file, sync_folder

INDEX_DTYPE = np.dtype("<u8")


class ShardWriter:
    """Appends documents; `record` gives what a later writer needs to go on from there."""

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
        """With a `state` that `record` gave, goes on after it and drops what came later."""
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.end = np.array([end_token], dtype=self.dtype).tobytes()
        state = state or {}
        self.shards = [Shard(**shard) for shard in state.get("shards", [])]
        self.part_tokens: int = state.get("part_tokens", 0)
        self.part_documents: int = state.get("part_documents", 0)
        self.num_bytes: int | None = state.get("num_bytes", 0)
        self.last_bytes: int | None = state.get("last_bytes", 0)
        # of the document that is being written
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
        """Add a piece to the document that is being written."""
        assert ids.dtype == self.dtype
        # before a document and not after one, so that the last document is never in a closed shard
        if self.part_tokens >= self.shard_tokens:
            self._close_shard()
            self._open()
        with explain_writing(self.bin_path):
            self.bin.write(ids.tobytes())
        self.open_tokens += len(ids)
        self.open_bytes = add_bytes(self.open_bytes, num_bytes)

    def end_document(self) -> None:
        """Complete the document that is being written."""
        self.part_tokens += self.open_tokens + 1
        self.part_documents += 1
        with explain_writing(self.bin_path):
            self.bin.write(self.end)
            self.idx.write(np.array([self.part_tokens], dtype=INDEX_DTYPE).tobytes())
        self.last_bytes = self.open_bytes
        self.num_bytes = add_bytes(self.num_bytes, self.open_bytes)
        self.open_tokens, self.open_bytes = 0, 0

    def take_last(self) -> tuple[np.ndarray, int | None]:
        """Remove the last document and give it back, without its end token; only once."""
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
        """Put everything on the disk; plain data that says what is there."""
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
        """Let go of the files."""
        # what a full disk did not take was never recorded, and its sentence is on its way
        with suppress(OSError):
            self._files.close()

    @property
    def bin_path(self) -> Path:
        """Where the present shard's ids will be."""
        return self.folder / f"{self.split}-{len(self.shards):05d}.bin"

    @property
    def idx_path(self) -> Path:
        """Where the present shard's index will be."""
        return self.bin_path.with_suffix(".idx")

    def _part_paths(self) -> list[Path]:
        return [path.with_name(path.name + PART) for path in (self.bin_path, self.idx_path)]

    def _part_sizes(self) -> list[int]:
        """Bytes of the present shard's two files, up to the last complete document."""
        ids, entries = self.part_tokens, self.part_documents + 1
        return [ids * self.dtype.itemsize, entries * INDEX_DTYPE.itemsize]

    def _recover(self) -> None:
        """Undo what happened after the state: later shards, and the end of the present one."""
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
                        f"{part} is shorter than it was: remove {self.folder} and start anew"
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
        """Cut the files to the complete documents, and go on at their end."""
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
    """A sum of bytes, unknown as soon as one part is."""
    return None if total is None or part is None else total + part


def _open_part(path: Path) -> BinaryIO:
    # unlike "a+b", this mode may truncate; unlike "w+b", it keeps what is there
    path.touch()
    return open(path, "r+b", buffering=1 << 20)
