"""The demonstration: a routed model and its dense twin, counted and then trained for a few steps.

Owns what is shown and how it is timed. The tokens are random: it shows that both models learn and
what routing saves, not which one is better.
"""

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from depthmix.config import ModelConfig
from depthmix.describe import describe_model, list_presets, load_model, print_tables
from depthmix.nn import Transformer
from depthmix.train.step import TrainStep

LEARNING_RATE = 1e-3


class Step(NamedTuple):
    """One optimisation step: the loss before it, and how long it took."""

    loss: float
    seconds: float


class Run(NamedTuple):
    """A model's steps."""

    name: str
    steps: list[Step]

    @property
    def step_seconds(self) -> float:
        """Median time of a step; the first also allocates memory, so it counts only if alone."""
        return statistics.median(step.seconds for step in self.steps[1:] or self.steps)


def run_demo(
    console: Console, *, preset: str = "demo", num_steps: int = 10, batch_size: int = 8
) -> tuple[Run, Run]:
    """Compare a model with its dense twin in numbers, then train both; returns (dense, routed)."""
    config = load_model(preset)
    if not config.routed_layers:
        raise ValueError(
            f"'{preset}' has no routed block to compare with its dense twin: choose a preset such "
            f"as 'demo' or '60m-mod'"
        )
    size = preset.removesuffix(".toml").removesuffix("-mod")
    configs = {f"{size}-dense": config.dense_twin(), f"{size}-mod": config}
    described = [describe_model(name, config) for name, config in configs.items()]
    print_tables(described, console)
    console.print("All presets (FLOPs of a forward pass):")
    for line in list_presets():
        console.print(f"  {line}", highlight=False)
    console.print(
        f"\nTraining both on the CPU, steps: {num_steps} each, batch: {batch_size} x "
        f"{config.max_seq_len} random tokens, the same at every step",
        highlight=False,
    )
    runs = _train_both(console, configs, num_steps, batch_size)
    _print_result(console, runs, described[0].forward_flops / described[1].forward_flops)
    return runs


def train_steps(config: ModelConfig, tokens: Tensor, num_steps: int) -> Iterator[Step]:
    """Fit a fresh model to predict each token of one batch from those before it."""
    model = Transformer(config)
    train_step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    for _ in range(num_steps):
        start = time.perf_counter()
        loss = train_step(inputs, targets).language_model.item()
        yield Step(loss, time.perf_counter() - start)


def _train_both(
    console: Console, configs: dict[str, ModelConfig], num_steps: int, batch_size: int
) -> tuple[Run, Run]:
    config = next(iter(configs.values()))
    torch.manual_seed(0)
    # one token more than the model reads, because targets are inputs shifted by one
    tokens = torch.randint(config.vocab_size, (batch_size, config.max_seq_len + 1))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[ms]:.0f} ms/step"),
        TimeRemainingColumn(),
    )
    runs = {name: Run(name, []) for name in configs}
    with Progress(*columns, console=console) as progress:
        tasks = {
            name: progress.add_task(name, total=num_steps, loss=float("nan"), ms=float("nan"))
            for name in configs
        }
        trainings = {
            name: train_steps(config, tokens, num_steps) for name, config in configs.items()
        }
        # a step of each in turn: whatever else the machine does slows both alike
        for _ in range(num_steps):
            for name, training in trainings.items():
                step = next(training)
                runs[name].steps.append(step)
                progress.update(
                    tasks[name], advance=1, loss=step.loss, ms=1000 * runs[name].step_seconds
                )
    dense, routed = runs.values()
    return dense, routed


def _print_result(console: Console, runs: tuple[Run, Run], flop_ratio: float) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column("", overflow="fold")
    for run in runs:
        table.add_column(run.name, justify="right", overflow="fold")
    table.add_row("first loss", *(f"{run.steps[0].loss:.3f}" for run in runs))
    table.add_row("last loss", *(f"{run.steps[-1].loss:.3f}" for run in runs))
    table.add_row("ms per step", *(f"{1000 * run.step_seconds:.0f}" for run in runs))
    dense, routed = runs
    speed_up = dense.step_seconds / routed.step_seconds
    table.add_row("speed-up, measured", "", f"{speed_up:.2f} x")
    table.add_row("speed-up, by FLOPs", "", f"{flop_ratio:.2f} x")
    console.print(table)
    console.print(
        "Both learn the batch by heart, so the losses show that they train, not which is better.",
        highlight=False,
    )
