"""A plan of many runs: TOML → every run's configuration, counted and checked before any starts.

The format of the file is in docs/sweeps.md. All problems are reported at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from depthmix import flops
from depthmix.budget import make_schedule
from depthmix.config import ModelConfig, RunConfig, fields, list_recipe, load_config
from depthmix.config.train import update_names

DEFAULT_PRESET = "demo"
DEFAULT_SCALE = "smoke"

# the keys of a plan, of a scale, and of a size besides its fields
_SCALE_KEYS = ("budgets", "seeds", "sizes", "common", "variants", "vocab_size", "tflops")
_PLAN_KEYS = ("name", "description", "preset", "data", "scale", *_SCALE_KEYS)
_SIZE_KEYS = ("name", "variants", "budgets", "seeds")


@dataclass(frozen=True)
class SweepPlan:
    """A plan as written, at one of its scales."""

    name: str
    description: str
    preset: str
    data: str | None
    """A folder made by `prepare`; None means the default corpus."""
    common: dict[str, Any]
    """Dotted fields of all runs."""
    variants: dict[str, dict[str, Any]]
    """Name → the dotted fields that make it."""
    budgets: tuple[float, ...]
    """Training FLOPs of a run."""
    sizes: tuple["Size", ...]
    scale: str | None = None
    """The scale's name; None if the plan has one size only."""
    vocab_size: int | None = None
    """Vocabulary size of the default corpus, if no data is named; None means its default."""
    tflops: float | None = None
    """Expected TFLOP/s of all jobs together, until runs have finished; None means unknown."""


class Size(NamedTuple):
    """A size of a model, and the runs to make of it."""

    fields: dict[str, Any]
    name: str | None
    """Part of the runs' names; None means width and depth."""
    variants: tuple[str, ...]
    budgets: tuple[float, ...]
    seeds: tuple[int, ...]


def plan_names() -> list[str]:
    """Plans that come with the package."""
    folder = resources.files("depthmix.sweep") / "plans"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name[-5:] == ".toml")


def load_plan(source: str, scale: str | None = None) -> SweepPlan:
    """A plan by its name in the package or from a .toml file, at one of its scales."""
    if source.endswith(".toml"):
        path = Path(source)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot read '{source}': {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"cannot read '{source}': it is not UTF-8 text") from error
        where = path.parent
    elif source in plan_names():
        file = resources.files("depthmix.sweep") / "plans" / f"{source}.toml"
        text, where = file.read_text(encoding="utf-8"), None
    else:
        names = plan_names()
        raise ValueError(
            f"there is no plan '{source}'.{fields.suggest(source, names)} The plans are: "
            f"{', '.join(names)}; a file ends in .toml"
        )
    try:
        return read_plan(fields.read_toml(text), scale, where, default_name=Path(source).stem)
    except ValueError as error:
        raise ValueError(f"in '{source}': {error}") from error


def read_plan(
    tree: Mapping[str, Any],
    scale: str | None = None,
    where: Path | None = None,
    *,
    default_name: str = "sweep",
) -> SweepPlan:
    """Build a plan from plain data; files that it names are relative to the folder `where`.

    A scale's keys override those at the top; common fields are merged.
    """
    _refuse_unknown(tree, _PLAN_KEYS, "a plan")
    scales = _read_table(tree, "scale")
    scale = _choose_scale(scales, scale)
    chosen = {} if scale is None else _read_table(scales, scale)
    _refuse_unknown(chosen, _SCALE_KEYS, "a scale")
    merged = {**tree, **chosen}
    variants = {
        _check_name(name): _read_fields(_read_table(merged, "variants"), name)
        for name in _read_table(merged, "variants")
    }
    if not variants:
        raise ValueError("a plan needs variants: write [variants.NAME] with its fields")
    budgets = _read_budgets(merged.get("budgets"), "budgets")
    seeds = _read_seeds(merged.get("seeds", [0]), "seeds")
    sizes = merged.get("sizes")
    if not isinstance(sizes, list) or not sizes or not all(isinstance(s, dict) for s in sizes):
        raise ValueError("sizes must be a list of tables, such as [{width = 256, num_layers = 8}]")
    common = _read_fields(tree, "common") | _read_fields(chosen, "common")
    preset, data = _read_text(tree, "preset", DEFAULT_PRESET), _read_text(tree, "data", "")
    if where is not None:
        preset = str(where / preset) if preset.endswith(".toml") else preset
        data = str(where / data) if data else data
    return SweepPlan(
        name=_check_name(_read_text(tree, "name", default_name)),
        description=_read_text(tree, "description", ""),
        preset=preset,
        data=data or None,
        common=common,
        variants=variants,
        budgets=budgets,
        sizes=tuple(_read_size(size, tuple(variants), budgets, seeds) for size in sizes),
        scale=scale,
        vocab_size=_read_vocab_size(merged.get("vocab_size")),
        tflops=_read_tflops(merged.get("tflops")),
    )


def _choose_scale(scales: Mapping[str, Any], wanted: str | None) -> str | None:
    if not scales:
        if wanted is not None:
            raise ValueError(f"this plan has one size only: leave out --size {wanted}")
        return None
    if wanted is None:
        wanted = DEFAULT_SCALE if DEFAULT_SCALE in scales else next(iter(scales))
    if wanted not in scales:
        raise ValueError(f"there is no --size {wanted}: use {' or '.join(scales)}")
    return wanted


def _read_size(
    tree: Mapping[str, Any],
    variants: tuple[str, ...],
    budgets: tuple[float, ...],
    seeds: tuple[int, ...],
) -> Size:
    known, few = tree.get("variants", list(variants)), budgets
    for name in known if isinstance(known, list) else [known]:
        if name not in variants:
            raise ValueError(
                f"a size names the variant '{name}'.{fields.suggest(str(name), variants)} "
                f"The variants are: {', '.join(variants)}"
            )
    if "budgets" in tree:
        few = _read_budgets(tree["budgets"], "a size's budgets")
        for budget in few:
            if budget not in budgets:
                allowed = ", ".join(map(format_budget, budgets))
                raise ValueError(
                    f"a size names the budget {format_budget(budget)}, which is none of {allowed}"
                )
    name = tree.get("name")
    return Size(
        fields=_flatten({n: v for n, v in tree.items() if n not in _SIZE_KEYS}),
        name=None if name is None else _check_name(name),
        variants=tuple(known) if isinstance(known, list) else (known,),
        budgets=few,
        seeds=_read_seeds(tree["seeds"], "a size's seeds") if "seeds" in tree else seeds,
    )


def _read_budgets(value: Any, name: str) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(_is_number(v) and 0 < v < float("inf") for v in values):
        raise ValueError(f"{name} must be FLOPs greater than 0, such as [1e15, 4e15]")
    return tuple(dict.fromkeys(map(float, values)))


def _read_seeds(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(seed) is int for seed in value):
        raise ValueError(f"{name} = {value!r} must be a list of seeds, such as [0, 1, 2]")
    return tuple(dict.fromkeys(value))


def _read_vocab_size(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"vocab_size = {value!r} must be a number of ids, such as 512")
    return value


def _read_tflops(value: Any) -> float | None:
    if value is None:
        return None
    if not _is_number(value) or not 0 < value < float("inf"):
        raise ValueError(f"tflops = {value!r} must be TFLOP/s greater than 0, such as 0.02")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_table(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = tree.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a table of fields")
    return value


def _read_fields(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _flatten(_read_table(tree, name))


def _flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields by their current names, also those of older plans."""
    return update_names(fields.flatten(tree))


def _read_text(tree: Mapping[str, Any], name: str, default: str) -> str:
    value = tree.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} = {value!r} must be text")
    return value


def _check_name(name: Any) -> str:
    """Check a part of a path, which must not leave its folder."""
    if not isinstance(name, str) or not name.strip(".") or "/" in name or "\\" in name:
        raise ValueError(f"'{name}' names a folder: use letters, digits, '-' and '_'")
    return name


def _refuse_unknown(tree: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name in tree:
        if name not in known:
            hint = fields.suggest(name, known) or f" It may hold: {', '.join(known)}."
            raise ValueError(f"{what} has no '{name}'.{hint}")


def format_budget(budget: int | float) -> str:
    """FLOPs as in the names of folders: `1e15`, `1.6e16`."""
    digits, _, power = f"{budget:.9e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


# fields that the plan itself sets, and the key that sets them
_RESERVED = {"train.flops": "budgets", "train.seed": "seeds"}


class PlannedRun(NamedTuple):
    """One run, ready to be started."""

    name: str
    """The plan's name and the run's folder: `isoflop/1e15/mod/w320-l12-s0`."""
    variant: str
    budget: float
    config: RunConfig
    num_steps: int
    flops: int
    """FLOPs of all steps; at most the budget."""
    num_parameters: int

    @property
    def folder(self) -> str:
        """The run's folder inside the sweep's."""
        return self.name.partition("/")[2]


def expand_plan(
    plan: SweepPlan, overrides: Mapping[str, Any] | None = None, *, vocab_size: int | None = None
) -> list[PlannedRun]:
    """Every run of a plan, by budget, variant and size; all problems are reported together.

    `overrides` go before the plan's fields; `vocab_size` is a default.
    """
    model = load_config(plan.preset)
    found: list[PlannedRun] = []
    problems: dict[str, list[str]] = {}
    first = list_recipe(plan.preset)
    if vocab_size is not None:
        first["vocab_size"] = vocab_size
    for budget, variant, size in _list_cells(plan):
        given = {**first, **plan.common, **plan.variants[variant], **size.fields}
        given |= overrides or {}
        label = f"{plan.name}/{format_budget(budget)}/{variant}/{size.name or _say_size(given)}"
        for seed in size.seeds:
            try:
                run = _plan_run(plan, model, variant, budget, seed, given, size.name)
            except ValueError as error:
                problems.setdefault(str(error), []).append(label)
                break
            if any(run.name == other.name for other in found):
                problem = "two runs would have this name: give one of the sizes another name"
                problems.setdefault(problem, []).append(run.name)
            found.append(run)
    if problems:
        raise ValueError(_say_problems(problems))
    if not found:
        raise ValueError("the plan has no runs: none of its sizes is for any of its variants")
    return found


def check_vocabulary(runs: Sequence[PlannedRun], vocab_size: int) -> None:
    """Refuse models whose vocabulary is smaller than the data's."""
    for run in runs:
        if run.config.model.vocab_size < vocab_size:
            raise ValueError(
                f"{run.name}: its vocab_size is {run.config.model.vocab_size}, and the data has "
                f"{vocab_size} ids: leave out vocab_size, or make it at least that"
            )


def _list_cells(plan: SweepPlan) -> Iterator[tuple[float, str, Size]]:
    for budget in plan.budgets:
        for variant in plan.variants:
            for size in plan.sizes:
                if variant in size.variants and budget in size.budgets:
                    yield budget, variant, size


def _plan_run(
    plan: SweepPlan,
    model: ModelConfig,
    variant: str,
    budget: float,
    seed: int,
    given: Mapping[str, Any],
    size_name: str | None,
) -> PlannedRun:
    for name, owner in _RESERVED.items():
        if name in given:
            raise ValueError(f"{name} is set by the plan's {owner}: leave it out")
    chosen = {**given, "train.flops": budget, "train.seed": seed}
    config = RunConfig.from_overrides(model, chosen)
    schedule = make_schedule(config)
    shape = size_name or f"w{config.model.width}-l{config.model.num_layers}"
    return PlannedRun(
        name=f"{plan.name}/{format_budget(budget)}/{variant}/{shape}-s{seed}",
        variant=variant,
        budget=budget,
        config=config,
        num_steps=schedule.num_steps,
        flops=schedule.flops,
        num_parameters=flops.num_parameters(config.model).total,
    )


def _say_size(given: Mapping[str, Any]) -> str:
    # the configuration itself could not be made
    return f"w{given.get('width', '?')}-l{given.get('num_layers', '?')}"


def _say_problems(problems: Mapping[str, Sequence[str]]) -> str:
    """One sentence, or a line for each problem with the first run that has it."""
    lines = []
    for problem, labels in problems.items():
        others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        lines.append(f"{labels[0]}{others}: {problem}")
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f"this plan has {len(lines)} problems, so nothing was started:", *lines])
