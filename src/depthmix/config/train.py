"""The training recipe: batch, optimiser, schedule, budget, and how often to save and evaluate.

Former names of fields are kept, so that earlier configurations still load. Does not import torch,
so that sweeps are planned and counted without it.
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
# the budgets of a run; at most one is given
BUDGETS = ("steps", "tokens", "flops")

START_RATES: Mapping[str, Any] = {
    "train.optimizer": "adamw",
    "train.learning_rate": 3e-4,
    "train.scale_by_width": False,
    "train.router_rate_factor": 10.0,
}
"""For weights that are already trained: AdamW, which keeps them close to their initial values and
which adapters need, with low rates, for embeddings no higher than for matrices. Routers and
predictors are mostly untrained and learn faster, to follow a falling capacity."""

# beyond this, not every JSON and TOML parser keeps integers exact
Seed = Annotated[int, Bounds(least=0, most=2**53 - 1)]
Beta = Annotated[Share, Bounds(below=1, hint="at 1 nothing is learned")]


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
    """Former names of fields, in earlier configurations."""

    steps: Positive[int] | None = None
    """Stop after this many optimisation steps."""
    tokens: Positive[float] | None = None
    """Stop after training on this many tokens; may be written as 1e9."""
    flops: Positive[float] | None = None
    """Stop after this many training FLOPs: the budget for comparing models."""
    flops_convention: Literal["full", "executed"] = "executed"
    """How flops are counted: executed counts the causal half of attention's pairs and the
    optimiser's own matrix products; full counts all pairs and no optimiser, as in the paper."""
    batch_size: Positive[int] = 16
    """Sequences per batch, over all processes and micro-batches."""
    seq_len: Count | None = None
    """Tokens per sequence. Default: the model's max_seq_len."""
    num_micro_batches: Positive[int] = 1
    """Split each batch into this many micro-batches, to save memory."""
    seed: Seed = 0
    """Seed of the initial weights, the order of documents and all other randomness."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """muon (for the blocks' matrices, with adamw for the rest) or adamw."""
    learning_rate: Positive[float] = 8e-3
    """Peak learning rate of the embeddings; see scale_by_width for the matrices."""
    scale_by_width: bool = True
    """Use learning_rate · 32 / width for the blocks' matrices (· √(256 / width) with Muon), so that
    one setting fits all sizes."""
    router_rate_factor: Positive[float] = 1.0
    """Factor on the learning rate of routers and predictors."""
    memory_rate_factor: Positive[float] = 1.0
    """Factor on the learning rate of a memory's tables, which have no weight decay."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: cosine, wsd (stable, then a linear decay), or constant."""
    warmup_share: Share = 0.05
    """Fraction of steps spent warming up."""
    decay_share: Share = 0.2
    """Fraction of steps that wsd decays over, at the end."""
    final_rate_share: Share = 0.1
    """Final learning rate as a fraction of the peak (cosine and wsd)."""
    weight_decay: NotNegative[float] = 0.1
    """Weight decay of the matrices; embeddings, norms and routers have none."""
    beta1: Beta = 0.9
    """AdamW's momentum."""
    beta2: Beta = 0.95
    """AdamW's decay rate of squared gradients."""
    max_grad_norm: NotNegative[float] = 1.0
    """Clip gradients to this norm; 0 turns clipping off."""
    start_capacity: Annotated[float, Bounds(above=0, most=1)] | None = None
    """Start every routed block at this capacity, and lower it to the model's own in stages.
    Default: the model's own capacity from the start."""
    capacity_fall_share: Share = 0.5
    """Fraction of steps, at the start, over which the capacity falls."""
    num_capacity_stages: Positive[int] = 8
    """Number of stages of that fall; with compile, each is compiled separately."""
    trainable: Literal["all", "routers", "lora"] = "all"
    """What to train: all; only routers and predictors; or those and low-rank adapters (lora)."""
    lora_rank: Positive[int] = 16
    """Rank of the adapters."""
    lora_alpha: Positive[float] | None = None
    """Adapters are scaled by lora_alpha / lora_rank. Default: twice the rank."""
    lora_blocks: Literal["routed", "all"] = "routed"
    """Blocks that get adapters: the routed ones, or all."""
    teacher: str | None = None
    """A run or model folder to distil from, in addition to the loss on the text."""
    distill_loss_weight: NotNegative[float] = 1.0
    """Weight of the distillation loss, the divergence from the teacher's predictions."""
    hidden_loss_weight: NotNegative[float] = 0.0
    """Weight of the squared distance from the teacher's residual stream, relative to its square,
    averaged over blocks. It needs a teacher of the same width and depth."""
    document_mask: bool = True
    """Keep attention within each document; false lets packed documents attend to earlier ones."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix products; weights stay float32. auto: bfloat16 on a GPU, else float32."""
    compile: bool | None = None
    """Use torch.compile. Default: only on a GPU."""
    compile_blocks: bool = False
    """Compile block by block instead of the whole model: equal blocks are compiled once, so that a
    run starts much sooner; its steps are a little slower."""
    cuda_graph: bool | None = None
    """Replay each step as one CUDA graph. Default: on a single GPU, if compiled."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass, to save memory."""
    shard_size: Count | None = None
    """Number of processes that share one copy of the weights (HSDP). Default: all (FSDP)."""
    log_every: Positive[int] = 10
    """Log metrics every this many steps."""
    val_every: Count | None = None
    """Steps between validations. Default: twenty per run, or fewer if they would read more than a
    tenth of the training tokens. There is always one at the end."""
    val_tokens: Positive[int] = 131072
    """Most tokens of the validation split to evaluate."""
    checkpoint_every: Count | None = None
    """Steps between checkpoints. Default: one every checkpoint_minutes."""
    checkpoint_minutes: NotNegative[float] = 3.0
    """Minutes between checkpoints, if checkpoint_every is not set."""
    num_kept_checkpoints: Annotated[
        int, Bounds(least=1, hint="without one nothing can be resumed")
    ] = 2
    """Number of newest checkpoints to keep; the one with the best validation loss is kept too."""
    tensorboard: bool = True
    """Write TensorBoard files to the run's folder."""
    wandb: bool = False
    """Also send metrics to Weights & Biases (needs the extra 'wandb')."""

    def __post_init__(self) -> None:
        fields.coerce(self, "train.")
        problem = next(_find_problems(self), None)
        if problem is not None:
            raise ValueError(problem)

    def check_sharing(self, size: int, noun: str = "processes") -> None:
        """Refuse a recipe that this many processes (in a plan: GPUs) cannot train."""
        if self.trainable == "lora" and size > 1:
            raise ValueError(
                f"train.trainable = lora merges whole matrices, which cannot be sharded "
                f"over {size} {noun}: use one, or another train.trainable"
            )
        if self.batch_size % (size * self.num_micro_batches):
            cut = self.num_micro_batches
            micro = f" x train.num_micro_batches={cut}" if cut > 1 else ""
            raise ValueError(
                f"train.batch_size = {self.batch_size} cannot be divided among {size} "
                f"{noun}{micro}: use a multiple of {size * cut}"
            )

    def rate_at(self, step: int, num_steps: int) -> float:
        """Learning rate of a step as a fraction of the peak; a decay ends at final_rate_share."""
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
    """A model and its training recipe: the contents of a run's config.toml.

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
                "train.lora_blocks = routed needs routed blocks: use train.lora_blocks=all"
            )

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return self.train.seq_len or self.model.max_seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens per batch."""
        return self.train.batch_size * self.seq_len

    @property
    def num_val_batches(self) -> int:
        """Most batches per validation; a small split has fewer."""
        return max(1, self.train.val_tokens // self.tokens_per_step)

    def space_validations(self, num_steps: int) -> int:
        """Steps between validations."""
        if self.train.val_every is not None:
            return self.train.val_every
        return max(math.ceil(num_steps / 20), 10 * self.num_val_batches)

    @staticmethod
    def from_overrides(model: ModelConfig, overrides: Mapping[str, Any]) -> "RunConfig":
        """A model and the default recipe, with dotted fields replaced: `{"train.seed": 1}`."""
        return RunConfig(model=model).override(overrides)

    def override(self, overrides: Mapping[str, Any]) -> "RunConfig":
        """A copy with dotted fields replaced, named as `from_overrides` names them.

        A new budget replaces the old one, because a run has only one.
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
        return RunConfig.from_dict(fields.read_toml(text))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` gives the same configuration back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> "RunConfig":
        """Build from plain data, refusing unknown fields by name."""
        train = tree.get("train")
        if isinstance(train, Mapping) and "flops_convention" not in train:
            # written before there were two
            tree = {**tree, "train": {**train, "flops_convention": "full"}}
        return fields.build(RunConfig, tree)


def make_start_config(model: ModelConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """A new run that starts from trained weights of this model, by `START_RATES`."""
    return RunConfig.from_overrides(model, {**START_RATES, **overrides})


def update_names(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields of a run by their current names; of duplicates, the last counts."""
    return {fields.rename(RunConfig, name): value for name, value in overrides.items()}


def read_length(overrides: Mapping[str, Any]) -> int | None:
    """The override of `max_seq_len`, if any; one that is not a number is refused later."""
    length = str(overrides.get("max_seq_len", ""))
    return int(length) if length.isdecimal() else None


def _is_recipe(name: str) -> bool:
    return name.startswith("train.")


def _refuse_unknown(name: str) -> None:
    """Suggest a field name, also if only `train.` is missing or superfluous."""
    recipe, model = fields.document_fields(Recipe), fields.document_fields(ModelConfig)
    if _is_recipe(name):
        bare = name.removeprefix("train.")
        # compared without the prefix, which would make short names look alike
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
        yield f"a run has one budget, steps, tokens or flops: leave out {' and '.join(given[1:])}"
    if recipe.batch_size % recipe.num_micro_batches:
        yield (
            f"train.num_micro_batches = {recipe.num_micro_batches} must divide train.batch_size = "
            f"{recipe.batch_size}"
        )
    if recipe.hidden_loss_weight and recipe.teacher is None:
        yield "train.hidden_loss_weight needs train.teacher: whose residual stream to learn"
    if recipe.trainable == "lora" and recipe.optimizer == "muon":
        yield "train.trainable = lora needs train.optimizer = adamw: muon updates whole matrices"
