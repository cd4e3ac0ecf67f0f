"""The cost of a repeated step: its time, its energy, its kernels."""

import argparse
import platform
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from depthmix.train.energy import EnergyCounter

WARM_STEPS = 20
ENERGY_SECONDS = 2.0


def require_gpu(parser: argparse.ArgumentParser, *, cpu: bool | None = None) -> None:
    """Refuse to start where torch sees no GPU; `cpu` is --cpu, of scripts that have it."""
    if not cpu and not torch.cuda.is_available():
        hint = "" if cpu is None else ", or add --cpu"
        parser.error(f"no CUDA device is visible to torch: run it on a GPU{hint}")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(step: Callable[[], object], device: str, num_steps: int) -> list[float]:
    """Microseconds of each of `num_steps` steps, after some uncounted ones."""
    for _ in range(WARM_STEPS):
        step()
    synchronize(device)
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(num_steps):
            step()
            marks.append(time.perf_counter())
        return [1e6 * (end - start) for start, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in pairwise(events)]


def time_call(function: Callable[[], object], device: str) -> float:
    """Wall-clock seconds of one call, including all device work that it started."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def open_meter(device: str) -> EnergyCounter | None:
    """The device's counter; prints a note and returns None if there is none."""
    if device == "cpu":
        return None
    try:
        return EnergyCounter()
    except OSError as error:
        print(f"energy is not measured, because NVML does not answer: {error}")
        return None


def name_device(device: str) -> str:
    """What the numbers were measured on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return platform.processor() or platform.machine()


def measure_energy(
    call: Callable[[int], object], meter: EnergyCounter, *, num_queued: int = 1
) -> tuple[float, int]:
    """Joules per call, and the number of calls; whole board, including idle power.

    The counter is updated about ten times a second, so calls are repeated for a few seconds. Each
    gets its number, after an uncounted call 0. `num_queued` are started before any is waited for.
    """
    call(0)
    torch.cuda.synchronize()
    first, start, count = meter.read_joules(), time.perf_counter(), 0
    while time.perf_counter() - start < ENERGY_SECONDS or count < 2:
        for _ in range(num_queued):
            count += 1
            call(count)
        # otherwise the host would queue far more calls than run in the measured time
        torch.cuda.synchronize()
    return (meter.read_joules() - first) / count, count


def profile_step(step: Callable[[], object], device: str) -> str:
    """A table of the kernels of one step."""
    activity = getattr(torch.profiler.ProfilerActivity, device.upper())
    synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        step()
        synchronize(device)
    return profile.key_averages().table(
        sort_by=f"{device}_time_total", row_limit=60, max_name_column_width=80
    )
