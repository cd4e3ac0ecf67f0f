"""Baselines to train or sample from instead: a plain transformer and Hugging Face's Llama.

They share the benchmarks' shapes, but none of depthmix's code.
"""

from collections.abc import Callable

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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *where: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = self.attend(q, k, v, *where)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CachedBlock(PlainBlock):
    """The same with a fixed-size cache, written in place."""

    def __init__(self, config: ModelConfig, batch: int, num_slots: int) -> None:
        super().__init__(config)
        shape = (batch, config.num_heads, num_slots, config.shape.head_width)
        self.register_buffer("key", torch.randn(shape))
        self.register_buffer("value", torch.randn(shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        self.key.index_copy_(2, position, k)
        self.value.index_copy_(2, position, v)
        return F.scaled_dot_product_attention(q, self.key, self.value, attn_mask=mask)


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


class PlainDecoder(nn.Module):
    """The same model decoding greedily with a static cache: each call makes one token per row.

    All state is in buffers, so that `torch.compile(mode="reduce-overhead")` can replay a step as
    one graph without copying anything in or out. When the cache is full, writing wraps around to
    just after the first `context` tokens.
    """

    def __init__(self, config: ModelConfig, batch: int, context: int, num_new: int) -> None:
        super().__init__()
        self.context, self.num_slots = context, context + num_new
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(
            CachedBlock(config, batch, self.num_slots) for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.width)
        half = config.shape.head_width // 2
        angle = torch.arange(self.num_slots)[:, None] * 10000 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("token", torch.randint(config.vocab_size, (batch, 1)))
        self.register_buffer("position", torch.full((1,), context))

    def forward(self) -> None:
        x = self.embedding(self.token)
        cos, sin = self.cos[self.position], self.sin[self.position]
        mask = torch.arange(self.num_slots, device=x.device)[None, None, None] <= self.position
        for block in self.blocks:
            x = block(x, cos, sin, self.position, mask)
        logits = F.linear(self.norm(x), self.embedding.weight)
        self.token.copy_(logits.argmax(dim=-1))
        following = self.position + 1
        self.position.copy_(torch.where(following < self.num_slots, following, self.context))


def compile_decoder(
    config: ModelConfig, batch: int, context: int, num_new: int, device: str, dtype: torch.dtype
) -> Callable[[], None]:
    """A step of `PlainDecoder`, compiled at the first call."""
    with torch.device(device):
        model = PlainDecoder(config, batch, context, num_new).to(dtype)
    shrink_weights(model)
    # dynamic=False: a second shape must not turn the first one's sizes into variables
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)

    @torch.no_grad()
    def step() -> None:
        compiled()

    return step


def shrink_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)


def make_llama(config: ModelConfig, **fields: object) -> nn.Module:
    """Hugging Face's Llama in the shape of a configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.shape.mlp_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_seq_len,
            tie_word_embeddings=True,
            **fields,
        )
    )


class HuggingFaceLlama(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = make_llama(config, use_cache=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


BASELINES = {"plain": PlainTransformer, "hf-llama": HuggingFaceLlama}


class BaselineStep:
    """Forward, backward, fused AdamW: compiled, with kernels launched one by one (the default)."""

    def __init__(self, name: str, config: ModelConfig, device: str) -> None:
        self.device = device
        with torch.device(device):
            self.model = BASELINES[name](config)
        shrink_weights(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.compiled = torch.compile(self.model)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.compiled(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss
