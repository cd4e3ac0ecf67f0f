"""The default corpus, `stdlib`, which needs no download, prepared once in the user's cache.

Locates the cache, and lets several processes prepare the corpus at the same time.
"""

import contextlib
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

from depthmix.data.manifest import VERSION, explain_writing
from depthmix.data.prepare import DEFAULT_VOCAB_SIZE, Report, prepare
from depthmix.data.shards import Corpus
from depthmix.data.stdlib import find_files
from depthmix.files import hash_content

# leftovers of a killed process are removed after this time, when they cannot be in use any more
ABANDONED_SECONDS = 24 * 3600


def prepare_default(vocab_size: int = DEFAULT_VOCAB_SIZE, progress: Report | None = None) -> Path:
    """The folder of the prepared standard library, created on the first call."""
    return open_default(vocab_size, progress).folder


def open_default(vocab_size: int = DEFAULT_VOCAB_SIZE, progress: Report | None = None) -> Corpus:
    """The prepared standard library, created on the first call, or if it has been damaged."""
    folder = find_cache() / name_default(vocab_size)
    found = _open_complete(folder)
    if found is not None:
        return found
    with explain_writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        # next to its final place, so that the rename is atomic
        private = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        prepare(["stdlib"], private, vocab_size=vocab_size, progress=progress)
        private.chmod(0o755)
        if folder.exists() and _open_complete(folder) is None:
            # it was complete when it was renamed, so it has been damaged since
            shutil.rmtree(folder)
        try:
            os.rename(private, folder)
        except OSError:
            # another process was faster, with the same result
            found = _open_complete(folder)
            if found is None:
                raise
            return found
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return Corpus.open(folder)


def find_cache() -> Path:
    """`$DEPTHMIX_CACHE`, else `depthmix` in the user's cache folder."""
    own = os.environ.get("DEPTHMIX_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "depthmix"


def name_default(vocab_size: int) -> str:
    """A name that changes with Python, its library or the vocabulary."""
    listed = [[name, num_bytes] for name, _, num_bytes in find_files()]
    digest = hash_content(json.dumps([VERSION, listed]))
    return f"stdlib-{platform.python_version()}-{vocab_size}-{digest[:12]}"


def _open_complete(folder: Path) -> Corpus | None:
    with contextlib.suppress(ValueError):
        return Corpus.open(folder, verify="auto") if folder.exists() else None
    return None


def _remove_abandoned(folder: Path) -> None:
    for other in folder.parent.glob(f".{folder.name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
