"""Run folders without training: their losses lie on parabolas whose minima are known.

Owns how a folder is made that looks as training leaves it; asserts nothing.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from depthmix import flops
from depthmix.config import ModelConfig, RunConfig
from depthmix.runs.folder import RunDir

BASE = ModelConfig(vocab_size=256, num_layers=4, width=64, num_heads=4, max_seq_len=64)
DENSE: dict[str, Any] = {"routing.strategy": "none"}
MOD: dict[str, Any] = {"routing.strategy": "expert_choice", "routing.capacity": 0.125}
WIDTHS = (32, 48, 64, 96, 128)
NUM_STEPS = 100


class Bowl(NamedTuple):
    """loss = bottom + bend · log(parameters / center)²."""

    center: float
    bottom: float
    bend: float = 0.2

    def at(self, parameters: float) -> float:
        return self.bottom + self.bend * math.log(parameters / self.center) ** 2


def count_parameters(overrides: Mapping[str, Any]) -> int:
    return flops.num_parameters(BASE.override(overrides)).total


def write_run(
    path: Path,
    overrides: Mapping[str, Any],
    loss: float | None,
    *,
    causal: float | None = None,
    budget: float | None = 1e12,
    state: Any = "finished",
    reason: str = "",
    data: str = "abc",
    recipe: Mapping[str, Any] | None = None,
) -> RunDir:
    """One run; `causal` makes it a routed one with a causal loss."""
    train = {"train.flops": budget} if budget else {"train.steps": NUM_STEPS}
    config = RunConfig.from_overrides(
        BASE, {**overrides, **train, **{f"train.{n}": v for n, v in (recipe or {}).items()}}
    )
    start = {
        "time": "2026-11-01T10:00:00+00:00",
        "versions": {"depthmix": "0.1.0", "torch": "2.13.0"},
        "device": {"kind": "cpu"},
        "data": {"hash": data},
        "seed": config.train.seed,
    }
    run = RunDir.create(path, config.to_toml(), start)
    per_step = flops.training_flops(
        config.model, seq_len=config.seq_len, batch_size=config.train.batch_size
    )
    for step in (50, NUM_STEPS):
        share = step / NUM_STEPS
        seconds = None if step == 50 else 0.5
        speed = None if seconds is None else config.tokens_per_step / seconds
        run.append_metrics(
            {"step": step, "kind": "train", "loss": 5.0, "flops": step * per_step}
            | {"tokens_per_second": speed, "seconds_per_step": seconds}
        )
        if loss is None:
            continue
        # what comes before the end must not count
        early = 0.0 if step == NUM_STEPS else 1.0
        record: dict[str, Any] = {"step": step, "kind": "val", "loss": loss + early}
        if causal is not None:
            record = {"step": step, "kind": "val", "loss_topk": loss + early}
            record |= {"loss_causal": causal + early, "predictor_precision": 0.4 + 0.5 * share}
            record |= {"predictor_recall": 0.3 + 0.4 * share, "router_precision": 0.125}
            record |= {"router_recall": 1.0}
        run.append_metrics(record)
    run.write_status(state, step=NUM_STEPS, num_steps=NUM_STEPS, loss=5.0, reason=reason)
    run.close()
    return run


def write_bowl(
    folder: Path,
    name: str,
    overrides: Mapping[str, Any],
    bowl: Bowl,
    *,
    widths: Sequence[int] = WIDTHS,
    seeds: Sequence[int] = (0,),
    noise: float = 0.0,
    routed: bool = False,
    budget: float = 1e12,
) -> None:
    """Runs of several widths on a bowl; seeds lie `noise` apart, about it."""
    for width in widths:
        fields = {**overrides, "width": width}
        for seed in seeds:
            loss = bowl.at(count_parameters(fields)) + noise * (seed - (len(seeds) - 1) / 2)
            write_run(
                folder / f"{name}-{width}-s{seed}",
                fields,
                # top-k is a little better
                loss - 0.01 if routed else loss,
                causal=loss if routed else None,
                budget=budget,
                recipe={"seed": seed},
            )
