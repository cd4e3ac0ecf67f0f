"""Files that are there whole or as they were, whatever stops the process.

Knows nothing of what they hold. A prepared corpus has rules of its own, in `data.disk`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader, a kill or a full disk leaves the old or the new one, whole."""
    told = content.encode() if isinstance(content, str) else content
    # what is no plain file, such as /dev/stdout, must not become one; a link stays one
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        with name_file(path):
            path.write_bytes(told)
        return
    new = path.with_name(f".{path.name}.new")
    with name_file(path):
        try:
            new.write_bytes(told)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Let an error of the system name the file that was meant: a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
