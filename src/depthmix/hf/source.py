"""A model on disk, whoever wrote it: a run of ours, or a folder with a `config.json`.

Owns how the two are told apart. Reads weights only when they are asked for.
"""

from contextlib import suppress
from pathlib import Path

from depthmix.checkpoint.source import Source, open_run
from depthmix.data.tokenizer import TOKENIZER_FILE, find_end_token, load_tokenizer
from depthmix.hf.weights import CONFIG_FILE, read_config, read_tree, read_weights

# what a run, its folder of checkpoints, or one of them has
_OURS = ("config.toml", "checkpoints", "state.json", "checksums.json", "step-*")


def open_source(path: Path | str, *, max_seq_len: int | None = None) -> Source:
    """What lies in a folder: a run or one of its checkpoints, or a dense model of Hugging Face's.

    `max_seq_len` is for fewer positions than the model was made for.
    """
    path = Path(path)
    if (path / CONFIG_FILE).is_file():
        config = read_config(path, max_seq_len=max_seq_len)
        kind = str(read_tree(path)["model_type"])
        return Source(path, config, kind, lambda: read_weights(path, config))
    if path.is_dir() and not any(any(path.glob(name)) for name in _OURS):
        raise ValueError(
            f"{path} is no model: it has neither a run's config.toml nor a {CONFIG_FILE}"
        )
    return open_run(path, max_seq_len=max_seq_len)


def find_end(path: Path) -> int | None:
    """The id that ends a document by the tokenizer in a folder; None where nobody knows."""
    if (path / TOKENIZER_FILE).is_file():
        with suppress(ValueError):
            return find_end_token(load_tokenizer(path))
    eos = read_tree(path).get("eos_token_id") if (path / CONFIG_FILE).is_file() else None
    eos = eos[0] if isinstance(eos, list) and eos else eos
    return eos if isinstance(eos, int) else None
