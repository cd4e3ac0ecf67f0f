"""Models for the decoding benchmarks, with random weights that route at the capacity's rate."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix import ModelConfig, RoutingConfig, flops
from depthmix.config import num_kept
from depthmix.nn import Transformer
from depthmix.nn.depth import MixtureOfDepths
from depthmix.nn.router import Predictor


class Shape(NamedTuple):
    """A model and its workload."""

    fields: dict[str, int]
    cases: tuple[tuple[int, int], ...]
    """Rows, and tokens before the first step, of each timed decode; the first has baselines."""
    num_new: int
    num_prompts: tuple[int, ...]
    """Numbers of prompts for `generate`, each as long as in the first case."""
    prefill_tokens: int


def make_shape(width: int, layers: int, heads: int, vocabulary: int, *rest: object) -> Shape:
    fields = {"width": width, "num_layers": layers, "num_heads": heads, "vocab_size": vocabulary}
    return Shape(fields, *rest)


SHAPES = {
    "large": make_shape(2048, 24, 16, 32768, ((1, 1024), (64, 2048)), 256, (1, 64), 2048),
    "small": make_shape(1024, 16, 8, 32768, ((1, 1024),), 256, (1, 64), 2048),
    "cpu": make_shape(512, 12, 8, 4096, ((1, 128),), 256, (1,), 512),
    "smoke": make_shape(64, 4, 2, 256, ((1, 16), (4, 32)), 8, (1, 4), 32),
}
ROUTING = {"dense": RoutingConfig(), "mod": RoutingConfig(strategy="expert_choice")}
CALIBRATION_TOKENS = 8192
SCORE_SPREAD = 0.5
"""Approximate ratio of the standard deviation of a predictor's score to that of its last matrix."""


def make_config(model: str, shape: Shape) -> ModelConfig:
    longest = max(shape.prefill_tokens, *(context for _, context in shape.cases))
    return ModelConfig(**shape.fields, max_seq_len=longest + shape.num_new, routing=ROUTING[model])


def find_heads(model: Transformer) -> list[Predictor]:
    """The predictors of the routed blocks, in order."""
    routed = [layer for layer in model.layers if isinstance(layer, MixtureOfDepths)]
    heads = [layer.decider.predictor for layer in routed]
    if None in heads:
        raise ValueError("there are no predictors to calibrate: set routing.predictor = true")
    return [head for head in heads if head is not None]


@torch.no_grad()
def calibrate(model: Transformer, tokens: Tensor, share: float) -> None:
    """Set the predictors' biases so that each routed block keeps `share` of `tokens`.

    In one pass: a block's decisions change the next one's input, so each bias is set when the pass
    reaches it, and the pass continues with the decisions of the new bias.
    """
    if not 0 < share < 1:
        raise ValueError(f"share = {share} must lie between 0 and 1")

    def set_bias(head: Predictor, inputs: tuple[Tensor], scores: Tensor) -> Tensor:
        ordered = scores.float().flatten().sort(descending=True).values
        # puts zero between the last kept score and the first one not kept
        count = num_kept(share, len(ordered))
        head.w_out.bias -= ordered[count - 1 : count + 1].mean().to(head.w_out.bias.dtype)
        # recomputed, not just shifted, because a bf16 bias is rounded
        return head.forward(*inputs)

    hooks = [head.register_forward_hook(set_bias) for head in find_heads(model)]
    try:
        model.compute_hidden(tokens, selector=model.config.causal_selector)
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def correct_biases(model: Transformer, measured: Tensor, share: float, num_decisions: int) -> None:
    """Adjust each bias towards `share`, given the measured share of `num_decisions` taken."""
    normal = NormalDist()
    for head, taken in zip(find_heads(model), measured.tolist(), strict=True):
        # clamp away from 0 and 1 by half a decision: no rate is exactly never or always
        taken = min(max(taken, 0.5 / num_decisions), 1 - 0.5 / num_decisions)
        # scores are roughly normal over tokens; their spread is that of a sum over hidden units
        spread = SCORE_SPREAD * head.w_out.weight.float().norm().item()
        head.w_out.bias += spread * (normal.inv_cdf(share) - normal.inv_cdf(taken))


@contextmanager
def keep_biases(model: Transformer) -> Iterator[None]:
    """Restore the predictors' current biases afterwards."""
    before = [head.w_out.bias.detach().clone() for head in find_heads(model)]
    try:
        yield
    finally:
        for head, bias in zip(find_heads(model), before, strict=True):
            head.w_out.bias.data.copy_(bias)


def make_model(
    config: ModelConfig, device: str, dtype: torch.dtype, num_tokens: int
) -> Transformer:
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(config).to(dtype).eval()
    if config.routed_layers:
        size = (math.ceil(CALIBRATION_TOKENS / num_tokens), num_tokens)
        tokens = torch.randint(config.vocab_size, size, device=device)
        calibrate(model, tokens, config.capacities[0])
    return model


def count_bytes(config: ModelConfig, batch: int, num_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the weights and the cache that a step of `batch` rows must read on average."""
    if config.routed_layers:
        # a block is read if any row takes it
        read = 1 - (1 - config.capacities[0]) ** batch
        num_weights = flops.num_parameters(config.override({"routing.capacity": read})).active
    else:
        num_weights = flops.num_parameters(config).active
    return num_weights * dtype.itemsize + flops.kv_cache_bytes(
        config, seq_len=num_tokens, batch_size=batch, bytes_per_element=dtype.itemsize
    )


def draw_prompts(config: ModelConfig, number: int, num_tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    size = (number, num_tokens)
    return torch.randint(config.vocab_size, size, generator=generator).tolist()
