"""Means, speed and compute against the same numbers by hand, with a clock that is told the time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix import flops
from depthmix.budget import make_schedule
from depthmix.config import Recipe, RunConfig
from depthmix.nn.losses import HeadLoss, RoutingLoss
from depthmix.train import meter as module
from depthmix.train.energy import EnergyCounter
from depthmix.train.meter import PEAK_FLOPS, Meter, check_finite, find_peak, measure_memory
from depthmix.train.step import StepLoss
from depthmix.world import World
from variants import make_config

CPU = torch.device("cpu")
SPEEDS = ("tokens_per_second", "flops_per_second", "share_of_peak", "seconds_per_step")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Device:
    """A GPU that is behind the host: its work takes time, giving it work does not."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free_at, self.num_waits = clock, 0.0, 0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.clock.now) + seconds

    def make_event_class(self) -> type[torch.cuda.Event]:
        device = self

        class Event(torch.cuda.Event):
            def __new__(cls, **options: Any) -> "Event":
                # where torch has no CUDA, its own refuses to be made
                makes = torch.backends.cuda.is_built()
                return super().__new__(cls, **options) if makes else object.__new__(cls)

            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any = None) -> None:
                self.comes_at = max(device.free_at, device.clock.now)

            def synchronize(self) -> None:
                device.num_waits += 1
                device.clock.now = max(device.clock.now, self.comes_at)

            def elapsed_time(self, end_event: Any) -> float:
                assert max(self.comes_at, end_event.comes_at) <= device.clock.now
                return 1e3 * (end_event.comes_at - self.comes_at)

        return Event


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


def make_run(name: str = "mod") -> RunConfig:
    return RunConfig(model=make_config(name), train=Recipe(batch_size=4, seq_len=16))


def make_meter(name: str = "mod", size: int = 1) -> Meter:
    return Meter(make_schedule(make_run(name)), World(0, size, CPU))


def make_result(total: float, routing: float = 0.0, norm: float | None = 1.0) -> StepLoss:
    return StepLoss(
        torch.tensor(total - routing),
        RoutingLoss(torch.tensor(routing)),
        None if norm is None else torch.tensor(norm),
    )


def test_means_are_over_the_steps_since_the_last_reading(clock: Clock) -> None:
    meter = make_meter()
    meter.add(make_result(3.0, routing=1.0, norm=2.0))
    meter.add(make_result(6.0, routing=2.0, norm=4.0))
    expected = {"loss": 3.0, "total_loss": 4.5, "grad_norm": 3.0}
    assert meter.peek() == expected
    # a look changes nothing
    assert meter.peek() == expected
    assert meter.read(meter.cut(2)).items() >= expected.items()
    meter.add(make_result(8.0, norm=7.0))
    assert meter.peek() == {"loss": 8.0, "total_loss": 8.0, "grad_norm": 7.0}


def test_routing_has_its_names(clock: Clock) -> None:
    meter = make_meter()
    for share in (0.25, 0.75):
        head = HeadLoss(
            torch.tensor(1.0), torch.tensor(share), torch.tensor(0.5), torch.tensor(0.1)
        )
        routing = RoutingLoss(torch.tensor(0.5), predictor=head, balance=torch.tensor(2.0))
        meter.add(StepLoss(torch.tensor(0.5), routing))
    found = meter.peek()
    assert found["predictor_precision"] == 0.5
    assert found["predictor_recall"] == 0.5
    assert found["predictor_routed_fraction"] == pytest.approx(0.1)
    assert found["balance_loss"] == 2.0
    assert found["loss"] == 0.5
    assert "grad_norm" not in found


def test_numbers_are_taken_when_added_and_not_later(clock: Clock) -> None:
    """A replayed step writes its numbers into the same memory each time."""
    meter, result = make_meter(), make_result(1.0)
    for value in (1.0, 2.0, 6.0):
        result.language_model.fill_(value)
        meter.add(result)
    assert meter.peek()["loss"] == 3.0


def test_numbers_that_are_not_finite_are_reported(clock: Clock) -> None:
    meter = make_meter()
    meter.add(make_result(math.nan))
    meter.add(make_result(1.0))
    assert math.isnan(meter.peek()["loss"])


def test_speed_leaves_out_the_first_step_and_pauses(clock: Clock) -> None:
    meter, run = make_meter(), make_run()
    clock.now += 100
    with meter.pause():
        clock.now += 10
    # building and the first step, which compiles
    clock.now += 1000
    meter.add(make_result(1.0))
    for _ in range(4):
        clock.now += 2
        meter.add(make_result(1.0))
    with meter.pause():
        clock.now += 50
    record = meter.read(meter.cut(5))
    assert record["seconds_per_step"] == pytest.approx(2)
    assert record["tokens_per_second"] == pytest.approx(4 * 16 / 2)
    used = flops.training_flops(run.model, seq_len=16, batch_size=4, causal_half=True)
    assert record["flops_per_second"] == pytest.approx(used / 2)
    assert record["share_of_peak"] is None
    # the next window counts all of its steps, and only its own pauses
    with meter.pause():
        clock.now += 3
    for _ in range(2):
        clock.now += 5
        meter.add(make_result(1.0))
    assert meter.read(meter.cut(7))["seconds_per_step"] == pytest.approx(5)


def test_cut_sums_do_not_change_until_they_are_read(clock: Clock) -> None:
    meter = make_meter()
    for total in (1.0, 2.0, 6.0):
        meter.add(make_result(total))
        clock.now += 2
    reading = meter.cut(3)
    clock.now += 7
    meter.add(make_result(50.0))
    with meter.pause():
        clock.now += 100
    later = meter.cut(4)
    first, second = meter.read(reading), meter.read(later)
    assert (first["loss"], first["tokens"]) == (3.0, 3 * 4 * 16)
    # three steps' time over the two that are counted
    assert first["seconds_per_step"] == pytest.approx(3)
    assert (second["loss"], second["tokens"]) == (50.0, 4 * 4 * 16)
    assert second["seconds_per_step"] == pytest.approx(7)


def test_a_gpu_is_not_waited_for_until_a_reading(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(clock)
    monkeypatch.setattr(torch.cuda, "Event", device.make_event_class())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12345)
    began = clock.now
    meter = Meter(make_schedule(make_run()), World(0, 1, torch.device("cuda")))
    # the first step compiles; each takes the device longer than the host
    for seconds in (1000, 2, 2):
        clock.now += 0.1
        device.work(seconds)
        meter.add(make_result(1.0))
    # validation, which the device begins when it is done with the steps
    with meter.pause():
        device.work(50)
        clock.now = device.free_at
    clock.now += 0.1
    device.work(5)
    meter.add(make_result(3.0))
    reading = meter.cut(4)
    assert device.num_waits == 0
    device.work(6)
    meter.add(make_result(7.0))
    record = meter.read(reading)
    # the next step is still under way
    assert device.num_waits == 1
    assert clock.now == device.free_at - 6
    assert record["loss"] == 1.5
    assert record["memory_bytes"] == 12345
    assert record["seconds_per_step"] == pytest.approx((2 + 2 + 0.1 + 5) / 3)
    assert record["share_of_peak"] == pytest.approx(record["flops_per_second"] / 989e12)
    # written while the device computes: no time is lost
    clock.now += 3
    device.work(4)
    meter.add(make_result(9.0))
    assert meter.read(meter.cut(6))["seconds_per_step"] == pytest.approx(5)
    assert clock.now - began == pytest.approx(0.1 + 1000 + 2 + 2 + 50 + 0.1 + 5 + 6 + 4)


@pytest.mark.parametrize("name", ["total_loss", "grad_norm", "weights"])
def test_loss_gradient_and_weights_must_be_finite(name: str) -> None:
    check_finite({"total_loss": 1.0, "grad_norm": 2.0, "elsewhere": math.nan}, 7)
    with pytest.raises(ValueError, match=f"diverged: {name} not finite by step 7; "):
        check_finite({"total_loss": 1.0, name: math.inf}, 7)


def test_a_first_step_alone_has_no_speed(clock: Clock) -> None:
    meter = make_meter()
    clock.now += 1000
    meter.add(make_result(1.0))
    clock.now += 1e-6
    record = meter.read(meter.cut(1))
    assert record["loss"] == 1.0
    assert [record[name] for name in SPEEDS] == [None] * 4
    clock.now += 4
    meter.add(make_result(1.0))
    assert meter.read(meter.cut(2))["seconds_per_step"] == pytest.approx(4)


def test_compute_is_counted_from_the_beginning_of_the_run(clock: Clock) -> None:
    """A resumed run's first reading counts what was spent before."""
    meter, run = make_meter(), make_run()
    meter.add(make_result(1.0))
    record = meter.read(meter.cut(1001))
    assert record["tokens"] == 1001 * 4 * 16
    assert record["flops"] == 1001 * flops.executed_flops(
        run.model, "muon", seq_len=16, batch_size=4
    )


def test_the_share_is_of_all_the_gpus_peaks(clock: Clock) -> None:
    shares = []
    for size in (1, 4):
        meter = make_meter(size=size)
        meter.peak = 1e6
        for _ in range(2):
            clock.now += 2
            meter.add(make_result(1.0))
        record = meter.read(meter.cut(2))
        assert record["loss"] == 1.0
        shares.append(record["share_of_peak"])
    used = flops.training_flops(make_run().model, seq_len=16, batch_size=4, causal_half=True)
    assert shares == pytest.approx([used / 2 / 1e6, used / 2 / 4e6])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA T4", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak(torch.device("cuda", 0)) == peak
    assert find_peak(CPU) is None


def test_every_peak_can_be_reached() -> None:
    """A shorter name before a longer one would hide it."""
    names = list(PEAK_FLOPS)
    for later, name in enumerate(names):
        assert not any(earlier in name for earlier in names[:later] if earlier != name)


def test_memory_is_counted_in_bytes() -> None:
    used = measure_memory(CPU)
    # a process with torch in it: more than 50 MB, less than a machine
    assert 50e6 < used < 1e12


def test_numbers_stay_on_the_device_until_they_are_read(clock: Clock) -> None:
    meter = make_meter()
    asked: list[str] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    total: Tensor = torch.tensor(1.0).as_subclass(Watched)
    meter.add(StepLoss(total, RoutingLoss(torch.tensor(0.0)), torch.tensor(1.0)))
    assert asked
    assert not {"item", "tolist", "cpu", "numpy", "__float__", "__bool__"} & set(asked)


class Counter(EnergyCounter):
    """Joules that a test sets."""

    def __init__(self) -> None:
        self.joules = 1000.0

    def read_joules(self) -> float:
        return self.joules


def test_energy_is_counted_from_the_first_step(clock: Clock) -> None:
    counter = Counter()
    meter = Meter(make_schedule(make_run()), World(0, 1, CPU), counter)
    # the first step compiles
    counter.joules += 500
    meter.add(make_result(1.0))
    counter.joules += 30
    meter.add(make_result(1.0))
    assert meter.read(meter.cut(2))["joules"] == 30
    meter.add(make_result(1.0))
    # a later step that compiles takes energy, too
    meter.expect_slow_step()
    counter.joules += 7
    meter.add(make_result(1.0))
    assert meter.read(meter.cut(4))["joules"] == 7


def test_there_is_no_energy_on_a_cpu(clock: Clock) -> None:
    meter = make_meter()
    for _ in range(2):
        meter.add(make_result(1.0))
    assert "joules" not in meter.read(meter.cut(2))
