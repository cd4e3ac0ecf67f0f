"""What the `config.json` of a dense model in a Hugging Face folder means to us.

Owns what of it we can be and what we refuse. Reads the JSON itself: no code or class of theirs is
needed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from depthmix.config import ModelConfig

CONFIG_FILE = "config.json"

# model_type -> what its blocks have beside the rest; SmolLM and many others are of type llama
FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}

# rotary positions of a type -> our `rope_factors` by their names
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}


def read_config(folder: Path, *, max_seq_len: int | None = None) -> ModelConfig:
    """The dense model that a folder's `config.json` describes; what we cannot be is refused.

    `max_seq_len` is for fewer positions than it was made for.
    """
    tree = read_tree(folder)
    kind = str(tree.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"{folder} is of the architecture '{kind}', which cannot be read: it must be one of "
            f"{', '.join(FAMILIES)}"
        )
    num_positions = _get(folder, tree, "max_position_embeddings", int)
    length = min(num_positions, max_seq_len or num_positions)
    problem = next(_find_problems(kind, tree, length), None)
    if problem is not None:
        raise ValueError(f"{folder} has {problem}")
    kind_of_rope, rope = _read_rope(tree)
    try:
        return ModelConfig.from_dict(
            {
                "vocab_size": _get(folder, tree, "vocab_size", int),
                "max_seq_len": length,
                "num_layers": _get(folder, tree, "num_hidden_layers", int),
                "width": _get(folder, tree, "hidden_size", int),
                "num_heads": _get(folder, tree, "num_attention_heads", int),
                "num_kv_heads": tree.get("num_key_value_heads"),
                "head_width": tree.get("head_dim"),
                "mlp_width": _get(folder, tree, "intermediate_size", int),
                "tied_head": tree.get("tie_word_embeddings", False),
                "rope_theta": rope.get("rope_theta", tree.get("rope_theta", 10000.0)),
                "rope_factors": [rope[name] for name in ROPES[kind_of_rope]] or None,
                "norm_eps": tree.get("rms_norm_eps", 1e-6),
                **FAMILIES[kind],
            }
        )
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE} does not make a model: {error}") from error


def read_tree(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG_FILE}: name the folder of a model")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} is not a JSON object")
    return tree


def _find_problems(kind: str, tree: Mapping[str, Any], length: int) -> Iterator[str]:
    """What a dense model of ours cannot do, each as the end of a sentence."""
    for name in tree.get("architectures") or []:
        if not str(name).endswith("ForCausalLM"):
            yield f"the architecture '{name}': only language models (…ForCausalLM) can be read"
    if tree.get("quantization_config"):
        yield "quantised weights (quantization_config): use the original ones"
    if tree.get("hidden_act", "silu") not in ("silu", "swish"):
        yield f"the activation '{tree['hidden_act']}': only silu can be read"
    # Qwen2 has biases on queries, keys and values whatever it says here
    for name in ("attention_bias", "mlp_bias"):
        if tree.get(name) and kind != "qwen2":
            yield f"{name} = true: such biases cannot be read"
    scaling, rope = _read_rope(tree)
    if scaling not in ROPES:
        yield f"rotary positions of type '{scaling}', which cannot be read"
    for name in ROPES.get(scaling, ()):
        if not isinstance(rope.get(name), int | float):
            yield f"rotary positions of type '{scaling}' and no number '{name}' for them"
    if rope.get("partial_rotary_factor", 1) != 1:
        yield "partial rotary positions, which cannot be read"
    # Mistral's window where its configuration does not say
    window = tree.get("sliding_window", 4096 if kind == "mistral" else None)
    if tree.get("use_sliding_window", kind == "mistral") and window and window < length:
        yield (
            f"attention in a sliding window of {window} tokens: up to so many it is the same as "
            f"without, so give max_seq_len={window}"
        )


def _read_rope(tree: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Type and numbers of the rotary positions; releases before 5 have them in two places."""
    found = (tree.get(name) for name in ("rope_parameters", "rope_scaling"))
    newer, older = (each if isinstance(each, dict) else {} for each in found)
    chosen = older or newer
    return str(chosen.get("rope_type", chosen.get("type", "default"))), {**newer, **older}


def _get(folder: Path, tree: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(tree.get(name), kind):
        raise ValueError(f"{folder / CONFIG_FILE} does not say {name}: it is no model's")
    return tree[name]
