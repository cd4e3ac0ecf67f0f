"""A model's weights and rules, laid out for whole-model kernels.

Owns how weights are stacked, once per model: all engines share the stacks, and the model's own
parameters become views of them. Knows nothing of the kernels' internals.
"""

import operator
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from depthmix.config import STRATEGIES, ModelConfig
from depthmix.kernels.decode.plan import Rules, Weights
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.nn.block import Block
from depthmix.nn.layers import MLP


class Stacks:
    """A model's stacked weights, and whether its parameters are still views of them."""

    def __init__(self, model: Transformer) -> None:
        self.weights = stack_weights(model)
        # where each parameter is attached, since walking through a model takes milliseconds
        hooks = [
            (module._parameters, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._owners, self._names, self._parameters = zip(*hooks, strict=True)
        self._places = self._find_places()

    def are_current(self) -> bool:
        """Whether no parameter has been moved or replaced since."""
        # called for every request, so the loop runs in C (`map` over builtins)
        found = map(dict.get, self._owners, self._names)
        if not all(map(operator.is_, found, self._parameters)):
            return False
        return self._places == self._find_places()

    def _find_places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._parameters))


_STACKED: "WeakKeyDictionary[Transformer, Stacks]" = WeakKeyDictionary()


def find_stacks(model: Transformer) -> Stacks:
    """Return the model's stacked weights; restack them if missing or out of date."""
    stacks = _STACKED.get(model)
    if stacks is None or not stacks.are_current():
        stacks = _STACKED[model] = Stacks(model)
    return stacks


def stack_weights(model: Transformer) -> Weights:
    """Stack the model's tensors by layer; its parameters become views, so there is no copy."""
    blocks = [_find_block(layer) for layer in model.layers]
    routed = [layer.decider for layer in model.layers if isinstance(layer, MixtureOfDepths)]
    attentions, mlps = [block.attention for block in blocks], [_find_mlp(block) for block in blocks]
    queries = [a.norm_query.weight for a in attentions if a.norm_query is not None]
    keys = [a.norm_key.weight for a in attentions if a.norm_key is not None]
    predictors = [d.predictor for d in routed if d.predictor is not None]
    ups = [[m.w_up] if m.w_gate is None else [m.w_gate, m.w_up] for m in mlps]
    biases = [[a.w_qk.bias, a.w_value.bias] for a in attentions]
    return Weights(
        embedding=model.embedding.weight.detach(),
        phase_table=model.phase_table,
        norm_attention=_stack([[b.norm_attention.weight] for b in blocks]),
        w_qkv=_stack([[a.w_qk.weight, a.w_value.weight] for a in attentions]),
        w_attn_out=_stack([[a.w_out.weight] for a in attentions]),
        norm_mlp=_stack([[b.norm_mlp.weight] for b in blocks]),
        w_in=_stack([[m.weight for m in row] for row in ups]),
        w_mlp_out=_stack([[m.w_out.weight] for m in mlps]),
        norm=model.norm.weight.detach(),
        head=model.head.weight.detach(),
        norm_query=_stack_some([[q] for q in queries]),
        norm_key=_stack_some([[k] for k in keys]),
        qkv_bias=_stack_some([row for row in biases if None not in row]),
        # a weight with a single output row, or a bias with one element
        router=_squeeze(_stack_some([[d.router.weight] for d in routed])),
        predictor_in=_stack_some([[p.w_in.weight] for p in predictors]),
        predictor_out=_squeeze(_stack_some([[p.w_out.weight] for p in predictors])),
        predictor_bias=_squeeze(_stack_some([[p.w_out.bias] for p in predictors])),
    )


def make_rules(config: ModelConfig, selector: str | None) -> Rules:
    """Collect the rules that the tensors do not determine."""
    routing = config.routing
    return Rules(
        num_heads=config.num_heads,
        norm_eps=config.norm_eps,
        routed_layers=tuple(config.routed_layers),
        selector=selector or "all",
        gate=routing.gate,
        normalize=routing.normalize_input,
        first_tokens=routing.first_tokens,
        early_exit=STRATEGIES[routing.strategy].is_final,
    )


def _stack(parameters: Sequence[Sequence[Tensor]]) -> Tensor:
    """Concatenate each layer's tensors and stack the layers; parameters become views of it."""
    whole = torch.stack([torch.cat([p.detach() for p in row]) for row in parameters])
    for layer, row in zip(whole, parameters, strict=True):
        parts = layer.split([p.shape[0] for p in row])
        for parameter, part in zip(row, parts, strict=True):
            parameter.data = part
    return whole


def _stack_some(parameters: Sequence[Sequence[Tensor]]) -> Tensor | None:
    return _stack(parameters) if parameters else None


def _squeeze(stacked: Tensor | None) -> Tensor | None:
    return None if stacked is None else stacked.squeeze(1)


def _find_block(layer: nn.Module) -> Block:
    block = layer.block if isinstance(layer, MixtureOfDepths) else layer
    assert isinstance(block, Block)
    return block


def _find_mlp(block: Block) -> MLP:
    assert isinstance(block.mlp, MLP)
    return block.mlp
