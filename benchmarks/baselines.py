"""What one would train instead: a plain transformer and Hugging Face's Llama, both compiled.

They share the benchmark's shapes and nothing of depthmix's code.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthmix import ModelConfig


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, width, hidden = config.num_heads, config.width, config.shape.mlp_width
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class PlainTransformer(nn.Module):
    """The model one would write in an hour: no routing, logits in full, mean cross-entropy."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        half = config.shape.head_width // 2
        angle = torch.arange(config.max_seq_len)[:, None] * 10000 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class HuggingFaceLlama(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.width,
                intermediate_size=config.shape.mlp_width,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                max_position_embeddings=config.max_seq_len,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


BASELINES = {"plain": PlainTransformer, "hf-llama": HuggingFaceLlama}


class BaselineStep:
    """Forward, backward, fused AdamW: compiled, launched kernel by kernel as by default."""

    def __init__(self, name: str, config: ModelConfig, device: str) -> None:
        self.device = device
        with torch.device(device):
            self.model = BASELINES[name](config)
        for parameter in self.model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.compiled = torch.compile(self.model)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.compiled(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss
