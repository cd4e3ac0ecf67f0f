"""A `ModelConfig` for transformers: the same fields, and transformers' names for some of them.

Defines the contents of `config.json`.
"""

import dataclasses
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from depthmix.config import ModelConfig

LAYER_TYPE = "depthmix"
STUB = "modeling_depthmix"
FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))


class DepthmixConfig(PreTrainedConfig):
    """Every field of `ModelConfig`, and the selector to evaluate and generate with."""

    model_type: ClassVar[str] = "depthmix"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "routing_loss"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "width",
        "intermediate_size": "mlp_width",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_width",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tied_head",
    }

    def __init__(self, *, selector: str | None = None, **options: Any) -> None:
        """`selector` routes tokens outside training; the default is the trained causal head."""
        named = {self.attribute_map.get(name, name): value for name, value in options.items()}
        tree = {name: named.pop(name) for name in FIELDS if name in named}
        # first, as transformers' checks do not know our layers
        super().__init__(**named)
        model = ModelConfig.from_dict(tree)
        for name, value in model.to_dict().items():
            setattr(self, name, value)
        # readers of these names expect numbers
        self.num_kv_heads, self.head_width, self.mlp_width = model.shape[:3]
        self.selector = selector
        self.validate()

    @classmethod
    def from_model_config(cls, model: ModelConfig, **options: Any) -> "DepthmixConfig":
        """The same model; `options` are fields beside the model's own."""
        return cls(**model.to_dict(), **options)

    def to_model_config(self) -> ModelConfig:
        """The model as depthmix describes it, checked."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    @property
    def layer_types(self) -> list[str]:
        """Which kind of cache each block needs: always ours, as a block may skip tokens."""
        return [LAYER_TYPE] * self.num_layers

    def validate(self) -> None:
        """Refuse a configuration that is not a valid model."""
        problem = self.to_model_config().find_selector_problem(self.selector)
        if problem is not None:
            raise ValueError(problem)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the names of the classes in the stub that is saved beside it."""
        classes = {"AutoConfig": "DepthmixConfig", "AutoModelForCausalLM": "DepthmixForCausalLM"}
        auto_map = {kind: f"{STUB}.{name}" for kind, name in classes.items()}
        return {**super().to_dict(), "auto_map": auto_map}

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: a saved folder imports this package, and carries no copy of it."""
