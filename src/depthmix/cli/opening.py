"""What RUN|DIR means on a command line: a run, or a folder with a `config.json`.

Knows the extras that a verb may need, and says how to get one that is missing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthmix.checkpoint.source import Source
    from depthmix.sampler import Vocabulary


@contextmanager
def tell_missing(extra: str) -> Iterator[None]:
    """Say which extra has the package that an import did not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this needs the package '{error.name}': pip install 'depthmix[{extra}]'"
        ) from error


def open_model(path: Path | str, *, max_seq_len: int | None = None) -> "Source":
    """The model of a run, of a checkpoint, or of a Hugging Face folder."""
    from depthmix.checkpoint.source import open_run

    # runs are opened also where the extra is not installed
    if (Path(path) / "config.toml").is_file():
        return open_run(path, max_seq_len=max_seq_len)
    with tell_missing("hf"):
        from depthmix.hf.source import open_source
    return open_source(path, max_seq_len=max_seq_len)


def open_vocabulary(path: Path, tokenizer: str | None) -> "Vocabulary":
    """The tokenizer of a run or a folder, or the one that was given."""
    from depthmix.rundir import RunDir
    from depthmix.sampler import Vocabulary, find_vocabulary

    if (path / "config.toml").is_file() or tokenizer is not None:
        return find_vocabulary(RunDir(path), tokenizer)
    from depthmix.data.tokenizer import load_tokenizer
    from depthmix.hf.source import find_end

    return Vocabulary(load_tokenizer(path), find_end(path))


def read_length(overrides: Mapping[str, str]) -> int | None:
    """A `max_seq_len` among fields to change; what is no number is refused where all are."""
    length = overrides.get("max_seq_len", "")
    return int(length) if length.isdecimal() else None
