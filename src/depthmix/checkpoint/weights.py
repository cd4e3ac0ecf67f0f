"""Weights for use: a path on disk → tensors, and tensors → a model that is ready to be called.

Reads only what it needs of a checkpoint, verified. Unpickles nothing. Knows nothing of training.
"""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from depthmix.checkpoint import folder as disk
from depthmix.checkpoint.tensors import read_part
from depthmix.config import ModelConfig
from depthmix.nn import Transformer

Which = Literal["newest", "best"]


def load_weights(path: Path | str, *, which: Which | None = None) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, of a run, its checkpoints folder, a checkpoint or a file.

    Among several checkpoints `which` decides; None is the best where there are scores, else the
    newest. A tied head has no tensor of its own.
    """
    path = Path(path)
    if path.is_file():
        return _load_file(path)
    return _load_checkpoint(choose_checkpoint(path, which))


def build_model(config: ModelConfig, weights: dict[str, Tensor], origin: Path | str) -> Transformer:
    """A model of tensors by name, in evaluation mode; `origin` is named where they do not fit."""
    weights = dict(weights)
    # on the meta device nothing is allocated or drawn at random only to be overwritten
    with torch.device("meta"):
        model = Transformer(config)
    if config.tied_head and "embedding.weight" in weights:
        weights["head.weight"] = weights["embedding.weight"]
    _check_fit(model, weights, origin)
    model.load_state_dict(weights, assign=True)
    if config.tied_head:
        model.head.weight = model.embedding.weight
    model.phase_table = model.make_phases()
    return model.eval()


def choose_checkpoint(path: Path, which: Which | None = None) -> Path:
    """The checkpoint meant by a run's folder, its checkpoints folder, or a checkpoint itself."""
    if path.is_file():
        raise ValueError(f"{path} is a file: give a run's folder or one of its checkpoints")
    if not path.is_dir():
        raise ValueError(f"there is nothing at {path}: give a run's folder or a checkpoint")
    if (path / disk.STATE).exists() or (path / disk.CHECKSUMS).exists():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    present = disk.list_checkpoints(folder)
    if not present:
        raise ValueError(
            f"{path} holds no checkpoint: give a run's folder that has been trained, or a "
            f"checkpoint such as checkpoints/{disk.name_checkpoint(1000)}"
        )
    best = None if which == "newest" else disk.find_best(folder)
    if which == "best" and best is None:
        raise ValueError(f"no checkpoint in {folder} has a score: ask for the newest")
    return present[max(present) if best is None else best]


def _load_checkpoint(checkpoint: Path) -> dict[str, Tensor]:
    problem = disk.find_damage(checkpoint, ("model", disk.STATE))
    if problem is not None:
        others = [str(p) for p in disk.list_checkpoints(checkpoint.parent).values()]
        others = [other for other in others if other != str(checkpoint)]
        hint = f": try another, such as {others[-1]}" if others else ""
        raise ValueError(problem + hint)
    weights = read_part(checkpoint, "model")
    if not weights:
        raise ValueError(f"{checkpoint} holds no weights")
    return weights


def _load_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if ".rank-" in path.name:
        raise ValueError(f"{path} is one rank's share of the tensors: give its folder")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a sound safetensors file: {error}") from error


def read_config(checkpoint: Path) -> ModelConfig:
    """The model's configuration in a checkpoint."""
    config = disk.read_state(checkpoint).get("config")
    tree = config.get("model") if isinstance(config, dict) else None
    if not isinstance(tree, dict):
        raise ValueError(
            f"{checkpoint / disk.STATE} has no configuration of a model: load its weights alone, "
            f"with load_weights"
        )
    try:
        return ModelConfig.from_dict(tree)
    except ValueError as error:
        raise ValueError(f"the configuration in {checkpoint} is not valid: {error}") from error


def _check_fit(model: Transformer, weights: dict[str, Tensor], origin: Path | str) -> None:
    """The weights must be those of the configuration beside them."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    stored = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise ValueError(
                f"the weights in {origin} do not fit its configuration: '{name}' is "
                f"{stored.get(name, 'missing')} and should be {wanted.get(name, 'absent')}"
            )
