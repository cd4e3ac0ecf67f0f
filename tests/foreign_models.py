"""Tiny dense models that transformers makes and writes, and tokenizers to go with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.data.tokenizer import TOKENIZER_FILE, train_tokenizer

KINDS = ("llama", "llama_tied", "mistral", "qwen2", "qwen3")

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def make_foreign(kind: str, **changes: Any) -> Any:
    """A tiny random model of transformers, in float64 and evaluation mode."""
    transformers = pytest.importorskip("transformers")
    theta = {"rope_theta": 5000.0, "rope_type": "default"}
    sizes = {**SIZES, "rope_parameters": theta, **changes}
    if kind == "llama_tied":
        sizes["tie_word_embeddings"] = True
    if kind == "mistral":
        # heads that are not width / num_heads
        sizes = {"sliding_window": None, "head_dim": 16, **sizes}
    if kind == "qwen3":
        sizes = {"head_dim": 12, **sizes}
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    name = name[kind.removesuffix("_tied")]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # norms and biases too: as they begin, a mistake with them would not show
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def write_foreign(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Such a model in a folder, in float32, with a tokenizer."""
    model = make_foreign(kind, **changes).float()
    model.save_pretrained(folder)
    lines = (f"line {i} says {i * i} and no more" for i in range(400))
    train_tokenizer(lines, 300, parallel=False).save(str(folder / TOKENIZER_FILE))
    return folder
