"""Open any model on disk: a run, one of its checkpoints, or a Hugging Face folder.

The configuration is read at once, everything else at first use.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from depthmix.checkpoint.folder import CHECKSUMS, STATE, list_checkpoints, name_checkpoint
from depthmix.checkpoint.weights import build_model, choose_checkpoint, load_weights, read_config
from depthmix.config import ModelConfig
from depthmix.config.fields import suggest
from depthmix.models import foreign
from depthmix.models.chat import Chat, find_chat, read_chat
from depthmix.models.vocabulary import Vocabulary, find_vocabulary, read_folder, read_vocabulary
from depthmix.nn import Transformer
from depthmix.runs.folder import RunDir, describe_run_nearby

EXPECTED = "the folder of a run, of one of its checkpoints, or of a Hugging Face model"


@dataclass(frozen=True)
class StoredModel:
    """A model on disk; everything but its configuration is read at first use."""

    path: Path
    """The folder that was opened."""
    config: ModelConfig
    kind: str
    """The architecture: depthmix, llama, …"""
    load: Callable[[], dict[str, Tensor]]
    """The weights by depthmix's names, on the CPU."""
    run: RunDir | None = None
    """The run that it belongs to, if any."""
    checkpoint: Path | None = None
    """The chosen checkpoint, if there are any."""
    tokenizer: str | None = None
    """A tokenizer to use instead of the model's own."""

    @property
    def home(self) -> Path:
        """The folder with its tokenizer and chat template; for a checkpoint, that of its run."""
        return self.path if self.run is None else self.run.path

    @cached_property
    def network(self) -> Transformer:
        """The model itself, in evaluation mode; read at first use, on the CPU."""
        return build_model(self.config, self.load(), self.path)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Its tokenizer and end token, or those of the tokenizer that was given."""
        if self.tokenizer is not None:
            return read_vocabulary(self.tokenizer)
        if self.run is not None:
            return find_vocabulary(self.run)
        if self.checkpoint is not None:
            raise ValueError(
                f"{self.path} is not in a run with a tokenizer: give one with --tokenizer"
            )
        return read_folder(self.path)

    @cached_property
    def chat(self) -> Chat | None:
        """Its chat template, if it has one."""
        if self.checkpoint is not None:
            return None if self.run is None else read_chat(self.run.path)
        return find_chat(self.path)


def open_model(
    path: Path | str,
    *,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    max_seq_len: int | None = None,
) -> StoredModel:
    """The model of a run, of one of its checkpoints, or of a Hugging Face folder.

    For a run, `checkpoint` is best, newest, a name or a step; the default is the best if there are
    scores, otherwise the newest. `tokenizer` is for a model without one, and `max_seq_len` for
    fewer positions than the model has.
    """
    path = Path(path)
    if not (path / "config.toml").is_file() and (path / foreign.CONFIG_FILE).is_file():
        if checkpoint is not None:
            raise ValueError(
                f"{path} is a Hugging Face folder, which has no checkpoints: leave out --checkpoint"
            )
        kind = str(foreign.read_tree(path).get("model_type"))
        if kind == foreign.OWN_KIND:
            config = foreign.read_exported_config(path, max_seq_len=max_seq_len)
            load = partial(foreign.read_exported_weights, path)
        else:
            config = foreign.read_config(path, max_seq_len=max_seq_len)
            load = partial(foreign.read_weights, path, config)
        return StoredModel(path, config, kind, load, tokenizer=tokenizer)
    run, place = _find_place(path, checkpoint)
    config = read_config(place)
    if max_seq_len is not None:
        config = config.override({"max_seq_len": max_seq_len})
    load = partial(load_weights, place)
    return StoredModel(path, config, foreign.OWN_KIND, load, run, place, tokenizer)


def find_checkpoint(run: RunDir, name: str | None) -> Path:
    """The folder of a checkpoint, by best, newest, its name or its step."""
    if name is None or name in ("best", "newest"):
        return choose_checkpoint(run.path, name)  # pyrefly: ignore[bad-argument-type]
    present = {place.name: place for place in list_checkpoints(run.checkpoints).values()}
    # a path to it is a name too
    wanted = name_checkpoint(int(name)) if name.isdecimal() else Path(name).name
    if wanted not in present:
        known = ", ".join(["best", "newest", *present]) if present else "none is there"
        raise ValueError(f"{run.path} has no checkpoint '{name}': choose from {known}")
    return present[wanted]


def _find_place(path: Path, checkpoint: str | None) -> tuple[RunDir | None, Path]:
    """The run and the checkpoint at a path."""
    if (path / STATE).is_file() or (path / CHECKSUMS).is_file():
        if checkpoint is not None:
            raise ValueError(f"{path} is already a checkpoint: leave out --checkpoint")
        # it is two folders below its run; a copy may be anywhere
        above = path.resolve().parent.parent
        return (RunDir(above) if (above / "config.toml").is_file() else None), path
    # a run without its configuration may still have checkpoints
    if (path / "config.toml").is_file() or (path / "checkpoints").is_dir():
        run = RunDir(path)
        return run, find_checkpoint(run, checkpoint)
    raise ValueError(_explain_refusal(path))


def _explain_refusal(path: Path) -> str:
    """Why a path is not a model."""
    nearby = describe_run_nearby(path)
    if nearby is not None:
        return nearby
    if path.is_file():
        return f"{path} is a file: name {EXPECTED}"
    if (path / foreign.ADAPTER_FILE).is_file():
        return f"{path} has only an adapter: merge it into its model with peft, and save that"
    if not path.is_dir():
        near = suggest(path.name, os.listdir(path.parent) if path.parent.is_dir() else ())
        return f"there is no run or model at '{path}': name {EXPECTED}.{near}"
    return (
        f"{path} is not a model: it has neither a run's config.toml nor a {foreign.CONFIG_FILE}; "
        f"name {EXPECTED}"
    )
