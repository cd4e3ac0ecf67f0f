"""The model as a `PreTrainedModel`, which loads, saves, generates and trains like any other.

Chooses the selector, interprets padding and packing, and refuses incomplete weights. The network,
its cache and its losses are those of `nn`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from depthmix.checkpoint.weights import align_weight
from depthmix.hf.cache import PastTokens
from depthmix.hf.config import STUB, DepthmixConfig
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.nn.layers import Linear
from depthmix.nn.losses import IGNORE, routing_loss
from depthmix.nn.transformer import Hidden

# what a saved folder brings along for `trust_remote_code=True`
STUB_TEXT = '''"""Opens this model with the installed package: pip install 'depthmix[hf]'."""

from depthmix.hf import DepthmixConfig, DepthmixForCausalLM

__all__ = ["DepthmixConfig", "DepthmixForCausalLM"]
'''


@dataclass
class DepthmixOutput(ModelOutput):
    """The model's output."""

    loss: Float[Tensor, ""] | None = None
    """With labels: the loss in nats per token."""
    logits: Float[Tensor, "B T V"] | None = None
    """Scores of the next token."""
    past_key_values: Cache | None = None
    """The cache that was used, if any."""
    routing_loss: Float[Tensor, ""] | None = None
    """In training: the share of `loss` that trains routers and predictors."""


class DepthmixForCausalLM(PreTrainedModel, GenerationMixin):
    """A Mixture-of-Depths language model."""

    config_class = DepthmixConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["Block", "MixtureOfDepths"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: DepthmixConfig) -> None:
        super().__init__(config)
        self.model = Transformer(config.to_model_config())
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """As transformers does, but from safetensors only and with every weight accounted for."""
        # other shapes are reported below, by name
        options = {**options, "ignore_mismatched_sizes": True, "use_safetensors": True}
        options["output_loading_info"] = True
        loaded: Any = super().from_pretrained(*args, **options)
        model, info = loaded
        kinds = {"missing": "missing_keys", "not the model's": "unexpected_keys"}
        kinds["of another shape"] = "mismatched_keys"
        named = {word: sorted(map(_name_key, info.get(kind, ()))) for word, kind in kinds.items()}
        problems = [f"{word}: {', '.join(names)}" for word, names in named.items() if names]
        if problems:
            raise ValueError(f"the weights do not fit the configuration; {'; '.join(problems)}")
        for weight in model.parameters():
            weight.data = align_weight(weight.data)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """As transformers does, with a stub for programs that have not imported this package."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        # first, as saving may also upload
        (folder / f"{STUB}.py").write_text(STUB_TEXT, encoding="utf-8")
        super().save_pretrained(save_directory, *args, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing: a saved folder imports this package, and carries no copy of it."""

    def _init_weights(self, module: nn.Module) -> None:
        # weights are drawn when the network is made; this table is in no file
        if isinstance(module, Transformer):
            module.phase_table.copy_(module.make_phases())

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens' vectors."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace it."""
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace it."""
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **options: Any) -> nn.Embedding:
        """As transformers does."""
        if self.model.value_embedding is not None:
            raise ValueError("a model with value_embedding cannot change its vocabulary")
        resized = super().resize_token_embeddings(*args, **options)
        self.model.config = self.config.to_model_config()
        return resized

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        self.gradient_checkpointing = enable
        for index, layer in enumerate(self.model.layers):
            # from outside, as everywhere here: the class's own forward comes back
            vars(layer).pop("forward", None)
            if enable and index % every_n_layers == 0:
                recompute = functools.partial(_recompute, gradient_checkpointing_func)
                layer.forward = functools.partial(recompute, layer.forward)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "#B T"] | None = None,
        past_key_values: Cache | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> DepthmixOutput:
        """Logits, and with `labels` the loss; in training the routing losses are in it.

        `attention_mask` is 0 for padding. Without it, `position_ids` that begin again begin another
        document. A cache is used where one is given, and made where `use_cache` is true.
        """
        if input_ids is None:
            raise ValueError("inputs_embeds is not supported: give input_ids")
        if options.get("output_hidden_states") or options.get("output_attentions"):
            raise ValueError(
                "hidden states and attentions are not returned: leave out these options"
            )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        hidden = self._compute_hidden(input_ids, attention_mask, position_ids, past_key_values)
        if isinstance(logits_to_keep, int):
            kept = hidden.hidden[:, -logits_to_keep:] if logits_to_keep else hidden.hidden
        else:
            kept = hidden.hidden[:, logits_to_keep]
        logits = self.model.head(kept)
        loss = extra = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options
            )
        if loss is not None and labels is not None and self.training:
            extra = self._weigh_routing_loss(hidden, labels, options.get("num_items_in_batch"))
            loss = loss + extra
        return DepthmixOutput(
            loss=loss, logits=logits, past_key_values=past_key_values, routing_loss=extra
        )

    def _compute_hidden(
        self,
        tokens: Int[Tensor, "B T"],
        mask: Any,
        positions: Tensor | None,
        past: Cache | None,
    ) -> Hidden:
        config, selector = self.model.config, self.config.selector
        if config.routing.kv_capacity is not None:
            self._refuse_adapters()
        cache = None if past is None else PastTokens(past, config, tokens.device)
        documents = None
        if mask is not None:
            documents = _mark_padding(tokens, mask, cached=cache is not None)
        elif positions is not None and cache is None:
            documents = _mark_documents(tokens, positions)
        if self.training and cache is None:
            # the rule that the model is trained by
            selector = None
        elif selector != "topk" or cache is not None:
            selector = config.choose_selector(selector)
        return self.model.compute_hidden(
            tokens, selector=selector, document_ids=documents, cache=cache
        )

    def _refuse_adapters(self) -> None:
        """Decoupled routing takes the two halves of a matrix, which would pass an adapter by."""
        routed = (layer for layer in self.model.layers if isinstance(layer, MixtureOfDepths))
        if any(type(layer.get_submodule("block.attention.w_qk")) is not Linear for layer in routed):
            raise ValueError(
                "with routing.kv_capacity w_qk cannot have an adapter: leave it out of "
                "target_modules"
            )

    def _weigh_routing_loss(
        self, hidden: Hidden, labels: Tensor, num_items: int | Tensor | None
    ) -> Float[Tensor, ""]:
        """A mean over tokens, as large a part of an accumulated batch as these labels are."""
        loss = routing_loss(self.model.config, hidden.routings, hidden.expert_routings).loss
        loss = loss.to(hidden.hidden.device)
        if num_items is None:
            return loss
        return loss * (labels[:, 1:] != IGNORE).sum() / num_items

    @staticmethod
    def create_masks_for_generate(
        config: DepthmixConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor | None:
        """Which of the new tokens are tokens: their order follows from the cache."""
        return None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]


def _mark_padding(
    tokens: Int[Tensor, "B T"], mask: Any, *, cached: bool
) -> Int[Tensor, "B T"] | None:
    """Document 0, and -1 in the padding; None where there is no padding."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < tokens.shape[1]:
        raise ValueError(
            f"attention_mask must be (batch, tokens) with 0 for padding, not "
            f"{tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
        )
    # of all that the cache has seen, only what is new
    present_BT = mask[:, -tokens.shape[1] :] != 0
    if not torch.compiler.is_compiling():
        if present_BT.all():
            return None
        starts_B = (present_BT[:, 1:] & ~present_BT[:, :-1]).sum(dim=1) + present_BT[:, 0]
        if not cached and starts_B.max() > 1:
            raise ValueError("attention_mask has padding between tokens: pad at one end of a row")
    return present_BT.long() - 1


def _mark_documents(
    tokens: Int[Tensor, "B T"], positions: Int[Tensor, "#B T"]
) -> Int[Tensor, "B T"] | None:
    """A number for each document of a packed row; None where a row is one document."""
    goes_on_BT = positions[:, 1:] == positions[:, :-1] + 1
    if torch.compiler.is_compiling() or goes_on_BT.all():
        return None
    starts_BT = nn.functional.pad((~goes_on_BT).long(), (1, 0))
    return starts_BT.cumsum(dim=1).expand(tokens.shape[0], -1)


def _recompute(
    run: Callable[..., Any], forward: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return run(forward, *args, **options)


def _name_key(key: Any) -> str:
    """A weight's name; one of another shape comes with its shapes."""
    return (
        key
        if isinstance(key, str)
        else f"{key[0]} ({' for '.join(str(tuple(shape)) for shape in key[1:])})"
    )
