"""What a step's numbers become: means over steps, speed, compute spent, share of the GPU's peak.

Reads the device only when asked, so that a step never waits for a number. Knows nothing of files.
"""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from depthmix import flops
from depthmix.recipe import RunConfig
from depthmix.train.evaluate import describe_routing
from depthmix.train.parallel import World
from depthmix.train.step import StepLoss

# dense bf16 products, from the makers' data sheets, by a part of the name that torch gives; the
# first that fits counts
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


class Meter:
    """Collects the steps between two lines of metrics."""

    def __init__(self, run: RunConfig, world: World) -> None:
        self.run, self.world = run, world
        sizes = {"seq_len": run.seq_len, "batch_size": run.train.batch_size}
        self.flops_per_step = flops.training_flops(run.model, **sizes)
        # causal attention computes half of its square: the convention for a device's use
        self.used_per_step = flops.training_flops(run.model, **sizes, causal_half=True)
        self.peak = find_peak(world.device)
        self._names: list[str] = []
        self._sums: torch.Tensor | None = None
        self._count, self._num_timed = 0, -1
        self._paused = 0.0
        self._since = time.perf_counter()

    def add(self, result: StepLoss) -> None:
        """Take in a step's numbers; they stay on the device."""
        named = {"loss": result.language_model, "total_loss": result.total}
        if result.grad_norm is not None:
            named["grad_norm"] = result.grad_norm
        named |= describe_routing(result.routing)
        self._names = list(named)
        values = torch.stack([value.detach().float() for value in named.values()])
        # a step that is replayed overwrites its numbers at the next
        self._sums = values if self._sums is None else self._sums + values
        self._count += 1
        self._num_timed += 1
        if self._num_timed == 0:
            # the first step compiles and allocates: it says nothing about the next ones
            self._synchronize()
            self._since = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out time that is not spent on steps."""
        # those that are still under way on the device are
        self._synchronize()
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        """Sums since the last reading, over all processes, as plain data."""
        if self._sums is None:
            return {}
        sums = self.world.average(self._sums).tolist()
        return {"names": self._names, "sums": sums, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`: the means go on over a stop."""
        if state:
            self._names, self._count = state["names"], state["count"]
            self._sums = torch.tensor(state["sums"], device=self.world.device)

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def peek(self) -> dict[str, float]:
        """Means since the last reading, over all processes; waits for the device."""
        assert self._sums is not None
        sums = self.world.average(self._sums).tolist()
        return {n: total / self._count for n, total in zip(self._names, sums, strict=True)}

    def read(self, step: int) -> dict[str, Any]:
        """`peek` with speed and compute; begins anew."""
        means = self.peek()
        record = {
            **means,
            "time": time.time(),
            "tokens": step * self.run.tokens_per_step,
            "flops": step * self.flops_per_step,
            **self._tell_speed(),
            "memory_bytes": measure_memory(self.world.device),
        }
        self._sums, self._count, self._num_timed, self._paused = None, 0, 0, 0.0
        self._since = time.perf_counter()
        return record

    def _tell_speed(self) -> dict[str, float | None]:
        names = ("tokens_per_second", "flops_per_second", "share_of_peak", "seconds_per_step")
        if self._num_timed < 1:
            # only the first step so far, which is not timed
            return dict.fromkeys(names)
        seconds = (time.perf_counter() - self._since - self._paused) / self._num_timed
        seconds = max(seconds, 1e-9)
        speed = self.used_per_step / seconds
        share = speed / (self.peak * self.world.size) if self.peak else None
        return dict(
            zip(names, (self.run.tokens_per_step / seconds, speed, share, seconds), strict=True)
        )


def find_peak(device: torch.device) -> float | None:
    """FLOP/s that the GPU's maker states, None where nobody said."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def measure_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
