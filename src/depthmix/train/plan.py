"""What to train: a new run of a preset, of a file or of other weights, or a run to resume.

Decides what goes together, as for `depthmix train`. Loads torch only to open weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from depthmix.config import RunConfig, load_run_config, make_run_config, make_start_config
from depthmix.config.presets import sets_vocabulary
from depthmix.config.train import BUDGETS, read_length, update_names

if TYPE_CHECKING:
    from depthmix.models import StoredModel

DEFAULT_PRESET = "demo"


class Launch(NamedTuple):
    """The arguments of `launch`: a new run, or one to resume."""

    run: RunConfig | None = None
    """A new run's configuration."""
    name: str = "run"
    """Name for a new run's folder if `out` is None."""
    data: Path | None = None
    """A prepared folder. Default: the default corpus, or the data of the resumed run."""
    out: Path | None = None
    """A new run's folder."""
    resume: Path | None = None
    """The folder of a run to resume."""
    device: str | None = None
    """cpu or cuda. Default: a GPU if there is one."""
    start: "StoredModel | None" = None
    """The model that provides a new run's initial weights."""
    fit_vocabulary: bool = False
    """Whether a new run's model takes its vocabulary size from the data."""
    budget: Mapping[str, Any] = {}
    """A larger budget for a resumed run, as a dotted field."""


def plan_launch(
    overrides: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    config_file: Path | None = None,
    start: Path | None = None,
    resume: Path | None = None,
    data: Path | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> Launch:
    """The launch that the options of `depthmix train` mean, which have the same names.

    `overrides` are dotted fields of the model and its recipe, such as `{"train.steps": 1000}`;
    `start` is the option `--from`. A model's vocabulary size comes from the data, unless a file or
    a field sets it.
    """
    overrides = update_names(overrides or {})
    places: dict[str, Any] = {"data": data, "out": out, "device": device}
    if resume is not None:
        budget = {name: overrides[name] for name in overrides if name in _BUDGET_FIELDS}
        if len(budget) < len(overrides) or preset or config_file or out or start:
            raise ValueError(
                "--resume takes the model, its fields and the folder from the run, so leave them "
                "out; only a longer budget (--steps, --tokens or --flops) may be given"
            )
        return Launch(resume=resume, budget=budget, **places)
    if start is not None and preset is not None:
        raise ValueError(f"--from {start} already sets the model: leave out --preset {preset}")
    if config_file is not None and (preset or start):
        other = "--preset" if preset else "--from"
        raise ValueError(f"--config {config_file} already sets the model: leave out {other}")
    if config_file is not None:
        run = load_run_config(config_file).override(overrides)
        return Launch(run, config_file.resolve().parent.name, **places)
    if start is not None:
        from depthmix.models import open_model

        source = open_model(start, max_seq_len=read_length(overrides))
        run = make_start_config(source.config, overrides)
        return Launch(run, start.resolve().name, start=source, **places)
    source = preset or DEFAULT_PRESET
    run = make_run_config(source, overrides)
    fits = "vocab_size" not in overrides and not sets_vocabulary(source)
    name = Path(source).stem if source.endswith(".toml") else source
    return Launch(run, name, fit_vocabulary=fits, **places)


_BUDGET_FIELDS = frozenset(f"train.{name}" for name in BUDGETS)
