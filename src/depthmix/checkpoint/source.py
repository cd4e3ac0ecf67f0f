"""A model on disk that can be loaded: its configuration now, its weights when they are asked for.

Knows the folders of runs; those of others are told by whoever can read them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from depthmix.checkpoint.chat import Chat, read_chat
from depthmix.checkpoint.weights import build_model, choose_checkpoint, load_weights, read_config
from depthmix.config import ModelConfig
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
    chat: Chat | None = None
    """How it is talked to, where it was taught to answer."""

    def build(self) -> Transformer:
        """The model, in evaluation mode."""
        return build_model(self.config, self.load(), self.path)


def open_run(path: Path | str, *, max_seq_len: int | None = None) -> Source:
    """A run or one of its checkpoints; of a run the best one, where there are scores."""
    path = Path(path)
    checkpoint = choose_checkpoint(path)
    config = read_config(checkpoint)
    if max_seq_len is not None:
        config = config.override({"max_seq_len": max_seq_len})
    # the checkpoint lies two folders below its run
    chat = read_chat(checkpoint.resolve().parent.parent)
    return Source(path, config, "depthmix", lambda: load_weights(checkpoint), chat)
