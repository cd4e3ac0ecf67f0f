"""Metrics of training steps: means, speed, compute spent, and fraction of the GPU's peak.

Reads the device only on request, so that steps never wait for a number; the metrics up to a step
can be read while the next one runs.
"""

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from depthmix.budget import Schedule
from depthmix.train.energy import EnergyCounter, open_counter
from depthmix.train.evaluate import describe_routing
from depthmix.train.step import StepLoss
from depthmix.world import World, average_on_device

# dense bf16 FLOP/s from the data sheets, by a part of the device's name in torch; the first match
# counts
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10G": 70e12,
}


# the host's clock, or an event in the device's queue, as the host runs ahead of the steps
Moment = float | torch.cuda.Event


class MetricSums(NamedTuple):
    """The steps between two lines of metrics, not read yet."""

    step: int
    names: list[str]
    sums: torch.Tensor
    """Sums being copied to the CPU; complete when the last moment of `spans` has passed."""
    count: int
    spans: list[tuple[Moment, Moment]]
    """Start and end of the times spent on steps."""
    num_timed: int


class Meter:
    """Accumulates the numbers of the steps between two lines of metrics."""

    def __init__(
        self, schedule: Schedule, world: World, counter: EnergyCounter | None = None
    ) -> None:
        """`counter` is the device's own; only one process alone measures energy."""
        self.schedule, self.world = schedule, world
        if counter is None and world.size == 1:
            counter = open_counter(world.device)
        self._counter, self._joules = counter, math.nan
        self.peak = find_peak(world.device)
        self._names: list[str] = []
        self._sums: torch.Tensor | None = None
        self._count, self._num_timed = 0, -1
        self._spans: list[tuple[Moment, Moment]] = []
        self._since = self._mark()

    def add(self, result: StepLoss) -> None:
        """Add a step's numbers, which stay on the device."""
        named = {"loss": result.language_model, "total_loss": result.total}
        if result.grad_norm is not None:
            named["grad_norm"] = result.grad_norm
        if result.distilled is not None:
            named["distill_loss"] = result.distilled
        if result.hidden is not None:
            named["hidden_loss"] = result.hidden
        named |= describe_routing(result.routing)
        self._names = list(named)
        values = torch.stack([value.detach().float() for value in named.values()])
        # a replayed step overwrites its numbers the next time
        self._sums = values if self._sums is None else self._sums + values
        self._count += 1
        self._num_timed += 1
        if self._num_timed == 0:
            # the first step compiles and allocates, so it is not timed
            self._spans, self._since = [], self._mark()
            if self._counter is not None and math.isnan(self._joules):
                self._joules = self._counter.read_joules()

    def expect_slow_step(self) -> None:
        """Restart timing after the next step, because that one compiles."""
        self._num_timed = -1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude time that is not spent on steps."""
        self._spans.append((self._since, self._mark()))
        yield
        self._since = self._mark()

    def state_dict(self) -> dict[str, Any]:
        """Sums since the last reading, over all processes, as plain data."""
        if self._sums is None:
            return {}
        sums = self.world.average(self._sums).tolist()
        return {"names": self._names, "sums": sums, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`: means continue after an interruption."""
        if state:
            self._names, self._count = state["names"], state["count"]
            self._sums = torch.tensor(state["sums"], device=self.world.device)

    def _mark(self) -> Moment:
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def peek(self) -> dict[str, float]:
        """Means since the last reading, over all processes; waits for the device."""
        assert self._sums is not None
        sums = self.world.average(self._sums).tolist()
        return {n: total / self._count for n, total in zip(self._names, sums, strict=True)}

    def cut(self, step: int) -> MetricSums:
        """The sums up to `step`, to be read later; the next ones start at zero. Never waits."""
        assert self._sums is not None
        # averaged now rather than when they are read: by then, another process may have exited
        sums = average_on_device(self._sums.double())
        # into pinned memory, to copy asynchronously
        on_cpu = torch.empty_like(sums, device="cpu", pin_memory=sums.is_cuda)
        on_cpu.copy_(sums, non_blocking=True)
        now = self._mark()
        spans = [*self._spans, (self._since, now)]
        reading = MetricSums(step, self._names, on_cpu, self._count, spans, self._num_timed)
        self._sums, self._count, self._num_timed = None, 0, 0
        self._spans, self._since = [], now
        return reading

    def read(self, reading: MetricSums) -> dict[str, Any]:
        """Means over all processes, speed and compute; waits for the device."""
        _, end = reading.spans[-1]
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        sums = reading.sums.tolist()
        means = {n: total / reading.count for n, total in zip(reading.names, sums, strict=True)}
        return {
            **means,
            "time": time.time(),
            "tokens": reading.step * self.schedule.run.tokens_per_step,
            "flops": self.schedule.count_flops(reading.step),
            "executed_flops": self.schedule.count_flops(reading.step, "executed"),
            **self._describe_speed(reading),
            "memory_bytes": measure_memory(self.world.device),
            **self._describe_energy(),
        }

    def _describe_energy(self) -> dict[str, float]:
        """Joules of the board since the last reading, whatever it did; nothing where unknown."""
        if self._counter is None or math.isnan(self._joules):
            return {}
        before, self._joules = self._joules, self._counter.read_joules()
        return {"joules": self._joules - before}

    def _describe_speed(self, reading: MetricSums) -> dict[str, float | None]:
        names = ("tokens_per_second", "flops_per_second", "share_of_peak", "seconds_per_step")
        if reading.num_timed < 1:
            # only the first step so far, which is not timed
            return dict.fromkeys(names)
        seconds = sum(measure_seconds(*span) for span in reading.spans) / reading.num_timed
        seconds = max(seconds, 1e-9)
        # at the rate of the last step, which holds for most of these steps
        speed = self.schedule.find_stage(reading.step - 1).causal_flops / seconds
        share = speed / (self.peak * self.world.size) if self.peak else None
        tokens = self.schedule.run.tokens_per_step / seconds
        return dict(zip(names, (tokens, speed, share, seconds), strict=True))


def check_finite(record: Mapping[str, Any], step: int) -> None:
    """Raise an error if the loss, the gradient or the weights are not finite."""
    names = ("total_loss", "grad_norm", "weights")
    broken = [name for name in names if not math.isfinite(record.get(name, 0.0))]
    if broken:
        raise ValueError(
            f"training diverged: {' and '.join(broken)} not finite by step {step}; "
            f"earlier checkpoints are intact: start again with a lower train.learning_rate or "
            f"a larger train.warmup_share"
        )


def measure_seconds(begin: Moment, end: Moment) -> float:
    """Seconds between two moments of the same kind, both in the past."""
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin


def find_peak(device: torch.device) -> float | None:
    """The GPU's peak FLOP/s according to its data sheet; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def measure_memory(device: torch.device) -> int:
    """Peak memory in bytes, of the GPU or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
