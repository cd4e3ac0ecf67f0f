"""Atomic writes: a file is complete or unchanged, however the process ends.

Also fsync, file hashes, parsing untrusted JSON, and locks. Independent of what the files contain.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # not available on this system: nothing is locked
    fcntl = None

# suffix of a file until it is complete
PART = ".part"


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically; the new one is on disk when this returns.

    Until then the old one stays intact: for readers, after a kill or power cut, and on a full disk.
    """
    data = content.encode() if isinstance(content, str) else content
    # a special file such as /dev/stdout must not become a plain one, and a link stays a link
    path = path.resolve() if path.is_symlink() else path
    with name_file(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        part = path.with_name(path.name + PART)
        try:
            with open(part, "wb") as file:
                file.write(data)
                sync_file(file)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Add the file's name to a system error that has none, such as for a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def sync_file(file: IO[bytes]) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk; its files are synced by their writers."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        # some systems cannot open a folder; there the file system orders renames itself
        return
    try:
        os.fsync(number)
    except OSError as error:
        # and some cannot sync one
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(number)


def share_file(path: Path) -> None:
    """Give a file the permissions of a new one; some libraries write files only for the owner."""
    # taken from a new file, because reading the umask changes it for other threads
    probe = path.with_name(path.name + PART)
    number = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        path.chmod(stat.S_IMODE(os.fstat(number).st_mode))
    finally:
        os.close(number)
        probe.unlink()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def hash_file(path: Path) -> str:
    """Sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_content(content: str | bytes) -> str:
    """Sha256 of a text in UTF-8, or of bytes, in hexadecimal."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()


def take_lock(number: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds the lock.

    Never waits. A shared lock keeps out only exclusive ones.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # some network file systems have no locks: work without one
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
