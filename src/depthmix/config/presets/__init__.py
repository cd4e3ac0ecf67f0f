"""Presets, one TOML file per size, and configurations read from files.

A size defines a routed model and its dense twin, so that the two cannot drift apart, each in two
variants: with the best known recipe, and as in the paper (`-paper`). Does not import torch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from depthmix.config import fields
from depthmix.config.model import ModelConfig
from depthmix.config.train import RunConfig

__all__ = [
    "format_preset_values",
    "list_recipe",
    "load_config",
    "load_preset",
    "load_run_config",
    "make_run_config",
    "preset_names",
    "preset_sizes",
]

PAPER_MODEL: Mapping[str, Any] = {
    "qk_norm": False,
    "routing.gate": "raw",
    "routing.init_std": 0.02,
    "routing.normalize_input": False,
}
PAPER_RECIPE: Mapping[str, Any] = {"train.optimizer": "adamw"}
"""What `-paper` changes: a block's update is multiplied by the score itself (arXiv:2404.02258,
Eq. 1), and later improvements are left out."""


def load_preset(name: str, **overrides: Any) -> ModelConfig:
    """A preset's configuration, such as `60m` or its dense twin `60m-dense`.

    `60m-mod` is the full name of `60m`; `60m-paper` and `60m-paper-dense` are the same sizes as
    described in the paper. Overrides are fields, dotted if nested.

    >>> load_preset("60m", width=768, **{"routing.capacity": 0.25}).routing.capacity
    0.25
    """
    size, is_paper, is_dense = _split_name(name)
    if size not in preset_sizes():
        papers = [f"{size}-paper" for size in preset_sizes()]
        close = fields.suggest(name, [*preset_sizes(), *preset_names(), *papers])
        raise ValueError(
            f"there is no preset '{name}'.{close} The presets are: {', '.join(preset_names())}; "
            f"append -paper to a size for the paper's variant, as in 60m-paper"
        )
    text = (resources.files(__name__) / f"{size}.toml").read_text(encoding="utf-8")
    config = ModelConfig.from_toml(text)
    if is_paper:
        config = config.override(PAPER_MODEL)
    if is_dense:
        config = config.dense_twin()
    return config.override(overrides) if overrides else config


def _split_name(name: str) -> tuple[str, bool, bool]:
    """A preset's size, whether it is the paper's variant, and whether it is the dense twin."""
    bare = name.removesuffix("-dense") if name.endswith("-dense") else name.removesuffix("-mod")
    return bare.removesuffix("-paper"), bare.endswith("-paper"), name.endswith("-dense")


def list_recipe(source: str) -> dict[str, Any]:
    """A preset's recipe as dotted fields; empty if it uses the defaults."""
    is_file = source.endswith(".toml")
    return dict(PAPER_RECIPE) if not is_file and _split_name(source)[1] else {}


def make_run_config(source: str, overrides: Mapping[str, Any]) -> RunConfig:
    """A new run of a preset or model file, with its recipe."""
    return RunConfig.from_overrides(load_config(source), {**list_recipe(source), **overrides})


def load_config(source: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """A model's configuration by preset name or from a .toml file, with dotted fields replaced.

    The file may also be a run's config.toml.
    """
    if not source.endswith(".toml"):
        try:
            config = load_preset(source)
        except ValueError as error:
            if not Path(source).is_file():
                raise
            raise ValueError(
                f"'{source}' is not a configuration file: its name must end in .toml"
            ) from error
        return config.override(overrides or {})
    with _name_source(source):
        tree = fields.read_toml(Path(source).read_text(encoding="utf-8"))
        config = ModelConfig.from_dict(tree.get("model", tree))
    return config.override(overrides or {})


def sets_vocabulary(source: str) -> bool:
    """Whether a model file sets its vocabulary size; the presets' sizes are only examples."""
    if not source.endswith(".toml"):
        return False
    with _name_source(source):
        tree = fields.read_toml(Path(source).read_text(encoding="utf-8"))
    return "vocab_size" in tree.get("model", tree)


def load_run_config(path: Path) -> RunConfig:
    """A run's configuration from its config.toml, or a file like it."""
    with _name_source(path):
        return RunConfig.from_toml(path.read_text(encoding="utf-8"))


@contextmanager
def _name_source(source: Path | str) -> Iterator[None]:
    """Make errors name the file that could not be read."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read '{source}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read '{source}': it is not UTF-8 text") from error
    except ValueError as error:
        raise ValueError(f"in '{source}': {error}") from error


def preset_sizes() -> list[str]:
    """Names of the preset files, the smallest model first."""
    folder = resources.files(__name__)
    found = {p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")}
    order = ["tiny", "demo", "60m", "220m", "1b"]
    return sorted(found, key=lambda name: order.index(name) if name in order else len(order))


def format_preset_values() -> dict[str, str]:
    """Dotted name → value as text of the fields that all presets set alike, and not to the default.

    Of routed presets; their dense twins route nothing.
    """
    configs = [load_preset(size) for size in preset_sizes()]
    values = [fields.flatten(config.to_dict()) for config in configs]
    first, default = values[0], fields.flatten(ModelConfig().to_dict())
    return {
        name: fields.write_value(value)
        for name, value in first.items()
        if value != default[name] and all(other[name] == value for other in values)
    }


def preset_names() -> list[str]:
    """Every name that `load_preset` accepts, without the short forms."""
    return [f"{size}-{variant}" for size in preset_sizes() for variant in ("dense", "mod")]
