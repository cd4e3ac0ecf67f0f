"""What a data folder says of itself: `manifest.json`, as values.

Owns the format's names and version, and the check that a manifest is one. Does not open shards.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.config import fields

FORMAT = "depthmix-data"
VERSION = 1
MANIFEST_FILE = "manifest.json"
# the request and the progress of a folder that is being prepared
UNFINISHED_FILE = "unfinished.json"
SPLITS = ("train", "val")


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
    """UTF-8 bytes of its text; None where nobody knows."""
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A complete data folder."""

    dtype: str
    vocab_size: int
    end_token: int
    tokenizer: str | None
    """Name of the tokenizer's file in the folder; None where the ids came ready-made."""
    sources: tuple[str, ...]
    num_skipped_files: int
    """Files in the sources' folders that are no text."""
    request: Mapping[str, Any]
    """What was asked for, so that the same command is recognised."""
    splits: Mapping[str, SplitSummary]

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        tree = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"

    @property
    def hash(self) -> str:
        """Sha256 over everything here, and so over every shard."""
        tree = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete folder; anything else is refused with what to do."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        if not folder.exists():
            raise ValueError(
                f"there is no data folder {folder}: make one with `depthmix prepare SOURCE`"
            )
        if (folder / UNFINISHED_FILE).is_file():
            raise ValueError(
                f"the data folder {folder} is not finished: run the same `depthmix prepare` "
                f"command again, it goes on where it stopped"
            )
        raise ValueError(
            f"{folder} is not a data folder (it has no {MANIFEST_FILE}): make one with "
            f"`depthmix prepare SOURCE`"
        )
    try:
        tree = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): prepare the folder anew") from error
    return parse_manifest(tree, path)


def parse_manifest(tree: Any, path: Path) -> Manifest:
    """Plain data → a manifest; `path` is where it came from."""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not of depthmix: choose a folder that `depthmix prepare` has made"
        )
    if tree.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {tree.get('version')}, and this depthmix reads version {VERSION}: "
            f"use the depthmix that made it, or prepare the folder anew"
        )
    try:
        splits = {name: _parse_split(tree["splits"][name]) for name in SPLITS}
        names = [name for s in splits.values() for x in s.shards for name in (x.file, x.index)]
        tokenizer = tree["tokenizer"]
        names += [tokenizer] if tokenizer is not None else []
        # a manifest may come from anywhere, and must not lead out of its folder
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
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged ({reason}): prepare the folder anew") from error


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
