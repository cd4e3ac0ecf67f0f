"""Runs as rows of numbers: what each run is, what it cost, and its losses.

Defines what makes two runs comparable: variant, budget, size and recipe. Reads run folders;
`records` reads records of them. Independent of fits and figures, and does not load torch.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from depthmix.budget import make_schedule
from depthmix.config import GATES, STRATEGIES, ModelConfig, Recipe, RunConfig
from depthmix.flops import Parameters, flops_per_token, num_parameters
from depthmix.runs import Record, RunSummary, read_runs
from depthmix.runs.folder import RunDir
from depthmix.runs.losses import TRAINED, name_metric, read_metric

BUDGET_TOLERANCE = 0.02
"""Budgets this close, as a share, are the same: a run spends whole steps."""
CURVE_POINTS = 40
"""The most points of a curve of training losses; each is a mean."""
NUM_POINTS = 20
"""About this many points for a curve made of batches."""
MIN_VALIDATIONS = 5
"""The fewest validations that make a curve."""

# fields that make a model larger, but not another kind of model
SIZE_FIELDS = {
    *("num_layers", "width", "num_heads", "num_kv_heads", "head_width", "mlp_width"),
    *("experts.width", "routing.predictor_width", "experts.predictor_width"),
}
# fields of a recipe that do not change what is learned
OTHER_FIELDS = {
    *("seed", "steps", "tokens", "flops"),
    *("num_micro_batches", "compile", "cuda_graph", "shard_size"),
    *("log_every", "val_every", "checkpoint_every", "checkpoint_minutes", "num_kept_checkpoints"),
    *("checkpoint_activations", "tensorboard", "wandb"),
}
# in the name of a kind with random choice
LEARNED_GATE, UNIT_GATE = " learned gate", " unit gate"
# in the name of a kind with token choice
BIAS = " bias"


class Head(NamedTuple):
    """How well a causal head predicted top-k membership, over a run."""

    name: str
    precision: tuple[tuple[float, float], ...]
    """(share of the run, precision)."""
    recall: tuple[tuple[float, float], ...]


class Row(NamedTuple):
    """A finished run in numbers."""

    name: str
    """Its folder, relative to the one reported on."""
    kind: str
    """dense, mod, token_choice, moe and so on, see `name_kind`."""
    variant: str
    """The kind, and what distinguishes it from other runs of this kind; see `name_variants`."""
    budget: float
    """Training FLOPs, the same number for all runs of one budget."""
    flops: float
    """Training FLOPs really spent, with attention as a whole square and no optimiser."""
    executed_flops: float
    """The same with half the square, and the optimiser's own matrix products."""
    parameters: Parameters
    flops_per_token: float
    """Of a forward pass."""
    loss: float | None
    """Validation loss under the training's own rule: top-k, or a dense model's only one. None in
    records that have only the causal one."""
    loss_causal: float | None
    """Under the causal head; None without one, as in a dense model."""
    seed: int | None
    """None in records that lack it: each such run counts as a separate draw."""
    seconds: float | None
    """Spent on steps, without validation and checkpoints."""
    tokens_per_second: float | None
    capacity: float | None
    """The share that every routed block keeps; None without routing, or where shares differ."""
    every: int | None
    heads: tuple[Head, ...]
    curve: tuple[tuple[float, float], ...]
    """(share of the run, training loss), see `thin_curve`."""
    model: str
    """The model's configuration, the same text for the same model."""
    recipe: str
    """The recipe's fields that change what is learned, without seed and budget."""
    settings: Mapping[str, Any]
    """The model's fields other than its size."""
    provenance: Mapping[str, Any]
    """Of the first start."""
    config: RunConfig
    num_steps: int
    test_loss: float | None = None
    """As `loss`, on the test split; None if it was not measured."""
    test_loss_causal: float | None = None
    joules: float | None = None
    """Of the whole GPU between the first and the last line of metrics; None where not measured."""

    @property
    def judged(self) -> float:
        """The loss to compare by: the causal one if the model has a causal head."""
        judged = self.loss if self.loss_causal is None else self.loss_causal
        assert judged is not None, "a row has one of the two"
        return judged

    @property
    def judged_test(self) -> float | None:
        """The same on the test split."""
        return self.test_loss if self.test_loss_causal is None else self.test_loss_causal


class SkippedRun(NamedTuple):
    """A run that is left out of the fits, and why."""

    name: str
    state: str
    reason: str


class Runs(NamedTuple):
    """All that a folder holds."""

    folder: str
    rows: list[Row]
    left_out: list[SkippedRun]


def load_runs(folder: str | Path) -> Runs:
    """Every run in a folder and below; unfinished and broken ones with the reason."""
    # each run's records are freed as soon as its row is made
    found = [(run.order, _load_run(folder, run, records)) for run, records in read_runs(folder)]
    return collect_runs(str(folder), (run for _, run in sorted(found, key=lambda pair: pair[0])))


def collect_runs(source: str, found: Iterable["Row | SkippedRun"]) -> Runs:
    """The rows, with budgets grouped and variants named among all of them."""
    each = list(found)
    left_out = [run for run in each if isinstance(run, SkippedRun)]
    rows = [run for run in each if isinstance(run, Row)]
    budgets = group_budgets([row.budget for row in rows])
    rows = [row._replace(budget=budgets[row.budget]) for row in rows]
    rows = [
        row._replace(variant=variant)
        for row, variant in zip(rows, name_variants(rows), strict=True)
    ]
    rows.sort(key=lambda row: (row.budget, rank_kind(row.kind), row.variant, row.parameters.total))
    return Runs(source, rows, left_out)


def _load_run(
    folder: str | Path, summary: RunSummary, records: Sequence[Record]
) -> Row | SkippedRun:
    name = Path(summary.path).relative_to(folder).as_posix()
    name = Path(summary.path).resolve().name if name == "." else name
    problem = _find_problem(summary)
    train, val, test = (
        [r for r in records if r.get("kind") == kind] for kind in ("train", "val", "test")
    )
    problem = problem or _find_loss_problem(val)
    if problem:
        return SkippedRun(name, summary.state, problem)
    try:
        return _read_row(name, summary, train, val, test)
    except (OSError, ValueError) as error:
        return SkippedRun(name, "broken", str(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        return SkippedRun(name, "broken", f"its files are damaged: {error}")


def _find_problem(run: RunSummary) -> str:
    if run.state == "broken":
        return run.reason
    if run.state != "finished":
        why = f": {run.reason}" if run.reason else ""
        return f"ended at step {run.step} of {run.num_steps or '?'}{why}"
    if run.num_steps == 0:
        return run.reason or "it was not trained"
    return ""


def _find_loss_problem(val: Sequence[Record]) -> str:
    if not val:
        return "it has no validation loss: its data has no validation split of a sequence or more"
    # a loss that is not finite is written as null; top-k must not stand in for a causal one
    if (loss := read_metric(val[-1], TRAINED)) is None or not math.isfinite(loss):
        return "its validation loss is not finite"
    if val[-1].get(name_metric("causal"), 0.0) is None:
        return "its loss under causal decisions is not finite"
    return ""


def _read_row(
    name: str,
    summary: RunSummary,
    train: Sequence[Record],
    val: Sequence[Record],
    test: Sequence[Record],
) -> Row:
    folder = RunDir.open(summary.path)
    config = RunConfig.from_dict(folder.read_config())
    schedule = make_schedule(config)
    loss = summary.val_loss_topk
    assert loss is not None
    # a run that was extended since has no test loss yet
    tested = next((r for r in reversed(test) if r.get("step") == summary.step), {})
    last = train[-1] if train else {}
    # as counted when it was trained
    executed = last.get("executed_flops") or schedule.count_flops(summary.step, "executed")
    return make_row(
        name,
        config,
        test_loss=read_metric(tested, TRAINED),
        test_loss_causal=read_metric(tested, ("causal",)),
        num_steps=summary.step,
        flops=float(schedule.count_flops(summary.step, "full")),
        executed_flops=float(executed),
        loss=float(loss),
        loss_causal=None if summary.val_loss_causal is None else float(summary.val_loss_causal),
        seed=config.train.seed,
        seconds=count_seconds(train),
        joules=sum_joules(train),
        tokens_per_second=_find_speed(train),
        heads=tuple(_read_heads(config.model, train, val, summary.num_steps or summary.step)),
        curve=thin_curve(train),
        provenance=next(iter(folder.read_starts()), {}),
    )


def make_row(name: str, config: RunConfig, *, flops: float, **measured: Any) -> Row:
    """A row of a run's configuration and what was measured; its variant is not known yet."""
    model = config.model
    capacities = set(model.capacities)
    return Row(
        name=name,
        kind=name_kind(model),
        variant="",
        budget=float(config.train.flops or flops),
        flops=flops,
        parameters=num_parameters(model),
        flops_per_token=flops_per_token(model, seq_len=config.seq_len),
        capacity=capacities.pop() if len(capacities) == 1 else None,
        every=None if model.routing.layers or not model.routed_layers else model.routing.every,
        model=model.to_json(),
        recipe=_describe_recipe(config.train),
        settings=list_settings(model),
        config=config,
        **measured,
    )


def name_kind(model: ModelConfig) -> str:
    """The kind of a model, in a word or two."""
    strategy, routing = STRATEGIES[model.routing.strategy], model.routing
    kind = strategy.kind
    if strategy.is_random and not routing.draws_scores:
        # stronger controls than the paper's, whose gate is random too
        kind += UNIT_GATE if GATES[routing.gate].is_constant else LEARNED_GATE
    if routing.has_bias:
        kind += BIAS
    if model.expert_layers:
        if model.routed_layers:
            return "mode staged" if kind.startswith("mod") else f"{kind} moe"
        return "mode integrated" if model.experts.num_noop else "moe"
    return kind if model.routed_layers else "dense"


def rank_kind(kind: str) -> int:
    """The order in which kinds are shown: dense first, then routing, then experts."""
    kinds = (strategy.kind for strategy in STRATEGIES.values() if strategy.kind)
    # the two kinds of Mixture-of-Depths proper come first
    routed = sorted(kinds, key=lambda kind: not kind.startswith("mod"))
    known = ("dense", *routed, "moe", "mode staged", "mode integrated")
    for suffix in (UNIT_GATE, LEARNED_GATE, BIAS):
        kind = kind.removesuffix(suffix)
    return known.index(kind) if kind in known else len(known)


def list_settings(model: ModelConfig) -> dict[str, Any]:
    """The model's fields other than its size, by dotted name; only those with an effect."""
    tree = model.to_dict()
    parts = {"routing": bool(model.routed_layers), "experts": bool(model.expert_layers)}
    found = {name: value for name, value in tree.items() if name not in parts}
    for part, used in parts.items():
        found |= {f"{part}.{name}": value for name, value in tree[part].items() if used}
    return {name: value for name, value in found.items() if name not in SIZE_FIELDS}


def name_variants(rows: Sequence[Row]) -> list[str]:
    """A name for each row: its kind, and the settings in which runs of this kind differ."""
    names = []
    for row in rows:
        alike = [other.settings for other in rows if other.kind == row.kind]
        differing = [
            name
            for name, value in row.settings.items()
            if any(other.get(name) != value for other in alike)
        ]
        settings = [_describe_setting(name, row.settings[name]) for name in differing]
        names.append(" ".join((row.kind, *settings)))
    return names


def _describe_setting(name: str, value: Any) -> str:
    if name == "routing.capacity" and isinstance(value, float):
        return f"{value:.4g}"
    if name == "routing.every":
        return f"every {value}"
    return f"{name}={value}"


def group_budgets(budgets: Iterable[float]) -> dict[float, float]:
    """Each budget → the one that represents all within `BUDGET_TOLERANCE` of the group's least."""
    groups: list[list[float]] = []
    for budget in sorted(budgets):
        if groups and budget <= groups[-1][0] * (1 + BUDGET_TOLERANCE):
            groups[-1].append(budget)
        else:
            groups.append([budget])
    return {budget: statistics.median_low(group) for group in groups for budget in group}


def count_seconds(train: Sequence[Record]) -> float | None:
    """Time spent on steps; the untimed first steps count like the others."""
    total, timed, before = 0.0, 0, 0
    for record in train:
        steps, before = record["step"] - before, record["step"]
        if record.get("seconds_per_step") is not None:
            total, timed = total + steps * record["seconds_per_step"], timed + steps
    return total * before / timed if timed else None


def sum_joules(train: Sequence[Record]) -> float | None:
    """Energy by a run's training records, where any has it."""
    found = [joules for record in train if (joules := record.get("joules")) is not None]
    return sum(found) if found else None


def _find_speed(train: Sequence[Record]) -> float | None:
    # the median: while another run starts or ends, a record means little
    speeds = [s for record in train if (s := record.get("tokens_per_second")) is not None]
    return statistics.median(speeds) if speeds else None


def thin_curve(
    train: Sequence[Record], most: int = CURVE_POINTS
) -> tuple[tuple[float, float], ...]:
    """(share of the run, loss): at most `most` means over stretches of equal length.

    A stretch is placed at the mean step of its records, so that no loss appears too early.
    Losses that are not finite are left out.
    """
    if not train:
        return ()
    last = train[-1]["step"]
    stretches: dict[int, list[tuple[float, float]]] = {}
    for record in train:
        loss = record.get("loss")
        if loss is not None and math.isfinite(loss):
            # rounded up: the record at the end of a stretch belongs to it
            number = -(-record["step"] * most // last)
            stretches.setdefault(number, []).append((record["step"] / last, float(loss)))
    means = (
        (statistics.fmean(share for share, _ in part), statistics.fmean(loss for _, loss in part))
        for part in stretches.values()
    )
    return tuple(means)


def follow_number(
    records: Iterable[Record], name: str, num_steps: int
) -> tuple[tuple[float, float], ...]:
    """(share of the run, number) of every record that has it."""
    found = ((record["step"] / num_steps, record.get(name)) for record in records)
    return tuple((share, float(value)) for share, value in found if value is not None)


def _read_heads(
    model: ModelConfig, train: Sequence[Record], val: Sequence[Record], num_steps: int
) -> Iterable[Head]:
    routing, experts = model.routing, model.experts
    # a router without an auxiliary loss is measured too, but was not trained to decide
    trained = {
        "predictor": True,
        "router": routing.aux_loss_weight > 0,
        "expert_predictor": True,
        "expert_router": experts.aux_loss_weight > 0,
    }
    sources = [val]
    if len(val) < MIN_VALIDATIONS:
        # with few validations, use some of the training batches
        sources.append(train[:: max(1, len(train) // NUM_POINTS)])
    for name in (name for name, used in trained.items() if used):
        curves = [
            max(
                (follow_number(each, f"{name}_{part}", num_steps) for each in sources),
                key=len,
            )
            for part in ("precision", "recall")
        ]
        if all(curves):
            yield Head(name, *curves)


def _describe_recipe(recipe: Recipe) -> str:
    fields = dataclasses.asdict(recipe).items()
    return " ".join(f"{name}={value}" for name, value in fields if name not in OTHER_FIELDS)
