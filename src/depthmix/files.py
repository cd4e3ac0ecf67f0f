"""Files that are there whole or as they were, whatever stops the process.

Owns atomic writing, fsync, a file's hash, and locks. Knows nothing of what the files hold, nor what
a user can do when one cannot be written.
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # not on this system, where nothing is ever locked
    fcntl = None

# what a file is called until it is complete
PART = ".part"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file, on disk when this returns; until then the old one stays, whole.

    So it is for a reader, after a kill or a power cut, and where the disk is full.
    """
    told = content.encode() if isinstance(content, str) else content
    # what is no plain file, such as /dev/stdout, must not become one; a link stays one
    path = path.resolve() if path.is_symlink() else path
    with name_file(path):
        if path.exists() and not path.is_file():
            path.write_bytes(told)
            return
        part = path.with_name(path.name + PART)
        try:
            with open(part, "wb") as file:
                file.write(told)
                sync_file(file)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Let an error of the system name the file that was meant: a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def sync_file(file: IO[bytes]) -> None:
    """Bring what was written to a file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk; its files are synced by who writes them."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        # a folder cannot be opened everywhere; there the file system orders renames itself
        return
    try:
        os.fsync(number)
    except OSError as error:
        # nor can it be synced everywhere
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(number)


def hash_file(path: Path) -> str:
    """Sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def take_lock(number: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed, however that happens; False if another has.

    Never waits. A shared lock keeps out only those that are not.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # some network file systems have no locks: better to work without one than not at all
        pass
    return True


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Refuse a second process that writes to the same folder; a killed one leaves no lock."""
    if fcntl is None:
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        if not take_lock(number):
            raise ValueError(
                f"another process is writing to {folder}: wait for it, or choose another folder"
            )
        yield
    finally:
        os.close(number)
