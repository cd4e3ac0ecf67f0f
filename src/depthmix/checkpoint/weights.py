"""Load weights from a path into a model that is ready to use.

Reads and verifies only the files it needs of a checkpoint, and unpickles nothing. Also fits weights
to a model that routes other blocks: renames the tensors of blocks and initialises new routers.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from depthmix.checkpoint import folder as disk
from depthmix.checkpoint.tensors import read_part
from depthmix.config import ModelConfig
from depthmix.nn import Transformer
from depthmix.nn.depth import start_bias

Which = Literal["newest", "best"]

MAX_MISSING_LAYERS = 100
ALIGNMENT = 64
_LAYER = re.compile(r"layers\.(\d+)\.")


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
    """Build a model from tensors by name, in evaluation mode; errors name `origin`."""
    weights = dict(weights)
    check_num_layers(config, weights, origin)
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


def align_weight(value: Tensor) -> Tensor:
    """A copy of a CPU weight in memory aligned by torch.

    At the alignment of a file, products may round differently.
    """
    is_odd = value.device.type == "cpu" and value.data_ptr() % ALIGNMENT
    return value.clone() if is_odd else value


def check_num_layers(config: ModelConfig, names: Iterable[str], origin: Path | str) -> None:
    """Refuse a configuration with far more blocks than the weights have, before building them.

    Building thousands of blocks takes minutes; smaller differences are reported later, by name.
    """
    found = {int(match[1]) for name in names if (match := _LAYER.match(name))}
    if config.num_layers > len(found) + MAX_MISSING_LAYERS:
        raise ValueError(
            f"the weights in {origin} do not fit its configuration: they have {len(found)} "
            f"blocks instead of {config.num_layers}"
        )


def choose_checkpoint(path: Path, which: Which | None = None) -> Path:
    """The checkpoint meant by a run's folder, its checkpoints folder, or a checkpoint itself."""
    if path.is_file():
        raise ValueError(f"{path} is a file: name the folder of a run or of a checkpoint")
    if not path.is_dir():
        raise ValueError(f"there is nothing at {path}: give a run's folder or a checkpoint")
    if (path / disk.STATE).exists() or (path / disk.CHECKSUMS).exists():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    present = disk.list_checkpoints(folder)
    if not present:
        raise ValueError(
            f"{path} has no checkpoint: give the folder of a trained run, or a "
            f"checkpoint such as checkpoints/{disk.name_checkpoint(1000)}"
        )
    best = None if which == "newest" else disk.find_best(folder)
    if which == "best" and best is None:
        raise ValueError(f"no checkpoint in {folder} has a score: use the newest")
    return present[max(present) if best is None else best]


def _load_checkpoint(checkpoint: Path) -> dict[str, Tensor]:
    problem = disk.find_damage(checkpoint, ("model", disk.STATE))
    if problem is not None:
        raise ValueError(f"{problem}: {_suggest_sound(checkpoint)}")
    weights = read_part(checkpoint, "model")
    if not weights:
        raise ValueError(f"{checkpoint} has no weights")
    return weights


def _suggest_sound(damaged: Path) -> str:
    """What to use instead of a damaged checkpoint: the newest intact one of the same run."""
    for step, path in reversed(disk.list_checkpoints(damaged.parent).items()):
        if path.name == damaged.name or disk.find_damage(path, ("model", disk.STATE)) is not None:
            continue
        if path.parent.name != "checkpoints":
            return f"use {path}"
        return f"use {path.parent.parent} with --checkpoint {step}"
    return "no other checkpoint of the run is intact, so restore a copy"


def _load_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if ".rank-" in path.name:
        raise ValueError(f"{path} has only one rank's tensors: give its folder")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from error


def read_config(checkpoint: Path) -> ModelConfig:
    """The model's configuration in a checkpoint."""
    problem = disk.find_damage(checkpoint, (disk.STATE,))
    if problem is not None:
        raise ValueError(f"{problem}: {_suggest_sound(checkpoint)}")
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
    """Refuse weights that do not match their configuration."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    stored = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise ValueError(
                f"the weights in {origin} do not fit its configuration: '{name}' is "
                f"{stored.get(name, 'missing')} and should be {wanted.get(name, 'absent')}"
            )


# a routed block's own tensors are one level deeper than a dense one's
_ROUTED_BLOCK = re.compile(r"^(layers\.\d+\.)block\.")
_DECIDER = re.compile(r"^layers\.\d+\.(kv_)?decider\.")

# logit of an untrained predictor, which keeps every token
KEEP_LOGIT = 1.0


class Fitted(NamedTuple):
    """Weights for a configuration, and the tensors that were added or left out."""

    weights: dict[str, Tensor]
    new: tuple[str, ...]
    """New routers and predictors."""
    left: tuple[str, ...]
    """Routers and predictors of blocks that are no longer routed."""


def fit_weights(
    config: ModelConfig, weights: Mapping[str, Tensor], origin: Path | str, seed: int = 0
) -> Fitted:
    """The tensors of `config`, taken from those of a model that may route elsewhere.

    Only routers and predictors may be new or left out. A new router has `routing.init_std`; a new
    predictor keeps every token, so that a model that was dense samples as it did.
    """
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in Transformer(config).state_dict().items()}
    given = {_ROUTED_BLOCK.sub(r"\1", name): value for name, value in weights.items()}
    if config.tied_head:
        # a tied head has no tensor of its own
        del wanted["head.weight"]
        _drop_tied_head(given, origin)
    elif "head.weight" not in given and "embedding.weight" in given:
        given["head.weight"] = given["embedding.weight"].clone()
    generator = torch.Generator().manual_seed(seed)
    fitted, new = {}, []
    for name, shape in wanted.items():
        plain = _ROUTED_BLOCK.sub(r"\1", name)
        if plain in given:
            value = given.pop(plain)
        elif _DECIDER.match(name):
            value = _start_decider(config, name, shape, generator)
            router = f"{name.removesuffix('bias')}router.weight"
            if name.endswith("decider.bias") and router in weights:
                # a trained router has its own scale, and chooses by positive scores if it was
                # trained to choose at all
                value = torch.zeros(shape)
            new.append(name)
        else:
            raise ValueError(f"{origin} has no '{plain}', which this model needs")
        if value.shape != shape:
            raise ValueError(
                f"'{plain}' of {origin} is {tuple(value.shape)} and this model's is "
                f"{tuple(shape)}: only fields of routing may be changed"
            )
        fitted[name] = value
    extra = [name for name in given if not _DECIDER.match(name)]
    if extra:
        raise ValueError(
            f"{origin} has '{extra[0]}', which this model does not have: only fields of "
            f"routing may be changed"
        )
    return Fitted(fitted, tuple(new), tuple(given))


def _drop_tied_head(given: dict[str, Tensor], origin: Path | str) -> None:
    head, embedding = given.pop("head.weight", None), given.get("embedding.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(f"{origin} has a head of its own: leave out tied_head=true")


def _start_decider(
    config: ModelConfig, name: str, shape: torch.Size, generator: torch.Generator
) -> Tensor:
    part = name.split("decider.")[1]
    if part == "bias":
        layer = int(name.split(".")[1])
        capacity = config.capacities[config.routed_layers.index(layer)]
        return torch.tensor(start_bias(config.routing, config.width, capacity))
    if part == "predictor.w_out.bias":
        return torch.full(shape, KEEP_LOGIT)
    if part == "predictor.w_out.weight":
        return torch.zeros(shape)
    std = config.routing.init_std if part == "router.weight" else shape[1] ** -0.5
    return std * torch.randn(shape, generator=generator)
