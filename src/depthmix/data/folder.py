"""A data folder while it is made: whose it is, how far it is, and what to do when it is full.

Owns the comparison of what is asked now with what was asked then, and the sentence for a file that
cannot be written. Does not do the work.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from depthmix.data.manifest import (
    FORMAT,
    MANIFEST_FILE,
    UNFINISHED_FILE,
    VERSION,
    Manifest,
    read_manifest,
)
from depthmix.data.readers import Unit
from depthmix.files import PART, replace_file


@contextmanager
def explain_writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write into a sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write {path} ({error.strerror or error}): make room or choose another folder, "
            f"and run the same command again; it goes on where it stopped"
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Replace a file of the folder by new content, in one step."""
    with explain_writing(path):
        replace_file(path, content)


def hash_units(units: Iterable[Unit]) -> str | None:
    """One name for a list of units: their names below their source, and their sizes."""
    listed = [[unit.kind, unit.key, unit.num_bytes, unit.dtype] for unit in units]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest() if listed else None


def find_finished(folder: Path, request: dict[str, Any]) -> Manifest | None:
    """The manifest where the same request was completed; None where there is work to do."""
    if not (folder / MANIFEST_FILE).exists():
        return None
    manifest = read_manifest(folder)
    _compare(folder, "holds data that was", dict(manifest.request), request)
    # a process may die between its last two steps
    forget_unfinished(folder)
    return manifest


def claim_folder(folder: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Make a folder this request's own; what an earlier run of the same request had recorded."""
    path = folder / UNFINISHED_FILE
    if path.exists():
        try:
            tree = json.loads(path.read_bytes())
            format, before, state = tree["format"], tree["request"], tree["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: remove {folder} and start anew") from error
        if format != [FORMAT, VERSION]:
            raise ValueError(
                f"{path} is of another version of depthmix: remove {folder} and start anew"
            )
        _compare(folder, "is half", before, request)
        return state
    if any(entry.name != UNFINISHED_FILE + PART for entry in folder.iterdir()):
        raise ValueError(f"the folder {folder} holds other files: choose a new or an empty one")
    write_unfinished(folder, request, None)
    return None


def write_unfinished(folder: Path, request: dict[str, Any], state: dict[str, Any] | None) -> None:
    """Record how far the work is."""
    tree = {"format": [FORMAT, VERSION], "request": request, "state": state}
    write_file(folder / UNFINISHED_FILE, json.dumps(tree).encode())


def forget_unfinished(folder: Path) -> None:
    """Remove the record of a work that is done."""
    for name in (UNFINISHED_FILE, UNFINISHED_FILE + PART):
        (folder / name).unlink(missing_ok=True)


def _compare(folder: Path, verb: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not changed:
        return
    hashed = ("sources", "val_sources", "tokenizer")
    details = [
        f"other {name.replace('_', ' ')}"
        if name in hashed
        else f"{name} = {before.get(name)} and not {now.get(name)}"
        for name in changed
    ]
    raise ValueError(
        f"the folder {folder} {verb} prepared with {', '.join(details)}: choose another folder, or "
        f"remove this one"
    )
