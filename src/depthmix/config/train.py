"""How a model is trained, as data: batch, optimiser, schedule, budget, how often to save and look.

Owns the names that its fields once had, by which earlier configurations still load. Knows no torch:
a plan of many runs is made and counted without it.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from depthmix.config import fields
from depthmix.config.fields import Bounds, Count, NotNegative, Positive, Share
from depthmix.config.model import ModelConfig, count_share

BASE_WIDTH = 32
# what a run stops by, one of them
BUDGETS = ("steps", "tokens", "flops")

START_RATES: Mapping[str, Any] = {
    "train.optimizer": "adamw",
    "train.learning_rate": 3e-4,
    "train.scale_by_width": False,
    "train.router_rate_factor": 10.0,
}
"""For weights that are already trained: AdamW, which leaves them near where they were and which
adapters need; low rates, embeddings no higher than matrices. But routers and predictors, which
mostly are not trained yet, must follow a capacity that falls."""

# beyond this, not every reader of JSON and TOML keeps whole numbers exact
Seed = Annotated[int, Bounds(least=0, most=2**53 - 1)]
Beta = Annotated[Share, Bounds(below=1, hint="1 would never learn")]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a training run that is not the model or the data.

    >>> Recipe(steps=100, learning_rate=3e-3, final_rate_share=0.2).rate_at(99, 100)
    0.2
    """

    OLD_NAMES: ClassVar[Mapping[str, str]] = {
        "accumulate": "num_micro_batches",
        "router_rate": "router_rate_factor",
        "warmup": "warmup_share",
        "decay": "decay_share",
        "final_rate": "final_rate_share",
        "clip": "max_grad_norm",
        "capacity_from": "start_capacity",
        "capacity_share": "capacity_fall_share",
        "capacity_stages": "num_capacity_stages",
        "distill": "teacher",
        "distill_weight": "distill_loss_weight",
        "keep_checkpoints": "num_kept_checkpoints",
    }
    """What fields were called in configurations that were written before."""

    steps: Positive[int] | None = None
    """Stop after this many optimisation steps."""
    tokens: Positive[float] | None = None
    """Stop when this many tokens were trained on (1e9 may be written)."""
    flops: Positive[float] | None = None
    """Stop when this much compute was spent: the budget by which models are compared."""
    flops_convention: Literal["full", "executed"] = "full"
    """What flops counts: full has attention as a whole square and no optimiser, as the paper does;
    executed has the half that is computed, and the optimiser's own matrix products."""
    batch_size: Positive[int] = 16
    """Sequences in a batch, over all processes and micro-batches."""
    seq_len: Count | None = None
    """Tokens in a sequence. Empty means the model's max_seq_len."""
    num_micro_batches: Positive[int] = 1
    """Micro-batches that a batch is cut into, to save memory."""
    seed: Seed = 0
    """Seed of the weights, of the order of documents, and of everything else that is random."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """muon for the blocks' matrices with adamw for all else, or adamw for everything."""
    learning_rate: Positive[float] = 8e-3
    """Peak learning rate, that of the embeddings; see scale_by_width."""
    scale_by_width: bool = True
    """Give the blocks' matrices learning_rate · 32 / width (Muon's: · √(256 / width)), so that one
    setting fits all sizes."""
    router_rate_factor: Positive[float] = 1.0
    """Learning rate of routers and predictors, in multiples of what they have by that."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warming up: cosine to the end, wsd (stable, then a linear decay), or constant."""
    warmup_share: Share = 0.05
    """Fraction of steps spent warming up."""
    decay_share: Share = 0.2
    """Fraction of steps in which wsd decays, at the end."""
    final_rate_share: Share = 0.1
    """Final learning rate as a fraction of the peak (cosine and wsd)."""
    weight_decay: NotNegative[float] = 0.1
    """Decay of the matrices; embeddings, norms and routers have none."""
    beta1: Beta = 0.9
    """AdamW's momentum."""
    beta2: Beta = 0.95
    """AdamW's memory of squared gradients."""
    max_grad_norm: NotNegative[float] = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    start_capacity: Annotated[float, Bounds(above=0, most=1)] | None = None
    """Capacity that every routed block begins with, to fall to the model's own in stages. Empty
    means: the model's own from the start."""
    capacity_fall_share: Share = 0.5
    """Fraction of steps in which the capacity falls, at the start."""
    num_capacity_stages: Positive[int] = 8
    """Number of stages in which it falls; each is compiled separately if steps are compiled."""
    trainable: Literal["all", "routers", "lora"] = "all"
    """What is trained: all; routers and predictors only; or these and low-rank adapters (lora)."""
    lora_rank: Positive[int] = 16
    """Rank of those adapters."""
    lora_alpha: Positive[float] | None = None
    """An adapter is multiplied by lora_alpha / lora_rank. Empty means twice the rank."""
    lora_blocks: Literal["routed", "all"] = "routed"
    """Blocks whose matrices have adapters: those that route, or all."""
    teacher: str | None = None
    """A run or folder of a model to distil from, beside learning the text."""
    distill_loss_weight: NotNegative[float] = 1.0
    """Weight of that loss, the divergence from the teacher's predictions."""
    document_mask: bool = True
    """Keep attention inside a document; false lets packed documents see the ones before them."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products; weights are float32. auto is bfloat16 on a GPU, else float32."""
    compile: bool | None = None
    """Use torch.compile. Empty means: on a GPU."""
    compile_blocks: bool = False
    """Compile block by block and not the model as a whole: equal blocks are compiled once, so a
    short run starts much sooner; its steps are a little slower."""
    cuda_graph: bool | None = None
    """Replay a whole step as one CUDA graph. Empty means: on one compiled GPU."""
    checkpoint_activations: bool = False
    """Compute activations a second time in the backward pass, to save memory."""
    shard_size: Count | None = None
    """Processes that share one copy of the weights (HSDP). Empty means: all of them (FSDP)."""
    log_every: Positive[int] = 10
    """Steps between two lines of metrics."""
    val_every: Count | None = None
    """Steps between two validations. Empty means: twenty in a run, or fewer where they would read
    more than a tenth of what is trained on; one at the end in any case."""
    val_tokens: Positive[int] = 131072
    """Most tokens of the validation split to evaluate."""
    checkpoint_every: Count | None = None
    """Steps between two checkpoints. Empty means: every checkpoint_minutes."""
    checkpoint_minutes: NotNegative[float] = 3.0
    """Minutes between two checkpoints, where checkpoint_every is empty."""
    num_kept_checkpoints: Annotated[
        int, Bounds(least=1, hint="without one nothing can be resumed")
    ] = 2
    """Number of last checkpoints to keep; the best by validation loss stays beside them."""
    tensorboard: bool = True
    """Write TensorBoard's files into the run's folder."""
    wandb: bool = False
    """Also send metrics to Weights & Biases (needs the extra 'wandb')."""

    def __post_init__(self) -> None:
        fields.coerce(self, "train.")
        problem = next(_find_problems(self), None)
        if problem is not None:
            raise ValueError(problem)

    def check_sharing(self, size: int, noun: str = "processes") -> None:
        """Refuse what cannot be trained by so many processes, or GPUs as a plan calls them."""
        if self.trainable == "lora" and size > 1:
            raise ValueError(
                f"train.trainable = lora merges whole matrices, which {size} {noun} would share: "
                f"use one, or another train.trainable"
            )
        if self.batch_size % (size * self.num_micro_batches):
            cut = self.num_micro_batches
            micro = f" x train.num_micro_batches={cut}" if cut > 1 else ""
            raise ValueError(
                f"train.batch_size = {self.batch_size} cannot be shared by {size} {noun}{micro}: "
                f"give a multiple of {size * cut}"
            )

    def rate_at(self, step: int, num_steps: int) -> float:
        """Learning rate of a step, as a share of the highest; a decay ends at final_rate_share."""
        num_warmup = count_share(self.warmup_share, num_steps)
        if step < num_warmup:
            return (step + 1) / num_warmup
        num_falling = 0 if self.schedule == "constant" else num_steps - num_warmup
        if self.schedule == "wsd":
            num_falling = min(num_falling, count_share(self.decay_share, num_steps))
        num_left = num_steps - 1 - step
        if num_left >= num_falling:
            return 1.0
        share = num_left / num_falling
        if self.schedule == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        final = self.final_rate_share
        return final + (1 - final) * share


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A model and how it is trained: what a run's config.toml holds.

    >>> run = RunConfig(model=load_preset("tiny"), train=Recipe(steps=100, batch_size=8))
    >>> run.tokens_per_step
    512
    >>> run.override({"routing.capacity": 0.5, "train.seq_len": 32}).tokens_per_step
    256
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model; its fields are written without a prefix on the command line."""
    train: Recipe = field(default_factory=Recipe)
    """The recipe; its fields are written train.FIELD."""

    def __post_init__(self) -> None:
        fields.coerce(self)
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len = {self.seq_len} is more than the model's max_seq_len = "
                f"{self.model.max_seq_len}: lower it, or raise max_seq_len"
            )
        adapted = self.train.trainable == "lora"
        if adapted and self.train.lora_rank > self.model.width:
            raise ValueError(
                f"train.lora_rank = {self.train.lora_rank} is more than the model's width "
                f"{self.model.width}: lower it, or give train.trainable=all"
            )
        if adapted and self.train.lora_blocks == "routed" and not self.model.routed_layers:
            raise ValueError(
                "train.lora_blocks = routed needs blocks that route: give train.lora_blocks=all"
            )

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return self.train.seq_len or self.model.max_seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a batch."""
        return self.train.batch_size * self.seq_len

    @property
    def num_val_batches(self) -> int:
        """Batches of a validation, where the split has so many."""
        return max(1, self.train.val_tokens // self.tokens_per_step)

    def space_validations(self, num_steps: int) -> int:
        """Steps between two validations."""
        if self.train.val_every is not None:
            return self.train.val_every
        return max(math.ceil(num_steps / 20), 10 * self.num_val_batches)

    @staticmethod
    def from_overrides(model: ModelConfig, overrides: Mapping[str, Any]) -> "RunConfig":
        """A model and the default recipe, with dotted fields replaced: `{"train.seed": 1}`."""
        return RunConfig(model=model).override(overrides)

    def override(self, overrides: Mapping[str, Any]) -> "RunConfig":
        """A copy with dotted fields replaced, named as `from_overrides` names them.

        A budget takes the place of the one that is there: a run stops by one of them.
        """
        overrides = update_names(overrides)
        for name in overrides:
            _refuse_unknown(name)
        model = {n: v for n, v in overrides.items() if not _is_recipe(n)}
        recipe = {n.removeprefix("train."): v for n, v in overrides.items() if _is_recipe(n)}
        if any(name in recipe for name in BUDGETS):
            recipe = dict.fromkeys(BUDGETS) | recipe
        recipe = dataclasses.asdict(self.train) | recipe
        return RunConfig(
            model=self.model.override(model), train=fields.build(Recipe, recipe, "train.")
        )

    def to_toml(self) -> str:
        """TOML text; `from_toml` gives the same configuration back."""
        return fields.to_toml(self)

    @staticmethod
    def from_toml(text: str) -> "RunConfig":
        """Inverse of `to_toml`."""
        return fields.from_toml(RunConfig, text)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` gives the same configuration back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> "RunConfig":
        """Build from plain data, refusing unknown fields by name."""
        return fields.build(RunConfig, tree)


def update_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields of a run by the names that they have today; of two alike the last counts."""
    return {fields.rename(RunConfig, name): value for name, value in overrides.items()}


def _is_recipe(name: str) -> bool:
    return name.startswith("train.")


def _refuse_unknown(name: str) -> None:
    """Say what was meant, also where only `train.` is missing or too much."""
    recipe, model = fields.document_fields(Recipe), fields.document_fields(ModelConfig)
    if _is_recipe(name):
        bare = name.removeprefix("train.")
        # compared without the prefix: it alone would make short names alike
        close = [f"train.{near}" for near in difflib.get_close_matches(bare, recipe, n=1)]
        unknown, meant = bare not in recipe, [bare] if bare in model else close
    else:
        # unknown names are refused by the model
        bare = Recipe.OLD_NAMES.get(name, name)
        unknown, meant = bare in recipe and name not in model, [f"train.{bare}"]
    if unknown:
        hint = f"Did you mean '{meant[0]}'?" if meant else f"The fields are: {', '.join(recipe)}."
        raise ValueError(f"there is no configuration field '{name}'. {hint}")


def _find_problems(recipe: Recipe) -> Iterator[str]:
    given = [name for name in BUDGETS if getattr(recipe, name) is not None]
    if len(given) > 1:
        yield f"a run stops by one of steps, tokens and flops: take away {' and '.join(given[1:])}"
    if recipe.batch_size % recipe.num_micro_batches:
        yield (
            f"train.num_micro_batches = {recipe.num_micro_batches} must divide train.batch_size = "
            f"{recipe.batch_size}"
        )
    if recipe.trainable == "lora" and recipe.optimizer == "muon":
        yield "train.trainable = lora is not for Muon, which wants whole matrices: use adamw"
