"""Files that are there whole or not at all, whatever stops the process.

Owns temporary names, fsync, renaming and the folder's lock. Does not know what the files hold.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# what a file is called until it is complete
PART = ".part"


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
    """Replace a file by new content, in one step."""
    part = path.with_name(path.name + PART)
    with explain_writing(path):
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder outlive a power cut."""
    # a folder cannot be opened everywhere; there the file system orders renames itself
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Refuse a second process that writes to the same folder; a killed one leaves no lock."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another process is writing to {folder}: wait for it, or choose another folder"
            ) from error
        except OSError:
            # a network file system without locks; the user starts one process, as ever
            pass
        yield
    finally:
        os.close(number)
