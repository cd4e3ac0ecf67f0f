"""A model on disk, whoever wrote it: a run of ours, or a folder with a `config.json`.

Owns how the two are told apart. Reads weights only when they are asked for.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from depthmix.checkpoint.weights import choose_checkpoint, load_weights
from depthmix.checkpoint.weights import read_config as read_own_config
from depthmix.config import ModelConfig
from depthmix.data.tokenizer import TOKENIZER_FILE, find_end_token, load_tokenizer
from depthmix.hf.weights import CONFIG_FILE, read_config, read_tree, read_weights
from depthmix.nn import Transformer


class Source(NamedTuple):
    """A model that can be loaded."""

    path: Path
    """The folder that was named."""
    config: ModelConfig
    kind: str
    """The architecture: depthmix, llama, …"""
    load: Callable[[], dict[str, Tensor]]
    """Its weights by our names, on the CPU."""

    def build(self) -> Transformer:
        """The model, in evaluation mode."""
        from depthmix.checkpoint.weights import build_model

        return build_model(self.config, self.load(), self.path)


def open_source(path: Path | str, *, max_seq_len: int | None = None) -> Source:
    """What lies in a folder: a run or one of its checkpoints, or a dense model of Hugging Face's.

    `max_seq_len` is for fewer positions than the model was made for.
    """
    path = Path(path)
    if (path / CONFIG_FILE).is_file():
        config = read_config(path, max_seq_len=max_seq_len)
        kind = str(read_tree(path)["model_type"])
        return Source(path, config, kind, lambda: read_weights(path, config))
    if path.is_dir() and not any(path.glob("*.safetensors")) and not _is_ours(path):
        raise ValueError(
            f"{path} is no model: it has neither a run's config.toml nor a {CONFIG_FILE}"
        )
    checkpoint = choose_checkpoint(path)
    config = read_own_config(checkpoint)
    if max_seq_len is not None:
        config = config.override({"max_seq_len": max_seq_len})
    return Source(path, config, "depthmix", lambda: load_weights(checkpoint))


def find_end(path: Path) -> int | None:
    """The id that ends a document by the tokenizer in a folder; None where nobody knows."""
    if (path / TOKENIZER_FILE).is_file():
        with suppress(ValueError):
            return find_end_token(load_tokenizer(path))
    eos = read_tree(path).get("eos_token_id") if (path / CONFIG_FILE).is_file() else None
    eos = eos[0] if isinstance(eos, list) and eos else eos
    return eos if isinstance(eos, int) else None


def _is_ours(path: Path) -> bool:
    names = ("config.toml", "checkpoints", "state.json", "checksums.json")
    return any((path / name).exists() for name in names) or any(path.glob("step-*"))
