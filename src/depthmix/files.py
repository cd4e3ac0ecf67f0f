"""Files that are complete or unchanged, however the process ends.

Owns atomic writing, fsync, a file's hash, parsing JSON that may be hostile, and locks. Knows
nothing of what the files hold, nor what a user can do when one cannot be written.
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
except ImportError:  # not on this system, where nothing is ever locked
    fcntl = None

# what a file is called until it is complete
PART = ".part"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file, on disk when this returns; until then the old one stays, whole.

    So it is for a reader, after a kill or a power cut, and where the disk is full.
    """
    data = content.encode() if isinstance(content, str) else content
    # a special file such as /dev/stdout must not be replaced by a plain one; a link stays a link
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
    """Bring a folder's names to the disk; its files are synced by their writers."""
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


def share_file(path: Path) -> None:
    """Give a file the permissions of a new one; some libraries write files for the owner alone."""
    # a new file shows them; asking for the umask would change it for other threads
    probe = path.with_name(path.name + PART)
    number = os.open(probe, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        path.chmod(stat.S_IMODE(os.fstat(number).st_mode))
    finally:
        os.close(number)
        probe.unlink()


def parse_json(text: str | bytes) -> Any:
    """JSON as plain data; ValueError where it is not valid, or nested too deeply to read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


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
