"""Rank the blocks of a dense model by how much a text's loss rises when they are removed."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.eval.perplexity import measure_stream
from depthmix.eval.stream import Stream, read_texts
from depthmix.models import StoredModel
from depthmix.nn import Transformer
from depthmix.nn.block import Update
from depthmix.world import choose_device

# the shortest text that says something about a block, what is read of a long one, in windows
MIN_TOKENS, MAX_TOKENS, WINDOW = 64, 2048, 512


class LeftOut(NamedTuple):
    """One of the blocks whose removal hurts least."""

    layer: int
    loss: float
    """In nats per token, without this block and those found before it."""


class LeastBlocks(NamedTuple):
    """The blocks whose removal hurts least on a text, with the losses."""

    whole: float
    """Loss with every block."""
    found: tuple[LeftOut, ...]
    """In the order in which they were left out."""
    num_tokens: int
    """Of the text."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The blocks, in their order in the model."""
        return tuple(sorted(each.layer for each in self.found))

    def describe(self) -> str:
        """The result in a sentence."""
        losses = ", ".join(f"{each.loss:.3f} (block {each.layer})" for each in self.found)
        return (
            f"blocks left out one by one, the loss of {self.num_tokens - 1:,} tokens rises from "
            f"{self.whole:.3f} to {losses}"
        )


class _Absent(nn.Module):
    """A block that adds nothing."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Update:
        return Update(torch.zeros_like(x), None)


def measure_least(
    source: StoredModel,
    texts: Iterable[str],
    count: int,
    *,
    device: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> LeastBlocks:
    """The `count` blocks of a model whose removal hurts least on some texts.

    `texts` are read after all other checks; `report` is as in `find_least_blocks`.
    """
    num_layers = source.config.num_layers
    if count > num_layers:
        raise ValueError(f"--least {count} is more than the {num_layers} blocks of {source.path}")
    stream = read_texts(list(texts), source.vocabulary, MAX_TOKENS)
    if len(stream.tokens) < MIN_TOKENS:
        raise ValueError(
            f"--text has {len(stream.tokens)} tokens, which says little about a block: give "
            f"{MIN_TOKENS} or more, better {MAX_TOKENS:,}"
        )
    network = source.network.to(choose_device(device))
    return find_least_blocks(network, stream, count, report=report, seq_len=WINDOW)


def find_least_blocks(
    model: Transformer,
    stream: Stream,
    count: int,
    *,
    report: Callable[[int, int], None] | None = None,
    **options: Any,
) -> LeastBlocks:
    """The blocks whose removal hurts least, each found with the previous ones left out.

    A block is measured again only while it looks best by its last measurement, because a block
    usually matters more once others are removed. `report` gets the number of measurements done and
    a lower bound of their total; `options` are those of `measure_stream`.
    """
    num_layers = model.config.num_layers
    if model.config.routed_layers:
        raise ValueError(
            "blocks can be left out only of a dense model, and this one has routed blocks"
        )
    if not 1 <= count <= num_layers:
        raise ValueError(f"count = {count} must be from 1 to {num_layers}, the number of blocks")
    num_done = 0

    def measure(left_out: Sequence[int]) -> float:
        nonlocal num_done
        loss = _measure_without(model, left_out, stream, options)
        num_done += 1
        if report is not None:
            # one for the whole model and each block, and one to make sure of each later choice
            report(num_done, max(num_done, num_layers + count))
        return loss

    whole = before = measure(())
    rises = {layer: measure((layer,)) - before for layer in range(num_layers)}
    found: list[LeftOut] = []
    while len(found) < count:
        sure: set[int] = set() if found else set(rises)
        chosen = [each.layer for each in found]
        while (layer := min(rises, key=rises.__getitem__)) not in sure:
            rises[layer] = measure((*chosen, layer)) - before
            sure.add(layer)
        before += rises.pop(layer)
        found.append(LeftOut(layer, before))
    return LeastBlocks(whole, tuple(found), len(stream.tokens))


def _measure_without(
    model: Transformer, left_out: Sequence[int], stream: Stream, options: dict[str, Any]
) -> float:
    found = measure_stream(leave_out(model, left_out), stream, **options)
    # the training's own rule comes first; with experts there is another
    return next(iter(found["rules"].values()))["loss"]


def leave_out(model: Transformer, layers: Sequence[int]) -> Transformer:
    """The model without what these blocks add. It shares all weights; `model` is not changed."""
    shallow = copy.copy(model)
    # a copy of a module shares the table of its parts
    shallow._modules = dict(model._modules)
    shallow.layers = nn.ModuleList(
        _Absent() if index in layers else block for index, block in enumerate(model.layers)
    )
    return shallow
