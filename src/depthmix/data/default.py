"""The default corpus, `stdlib`, which needs no download, prepared once in the user's cache.

Locates the cache, and lets several processes prepare the corpus at the same time.
"""

import contextlib
import hashlib
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

# leftovers of a killed process are removed after this time, when they cannot be in use any more
ABANDONED_SECONDS = 24 * 3600


def prepare_default(vocab_size: int = DEFAULT_VOCAB_SIZE, progress: Report | None = None) -> Path:
    """The folder of the prepared standard library, created on the first call."""
    folder = find_cache() / name_default(vocab_size)
    if _is_complete(folder):
        return folder
    with explain_writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        # next to its final place, so that the rename is atomic
        private = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        prepare(["stdlib"], private, vocab_size=vocab_size, progress=progress)
        private.chmod(0o755)
        if folder.exists() and not _is_complete(folder):
            # it was complete when it was renamed, so it has been damaged since
            shutil.rmtree(folder)
        try:
            os.rename(private, folder)
        except OSError:
            # another process was faster, with the same result
            if not _is_complete(folder):
                raise
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return folder


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
    digest = hashlib.sha256(json.dumps([VERSION, listed]).encode()).hexdigest()
    return f"stdlib-{platform.python_version()}-{vocab_size}-{digest[:12]}"


def _is_complete(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        Corpus.open(folder)
    except ValueError:
        return False
    return True


def _remove_abandoned(folder: Path) -> None:
    for other in folder.parent.glob(f".{folder.name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
