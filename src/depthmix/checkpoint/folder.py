"""A folder of checkpoints on disk: names, checksums, atomic publishing, and pruning."""

import json
import math
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from depthmix.files import hash_file, parse_json, replace_file, sync_folder

CHECKSUMS = "checksums.json"
STATE = "state.json"
STATE_FORMAT = 1

# folders being written or removed: never read, and cleaned up at the next start
UNFINISHED, REMOVED = ".tmp-new", ".tmp-old"


def name_checkpoint(step: int) -> str:
    """`step-00001000`."""
    return f"step-{step:08d}"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Step → its folder, oldest first, whether sound or damaged."""
    if not folder.is_dir():
        return {}
    named = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in named if match and path.is_dir()))


def open_folder(folder: Path) -> None:
    """Make the folder ready for writing, and clean up after a killed process."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("step-*.tmp-*")):
        final = path.with_name(path.name.split(".")[0])
        # a complete one was killed between two renames: it may be the only one
        if not final.exists() and find_damage(path) is None:
            path.rename(final)
        else:
            shutil.rmtree(path)
    sync_folder(folder)


def start_checkpoint(final: Path) -> Path:
    """An empty folder to write into, next to `final`."""
    unfinished = final.with_name(final.name + UNFINISHED)
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    return unfinished


def publish_checkpoint(unfinished: Path, final: Path) -> None:
    """Rename a complete checkpoint, replacing an older one of the same step."""
    sync_folder(unfinished)
    if final.exists():
        aside = final.with_name(final.name + REMOVED)
        final.rename(aside)
        unfinished.rename(final)
        shutil.rmtree(aside)
    else:
        unfinished.rename(final)
    sync_folder(final.parent)


def write_json(path: Path, tree: Any) -> None:
    """Write plain data, on disk when this returns."""
    replace_file(path, json.dumps(tree, indent=1))


def measure_file(path: Path) -> dict[str, Any]:
    """A file's entry in `checksums.json`."""
    return {"num_bytes": path.stat().st_size, "sha256": hash_file(path)}


def find_damage(
    checkpoint: Path, starts: Iterable[str] = ("",), *, sizes_only: bool = False
) -> str | None:
    """A sentence about the first thing wrong, None when all checksums hold.

    Looks only at files whose name begins with one of `starts`: weights can be used without
    reading the optimiser's state. `sizes_only` does not read the files, and is quick.
    """
    try:
        listed = parse_json((checkpoint / CHECKSUMS).read_text(encoding="utf-8"))["files"]
        files = {str(name): (entry["num_bytes"], entry["sha256"]) for name, entry in listed.items()}
    except FileNotFoundError:
        return f"{checkpoint} is damaged: it has no {CHECKSUMS}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{checkpoint} is damaged: its {CHECKSUMS} cannot be read"
    wanted = {name: entry for name, entry in files.items() if name.startswith(tuple(starts))}
    if STATE not in wanted:
        return f"{checkpoint} is damaged: its {CHECKSUMS} does not name {STATE}"
    for name, (num_bytes, digest) in wanted.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{checkpoint} is damaged: {name} is missing"
        if path.stat().st_size != num_bytes:
            size = path.stat().st_size
            return f"{checkpoint} is damaged: {name} has {size} bytes instead of {num_bytes}"
        if not sizes_only and hash_file(path) != digest:
            return f"{checkpoint} is damaged: the content of {name} has changed"
    # every file of tensors in the folder is read, so none may have come from elsewhere
    for path in sorted(checkpoint.glob("*.safetensors")):
        if path.name not in files:
            return f"{checkpoint} is damaged: {path.name} does not belong to it"
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors."""
    path = checkpoint / STATE
    try:
        state = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{checkpoint} is damaged: {STATE} is missing") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not valid JSON") from error
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise ValueError(f"{path} is not the state of a depthmix checkpoint")
    if state["format"] > STATE_FORMAT:
        raise ValueError(
            f"{checkpoint} was written by a newer depthmix (format {state['format']}, this one "
            f"reads up to {STATE_FORMAT}): update depthmix"
        )
    return state


def find_best(folder: Path) -> int | None:
    """The step with the lowest score, the newest of equals; None when none has a score."""
    scores = {step: _read_score(path) for step, path in list_checkpoints(folder).items()}
    scored = {step: score for step, score in scores.items() if score is not None}
    return min(scored, key=lambda step: (scored[step], -step), default=None)


def prune_checkpoints(folder: Path, newest: int, keep_last: int, damaged: Collection[int]) -> None:
    """Remove what is older than the last `keep_last` up to `newest`, except for the best.

    Those in `damaged`, or visibly so, count for nothing, and go when the training has passed them.
    """
    present = list_checkpoints(folder)
    older = [step for step in present if step <= newest]
    sound = [
        step
        for step in older
        if step not in damaged and find_damage(present[step], sizes_only=True) is None
    ]
    kept = {*sound[-keep_last:], find_best(folder)}
    for step in older:
        if step not in kept:
            # renamed first: if killed halfway, the rest must not look like a checkpoint
            removed = present[step].with_name(present[step].name + REMOVED)
            present[step].rename(removed)
            shutil.rmtree(removed)


def _read_score(checkpoint: Path) -> float | None:
    try:
        score = read_state(checkpoint).get("score")
    except (OSError, ValueError):
        return None
    usable = isinstance(score, int | float) and not math.isnan(score)
    return float(score) if usable else None
