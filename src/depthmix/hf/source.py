"""A model on disk, whoever wrote it: a run of ours, or a folder with a `config.json`.

Owns how the two are told apart. Reads weights only when they are asked for.
"""

from contextlib import suppress
from pathlib import Path

from torch import Tensor

from depthmix import fields
from depthmix.checkpoint.source import Source, open_run
from depthmix.config import ModelConfig
from depthmix.data.tokenizer import TOKENIZER_FILE, find_end_token, load_tokenizer
from depthmix.hf.chat import find_chat
from depthmix.hf.families import CONFIG_FILE, read_config, read_tree
from depthmix.hf.weights import find_files, read_weights

# model_type of what depthmix exports
OWN_KIND = "depthmix"

# what a run, its folder of checkpoints, or one of them has
_OURS = ("config.toml", "checkpoints", "state.json", "checksums.json", "step-*")


def open_source(path: Path | str, *, max_seq_len: int | None = None) -> Source:
    """What lies in a folder: a run or a checkpoint, one that was exported, or a dense model.

    `max_seq_len` is for fewer positions than the model was made for.
    """
    path = Path(path)
    if (path / CONFIG_FILE).is_file():
        kind = str(read_tree(path).get("model_type"))
        if kind == OWN_KIND:
            config = read_exported_config(path, max_seq_len=max_seq_len)
            return Source(path, config, kind, lambda: read_exported_weights(path), find_chat(path))
        config = read_config(path, max_seq_len=max_seq_len)
        return Source(path, config, kind, lambda: read_weights(path, config), find_chat(path))
    if path.is_dir() and not any(any(path.glob(name)) for name in _OURS):
        raise ValueError(
            f"{path} is no model: it has neither a run's config.toml nor a {CONFIG_FILE}"
        )
    return open_run(path, max_seq_len=max_seq_len)


def read_exported_config(folder: Path, *, max_seq_len: int | None = None) -> ModelConfig:
    """The model of an exported folder, whose `config.json` has our fields among others."""
    tree = read_tree(folder)
    known = {name: tree[name] for name in fields.field_types(ModelConfig) if name in tree}
    try:
        config = ModelConfig.from_dict(known)
        return config if max_seq_len is None else config.override({"max_seq_len": max_seq_len})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE} does not make a model: {error}") from error


def read_exported_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of an exported folder, in float32; whether they fit is for others to see."""
    from safetensors import SafetensorError, safe_open

    weights = {}
    for path in sorted(set(find_files(folder).values())):
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a sound safetensors file: {error}") from error
        # transformers' own class holds our model as `model`
        weights |= {name.removeprefix("model."): value for name, value in found.items()}
    return weights


def find_end(path: Path) -> int | None:
    """The id that ends a document by the tokenizer in a folder; None where nobody knows."""
    if (path / TOKENIZER_FILE).is_file():
        with suppress(ValueError):
            return find_end_token(load_tokenizer(path))
    eos = read_tree(path).get("eos_token_id") if (path / CONFIG_FILE).is_file() else None
    eos = eos[0] if isinstance(eos, list) and eos else eos
    return eos if isinstance(eos, int) else None
