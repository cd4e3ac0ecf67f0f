"""The description of a data folder: `manifest.json` if complete, `unfinished.json` before that.

Defines the format and its version, compares a new request with the earlier one, and words the error
for a file that cannot be written.
"""

import dataclasses
import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.config import fields
from depthmix.files import PART, hash_content, hash_file, parse_json, replace_file
from depthmix.units import format_count, format_number

FORMAT = "depthmix-data"
VERSION = 1
MANIFEST_FILE = "manifest.json"
# the request and the progress of a folder being prepared
UNFINISHED_FILE = "unfinished.json"
SPLITS = ("train", "val")
"""What every folder has."""
TEST_SPLIT = "test"
"""An optional split: documents that nothing is tuned on."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of ids with its index of documents."""

    file: str
    index: str
    num_tokens: int
    num_documents: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """A split's totals and its shards in order."""

    num_tokens: int
    num_documents: int
    num_bytes: int | None
    """UTF-8 bytes of the text; None if unknown."""
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A complete data folder."""

    dtype: str
    vocab_size: int
    end_token: int
    tokenizer: str | None
    """Name of the tokenizer's file in the folder; None if the sources were ids without one."""
    sources: tuple[str, ...]
    num_skipped_files: int
    """Number of files in the sources' folders that are not text."""
    request: Mapping[str, Any]
    """The request, to recognise the same command."""
    splits: Mapping[str, SplitSummary]
    tokenizer_sha256: str | None = None
    """Sha256 of the tokenizer's file; None in folders prepared by an earlier release."""

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(self._to_tree(), indent=1, ensure_ascii=False) + "\n"

    @property
    def hash(self) -> str:
        """Sha256 of this manifest, which covers every shard and the tokenizer by their hashes."""
        text = json.dumps(
            self._to_tree(), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        return hash_content(text)

    def _to_tree(self) -> dict[str, Any]:
        tree = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        # left out, so that the hash of an older folder stays the one that its runs recorded
        return {n: v for n, v in tree.items() if n != "tokenizer_sha256" or v is not None}

    def describe(self) -> list[str]:
        """Each split's size, in words."""
        return [
            f"{name}: {format_number(split.num_tokens)} tokens in "
            f"{format_count(split.num_documents, 'document')}"
            for name, split in self.splits.items()
        ]

    def check_tokenizer(self, folder: Path) -> None:
        """Refuse a folder whose tokenizer is missing or did not make its ids."""
        if self.tokenizer is None:
            return
        path = folder / self.tokenizer
        if not path.is_file():
            raise ValueError(f"{path} is missing: prepare the folder again")
        # if a tokenizer was given, every release has recorded its hash in the request
        wanted = self.tokenizer_sha256 or self.request.get("tokenizer")
        if wanted is not None and hash_file(path) != wanted:
            raise ValueError(
                f"{path} is not the tokenizer that made the ids in this folder (its sha256 differs "
                f"from the manifest's): restore that one, or prepare the folder again"
            )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete folder; the error for any other says what to do."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        if not folder.exists():
            raise ValueError(
                f"there is no data folder {folder}: make one with `depthmix prepare SOURCE`"
            )
        if (folder / UNFINISHED_FILE).is_file():
            raise ValueError(
                f"the data folder {folder} is not finished: run the same `depthmix prepare` "
                f"command again to resume"
            )
        raise ValueError(
            f"{folder} is not a data folder (it has no {MANIFEST_FILE}): make one with "
            f"`depthmix prepare SOURCE`"
        )
    try:
        tree = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): prepare the folder again") from error
    return parse_manifest(tree, path)


def parse_manifest(tree: Any, path: Path) -> Manifest:
    """Plain data → a manifest; `path` is where it came from."""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ValueError(
            f"{path} was not written by depthmix: choose a folder made by `depthmix prepare`"
        )
    if tree.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {tree.get('version')}, but this depthmix reads version {VERSION}: "
            f"use the depthmix that made it, or prepare the folder again"
        )
    try:
        present = [*SPLITS, *([TEST_SPLIT] if TEST_SPLIT in tree["splits"] else [])]
        splits = {name: _parse_split(tree["splits"][name]) for name in present}
        names = [name for s in splits.values() for x in s.shards for name in (x.file, x.index)]
        tokenizer = tree["tokenizer"]
        names += [tokenizer] if tokenizer is not None else []
        # a manifest is untrusted and must not refer to files outside of its folder
        if any(Path(name).name != name for name in names):
            raise ValueError("it names a file outside its folder")
        if tree["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"there is no dtype '{tree['dtype']}'")
        return Manifest(
            dtype=tree["dtype"],
            vocab_size=int(tree["vocab_size"]),
            end_token=int(tree["end_token"]),
            tokenizer=tokenizer,
            sources=tuple(tree["sources"]),
            num_skipped_files=int(tree["num_skipped_files"]),
            request=dict(tree["request"]),
            splits=splits,
            tokenizer_sha256=_parse_hash(tree.get("tokenizer_sha256")),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged ({reason}): prepare the folder again") from error


def _parse_hash(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("tokenizer_sha256 is not a string")
    return value


def _parse_split(tree: Mapping[str, Any]) -> SplitSummary:
    shards = tuple(fields.build(Shard, shard) for shard in tree["shards"])
    num_bytes = tree["num_bytes"]
    summary = SplitSummary(
        num_tokens=int(tree["num_tokens"]),
        num_documents=int(tree["num_documents"]),
        num_bytes=None if num_bytes is None else int(num_bytes),
        shards=shards,
    )
    sums = (sum(s.num_tokens for s in shards), sum(s.num_documents for s in shards))
    if sums != (summary.num_tokens, summary.num_documents):
        raise ValueError("its shards do not add up")
    return summary


@contextmanager
def explain_writing(path: Path) -> Iterator[None]:
    """Turn a write error of the system into a sentence that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free some space or choose another folder"
        elif error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise OSError(
                f"cannot write {path} ({reason}): it is a file or is below one; choose another "
                f"folder"
            ) from error
        else:
            remedy = "fix that or choose another folder"
        raise OSError(
            f"cannot write {path} ({reason}): {remedy}, then run the same command again to resume"
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Replace a file of the folder atomically."""
    with explain_writing(path):
        replace_file(path, content)


def find_finished(folder: Path, request: dict[str, Any]) -> Manifest | None:
    """The manifest if the same request was completed; None if there is work to do."""
    if not (folder / MANIFEST_FILE).exists():
        return None
    manifest = read_manifest(folder)
    _compare(folder, "holds data that was", dict(manifest.request), request)
    # a process may be killed between its last two steps
    forget_unfinished(folder)
    return manifest


def claim_folder(folder: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Claim a folder for a request; returns the progress of an earlier run of the same request."""
    path = folder / UNFINISHED_FILE
    if path.exists():
        try:
            tree = parse_json(path.read_bytes())
            format, before, state = tree["format"], tree["request"], tree["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: remove {folder} and start again") from error
        if format != [FORMAT, VERSION]:
            raise ValueError(
                f"{path} is from another version of depthmix: remove {folder} and start again"
            )
        _compare(folder, "is half", before, request)
        return state
    if any(entry.name != UNFINISHED_FILE + PART for entry in folder.iterdir()):
        raise ValueError(f"the folder {folder} contains other files: choose a new or an empty one")
    write_unfinished(folder, request, None)
    return None


def write_unfinished(folder: Path, request: dict[str, Any], state: dict[str, Any] | None) -> None:
    """Record the progress."""
    tree = {"format": [FORMAT, VERSION], "request": request, "state": state}
    write_file(folder / UNFINISHED_FILE, json.dumps(tree).encode())


def forget_unfinished(folder: Path) -> None:
    """Remove the record of progress."""
    for name in (UNFINISHED_FILE, UNFINISHED_FILE + PART):
        (folder / name).unlink(missing_ok=True)


def _compare(folder: Path, verb: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not changed:
        return
    hashed = ("sources", "val_sources", "test_sources", "tokenizer")
    details = [
        f"other {name.replace('_', ' ')}"
        if name in hashed
        else f"--{name.replace('_', '-')} {before.get(name)}, not {now.get(name)}"
        for name in changed
    ]
    raise ValueError(
        f"the folder {folder} {verb} prepared with {', '.join(details)}: choose another folder, or "
        f"remove this one"
    )
