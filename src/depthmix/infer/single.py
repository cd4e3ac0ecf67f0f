"""Kernels that know a whole model: its weights and rules, laid out for them.

Owns how weights are stacked. Knows nothing of the kernels' inside.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from depthmix.config import ModelConfig
from depthmix.kernels.decode import DecodeStep
from depthmix.kernels.plan import Rules, Weights
from depthmix.kernels.routed import RoutedRows
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.nn.block import Block
from depthmix.nn.layers import MLP


def stack_weights(model: Transformer) -> Weights:
    """The model's tensors stacked by layer; its own become views of them, so nothing is twice."""
    blocks = [_find_block(layer) for layer in model.layers]
    routed = [layer.decider for layer in model.layers if isinstance(layer, MixtureOfDepths)]
    attentions, mlps = [block.attention for block in blocks], [_find_mlp(block) for block in blocks]
    queries = [a.norm_query.weight for a in attentions if a.norm_query is not None]
    keys = [a.norm_key.weight for a in attentions if a.norm_key is not None]
    predictors = [d.predictor for d in routed if d.predictor is not None]

    def copy(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor | None:
        return torch.stack([t.detach().to(dtype) for t in tensors]) if tensors else None

    ups = [[m.w_up] if m.w_gate is None else [m.w_gate, m.w_up] for m in mlps]
    return Weights(
        embedding=model.embedding.weight.detach(),
        phase_table=model.phase_table,
        norm_attention=torch.stack([b.norm_attention.weight.detach() for b in blocks]),
        w_qkv=_stack([[a.w_qk, a.w_value] for a in attentions]),
        w_attn_out=_stack([[a.w_out] for a in attentions]),
        norm_mlp=torch.stack([b.norm_mlp.weight.detach() for b in blocks]),
        w_in=_stack(ups),
        w_mlp_out=_stack([[m.w_out] for m in mlps]),
        norm=model.norm.weight.detach(),
        head=model.head.weight.detach(),
        norm_query=copy(queries),
        norm_key=copy(keys),
        router=copy([d.router.weight[0] for d in routed], torch.float32),
        predictor_in=copy([p.w_in.weight for p in predictors]),
        predictor_out=copy([p.w_out.weight[0] for p in predictors]),
        predictor_bias=copy([p.w_out.bias[0] for p in predictors]),
    )


def make_rules(config: ModelConfig, selector: str | None) -> Rules:
    """What the tensors do not say."""
    routing = config.routing
    return Rules(
        num_heads=config.num_heads,
        norm_eps=config.norm_eps,
        routed_layers=tuple(config.routed_layers),
        selector=selector or "all",
        gate=routing.gate,
        normalize=routing.normalize_input,
        first_tokens=routing.first_tokens,
        early_exit=routing.strategy == "early_exit",
    )


def make_single_step(
    config: ModelConfig,
    weights: Weights,
    selector: str | None,
    key_pages: Tensor,
    value_pages: Tensor,
) -> DecodeStep:
    """The kernel for one sequence; pages are (pages, heads, page, width)."""
    return DecodeStep(weights, make_rules(config, selector), key_pages, value_pages)


def make_routed_rows(
    config: ModelConfig, weights: Weights, selector: str | None, num_rows: int
) -> RoutedRows:
    """The kernels for the routed blocks of several sequences."""
    capacity = sum(config.capacities) / len(config.capacities)
    return RoutedRows(weights, make_rules(config, selector), num_rows, capacity)


def _stack(matrices: Sequence[Sequence[nn.Linear]]) -> Tensor:
    """Each layer's matrices below each other; the modules' weights become views of the whole."""
    whole = torch.stack([torch.cat([m.weight.detach() for m in row]) for row in matrices])
    for layer, row in zip(whole, matrices, strict=True):
        parts = layer.split([m.weight.shape[0] for m in row])
        for module, part in zip(row, parts, strict=True):
            module.weight.data = part
    return whole


def _find_block(layer: nn.Module) -> Block:
    block = layer.block if isinstance(layer, MixtureOfDepths) else layer
    assert isinstance(block, Block)
    return block


def _find_mlp(block: Block) -> MLP:
    assert isinstance(block.mlp, MLP)
    return block.mlp
