"""A plan of many runs: TOML → every run's configuration, counted and checked before any starts.

Owns the names of runs, and that all problems are told at once. Does not know how a run is started,
or what came of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from depthmix import flops
from depthmix.budget import make_schedule
from depthmix.config import ModelConfig, RunConfig, load_config
from depthmix.sweep.plan_file import Plan, Size, format_budget, load_plan, plan_names

__all__ = ["Plan", "PlannedRun", "expand_plan", "format_budget", "load_plan", "plan_names"]

# what the plan itself decides, and why nobody else may
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
    """Of all steps; at most the budget."""
    num_parameters: int

    @property
    def folder(self) -> str:
        """The run's folder below that of the sweep."""
        return self.name.partition("/")[2]


def expand_plan(
    plan: Plan, overrides: Mapping[str, Any] | None = None, *, vocab_size: int | None = None
) -> list[PlannedRun]:
    """Every run of a plan, by budget, variant and size; or a list of all that is wrong with it.

    `overrides` go before all that the plan says; `vocab_size` behind it.
    """
    model = load_config(plan.preset)
    found: list[PlannedRun] = []
    problems: dict[str, list[str]] = {}
    first = {} if vocab_size is None else {"vocab_size": vocab_size}
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
                told = "two runs would have this name: give one of the sizes a name of its own"
                problems.setdefault(told, []).append(run.name)
            found.append(run)
    if problems:
        raise ValueError(_say_problems(problems))
    if not found:
        raise ValueError("no size of this plan is for any of its variants: there is nothing to run")
    return found


def _list_cells(plan: Plan) -> Iterator[tuple[float, str, Size]]:
    for budget in plan.budgets:
        for variant in plan.variants:
            for size in plan.sizes:
                if variant in size.variants and budget in size.budgets:
                    yield budget, variant, size


def _plan_run(
    plan: Plan,
    model: ModelConfig,
    variant: str,
    budget: float,
    seed: int,
    given: Mapping[str, Any],
    size_name: str | None,
) -> PlannedRun:
    for name, owner in _RESERVED.items():
        if name in given:
            raise ValueError(f"{name} is decided by the plan's {owner}: take it away")
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
    # of a configuration that could not be made
    return f"w{given.get('width', '?')}-l{given.get('num_layers', '?')}"


def _say_problems(problems: Mapping[str, Sequence[str]]) -> str:
    """One sentence, or a line for each problem; a run that has it stands for all that have."""
    lines = []
    for problem, labels in problems.items():
        others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        lines.append(f"{labels[0]}{others}: {problem}")
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f"this plan has {len(lines)} problems, and nothing was started:", *lines])
