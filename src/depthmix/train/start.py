"""What a training needs before its first step: memory, data, and the weights to begin with.

Owns what of these is refused. Knows nothing of steps and folders of runs.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from depthmix import flops
from depthmix.checkpoint import collect_tensors
from depthmix.checkpoint.weights import fit_weights
from depthmix.config import RunConfig
from depthmix.data.shards import Corpus
from depthmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from depthmix.models import StoredModel
from depthmix.nn import Transformer
from depthmix.nn.router import Predictor, Router
from depthmix.units import format_bytes
from depthmix.world import World

# as much as can be written as a number with a unit
LARGEST_BYTES = 2**70


def check_memory(run: RunConfig, world: World) -> None:
    """Refuse what cannot fit, before the system kills the process for trying."""
    # a bound from below: weights in float32, where they learn also a gradient and a moment, and
    # what enters each block
    num_tokens = run.tokens_per_step // run.train.num_micro_batches // world.size
    needed = 2 * num_tokens * run.model.width * run.model.num_layers
    try:
        each = 12 if run.train.trainable == "all" else 4
        needed += each * flops.num_parameters(run.model).total // world.size
    except OverflowError:
        needed = LARGEST_BYTES
    if world.device.type == "cuda":
        present = torch.cuda.get_device_properties(world.device).total_memory
    else:
        present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        size = format_bytes(min(needed, LARGEST_BYTES))
        raise ValueError(
            f"this needs more than {size} of memory and there are {format_bytes(present)}: take a "
            f"smaller model, a smaller train.batch_size or a larger train.num_micro_batches"
        )


def open_corpus(folder: Path, run: RunConfig) -> Corpus:
    """A data folder whose files are whole and whose ids the model has."""
    corpus = Corpus.open(folder, verify="auto")
    if corpus.vocab_size > run.model.vocab_size:
        raise ValueError(
            f"{folder} has ids up to {corpus.vocab_size - 1}, and the model's vocab_size is "
            f"{run.model.vocab_size}: add vocab_size={corpus.vocab_size}"
        )
    return corpus


def check_tokenizer(source: Path, corpus: Corpus) -> None:
    """Refuse data whose ids mean something else to the weights that a run begins with."""
    name = corpus.manifest.tokenizer
    if name is None or not (source / TOKENIZER_FILE).is_file():
        return
    if (source / TOKENIZER_FILE).read_bytes() == (corpus.folder / name).read_bytes():
        return
    ours, theirs = (load_tokenizer(p).get_vocab() for p in (corpus.folder / name, source))
    if ours != theirs:
        raise ValueError(
            f"the data in {corpus.folder} was made by another tokenizer than {source}'s, so its "
            f"ids mean other words: prepare it with --tokenizer {source}"
        )


@torch.no_grad()
def load_start(model: Transformer, source: StoredModel, seed: int) -> str:
    """Put the weights of `source` into a model that may route elsewhere; a sentence about it.

    On every process; each keeps its part where the model is sharded.
    """
    fitted = fit_weights(model.config, source.load(), source.path, seed)
    _copy(model, fitted.weights)
    sentence = f"starting from the weights of {source.path}"
    for names, what in ((fitted.new, "are new"), (fitted.left, "are left out")):
        if names:
            sentence += f"; {len(names)} tensors of routers and predictors {what}"
    return sentence


def _copy(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    for name, target in collect_tensors(model, [])["model"].items():
        value = weights[name].to(target.device, target.dtype)
        if hasattr(target, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            # every process has read the same, so nothing is sent
            mesh, placements = target.device_mesh, target.placements  # pyrefly: ignore
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        target.copy_(value)


def freeze(model: Transformer, trainable: str) -> None:
    """Let only that part learn: `all`, or routers and predictors, to which `lora` adds its own."""
    if trainable == "all":
        return
    routes = model.config.routed_layers or model.config.expert_layers
    if trainable == "routers" and not routes:
        raise ValueError("train.trainable = routers needs a model that routes")
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Router | Predictor):
            module.requires_grad_(True)
