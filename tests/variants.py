"""Every kind of model that the invariants must hold for, as overrides of the `tiny` preset.

Owns how a test makes a model and its tokens; asserts nothing.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from depthmix.config import ModelConfig, load_preset
from depthmix.nn import Transformer
from depthmix.nn.attention import Attention
from depthmix.nn.depth import Decider
from depthmix.nn.experts import Experts
from depthmix.nn.layers import MLP, RMSNorm
from depthmix.nn.router import Predictor, Router
from depthmix.nn.transformer import EMBEDDING_STD

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "width": 32,
    "mlp_width": 32,
    # the paper's; what presets have instead is among the variants
    "qk_norm": False,
    "routing.gate": "raw",
    "routing.init_std": 0.02,
    "routing.capacity": 0.25,
    "routing.predictor_width": 8,
    "experts.num_experts": 4,
    "experts.width": 16,
    "experts.predictor_width": 8,
}

_EXPERTS: dict[str, Any] = {"routing.strategy": "none", "experts.capacity": 1.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"routing.strategy": "none"},
    "dense_gelu": {"routing.strategy": "none", "mlp": "gelu"},
    "dense_mha_qk_norm_untied": {
        "routing.strategy": "none",
        "num_kv_heads": None,
        "qk_norm": True,
        "tied_head": False,
    },
    "mod": {},
    "mod_mix_values": {"residual_mix": True, "value_embedding": True},
    "mod_qkv_bias": {"qkv_bias": True},
    "mod_sigmoid": {"routing.gate": "sigmoid"},
    "mod_tanh1": {"routing.gate": "tanh1"},
    "mod_unit": {"routing.gate": "unit"},
    "mod_aux": {"routing.aux_loss_weight": 0.01, "routing.predictor": False},
    "mod_plain_scores": {"routing.normalize_input": False, "qk_norm": True},
    "mod_gelu_mqa_untied": {"mlp": "gelu", "num_kv_heads": 1, "tied_head": False},
    "dense_memory": {
        "routing.strategy": "none",
        "memory.place": "blocks",
        "memory.every": 3,
        "memory.num_rows": 50,
        "memory.width": 24,
    },
    "mod_memory": {"memory.place": "input", "memory.ngrams": (1, 3), "memory.num_rows": 50},
    "mod_lookup": {"routing.bypass": "lookup", "memory.num_rows": 50, "memory.num_hashes": 1},
    "mod_first_tokens": {"routing.first_tokens": 2},
    "mod_first_dense": {"routing.first_dense": 1, "routing.every": 1},
    "mod_list": {"routing.capacity": (0.75, 0.3)},
    "mod_linear": {"routing.every": 1, "routing.capacity": "linear"},
    "mod_cosine": {"routing.every": 1, "routing.capacity": "cosine"},
    "mod_kv": {"routing.kv_capacity": 0.5},
    "mod_kv_first_tokens": {"routing.kv_capacity": 0.5, "routing.first_tokens": 1},
    "token_choice": {"routing.strategy": "token_choice"},
    "token_choice_kv": {"routing.strategy": "token_choice", "routing.kv_capacity": 0.5},
    "token_choice_bias": {"routing.strategy": "token_choice", "routing.bias_rate": 1.0},
    "stochastic": {"routing.strategy": "stochastic"},
    "early_exit": {
        "routing.strategy": "early_exit",
        "routing.every": 1,
        "routing.capacity": "linear",
    },
    "causal": {"routing.strategy": "causal"},
    "causal_router": {
        "routing.strategy": "causal",
        "routing.predictor": False,
        "routing.aux_loss_weight": 0.01,
    },
    "moe_expert_choice": {**_EXPERTS, "experts.strategy": "expert_choice"},
    "moe_token_choice": {
        **_EXPERTS,
        "experts.strategy": "token_choice",
        "experts.per_token": 2,
        "experts.capacity": 2.0,
    },
    "moe_token_choice_limited": {
        **_EXPERTS,
        "experts.strategy": "token_choice",
        "experts.per_token": 2,
        "experts.capacity": 1.0,
    },
    "moe_gelu_every_2": {
        **_EXPERTS,
        "experts.strategy": "expert_choice",
        "experts.every": 2,
        "experts.predictor": False,
        "experts.aux_loss_weight": 0.01,
        "mlp": "gelu",
    },
    "mode_staged": {"experts.strategy": "expert_choice", "routing.capacity": 0.5},
    "mode_staged_token_choice": {
        "experts.strategy": "token_choice",
        "experts.per_token": 2,
        "experts.capacity": 1.5,
        "routing.capacity": 0.5,
    },
    "mode_integrated_expert_choice": {
        **_EXPERTS,
        "experts.strategy": "expert_choice",
        "experts.num_noop": 2,
        "experts.capacity": 0.5,
    },
    "mode_integrated_token_choice": {
        **_EXPERTS,
        "experts.strategy": "token_choice",
        "experts.num_noop": 2,
    },
}

NAMES = list(VARIANTS)


def make_config(name: str, **overrides: Any) -> ModelConfig:
    """A variant's configuration, small; dotted overrides come last."""
    if not overrides:
        return _load(name)
    return load_preset("tiny", **{**BASE, **VARIANTS[name], **overrides})


@cache
def _load(name: str) -> ModelConfig:
    return load_preset("tiny", **{**BASE, **VARIANTS[name]})


def make_model(
    config: ModelConfig | str, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Transformer:
    """A model whose scores have size one: decisions are neither all alike nor near a tie."""
    config = make_config(config) if isinstance(config, str) else config
    torch.manual_seed(seed)
    model = Transformer(config).to(dtype)
    with torch.no_grad():
        model.embedding.weight.normal_()
        if model.mix is not None:
            model.mix.uniform_(0.5, 1.5)
        if model.value_embedding is not None:
            model.value_embedding.weight.normal_()
        if model.ngrams is not None:
            model.ngrams.rows.weight.normal_()
        for module in model.modules():
            if isinstance(module, Router):
                module.weight.normal_(std=config.width**-0.5)
            elif isinstance(module, Decider) and module.bias is not None:
                module.bias.normal_(std=0.5)
            elif isinstance(module, Predictor):
                module.w_in.weight.normal_(std=config.width**-0.5)
                module.w_out.weight.normal_()
                module.w_out.bias.normal_(std=0.1)
            elif isinstance(module, RMSNorm):
                module.weight.uniform_(0.5, 1.5)
            elif isinstance(module, Experts):
                module.w_in.mul_(2)
    return enlarge_updates(model)


@torch.no_grad()
def enlarge_updates(model: Transformer) -> Transformer:
    """What the blocks of a fresh model add is so small that a test may not miss it: fifty times."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.w_out.div_(EMBEDDING_STD)
        elif isinstance(module, Attention | MLP):
            module.w_out.weight.div_(EMBEDDING_STD)
    return model


def make_tokens(config: ModelConfig, *shape: int, seed: int = 1) -> Tensor:
    """Random token ids."""
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def causal_selectors(config: ModelConfig) -> list[str | None]:
    """The selectors under which no decision may see the future; None is training's own rule."""
    named = [s for s in ("predictor", "router", "all") if config.find_selector_problem(s) is None]
    return [*named] if config.needs_selector_to_decode else [None, *named]


def causal_cases() -> list[tuple[str, str | None]]:
    """(variant, causal selector), every pair that exists."""
    return [(name, s) for name in NAMES for s in causal_selectors(make_config(name))]


def routes_deterministically(name: str) -> bool:
    """Whether the training rule gives the same answer twice."""
    return make_config(name).routing.strategy != "stochastic"


def pad_rows(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows of token ids to one batch, and document ids that are -1 in the padding."""
    longest = max(len(row) for row in rows)
    # the padding's own id is a real token's: only document_ids may tell them apart
    tokens = torch.full((len(rows), longest), 7)
    documents = torch.full((len(rows), longest), -1)
    for number, row in enumerate(rows):
        here = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        tokens[number, here] = row
        documents[number, here] = 0
    return tokens, documents


def loss_of(logits: Tensor) -> Tensor:
    """A scalar that depends on every logit, each in its own way."""
    return (logits.double() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()


def gradients_of(model: Transformer) -> dict[str, Tensor | None]:
    """Every parameter's gradient by name."""
    return {name: p.grad for name, p in model.named_parameters()}


def rotate_by_hand(x: Tensor, phase: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + H/2}) as a complex number, times cos + i·sin of its token."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:])
    turned = pairs * torch.complex(phase[:, :, 0], phase[:, :, 1])[:, :, None]
    return torch.cat([turned.real, turned.imag], dim=-1)
