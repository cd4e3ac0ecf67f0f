"""The GPU's counter of Joules, with a driver's library that a test plays."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from depthmix.train import energy
from depthmix.train.energy import EnergyCounter, open_counter

GPU = torch.device("cuda")


class Driver:
    """Counts millijoules for one GPU, and refuses what it is told to."""

    def __init__(self) -> None:
        self.millijoules, self.refused, self.uuids = 5_000, "", []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, *arguments)

    def answer(self, name: str, *arguments: Any) -> int:
        if name == self.refused:
            return 3
        if name == "nvmlDeviceGetHandleByUUID":
            self.uuids.append(arguments[0])
        if name == "nvmlDeviceGetTotalEnergyConsumption":
            # what ctypes.byref wraps
            arguments[1]._obj.value = self.millijoules
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    return driver


def test_joules_are_the_drivers_millijoules(driver: Driver) -> None:
    counter = open_counter(GPU)
    assert isinstance(counter, EnergyCounter)
    assert driver.uuids == [b"GPU-1234"]
    assert counter.read_joules() == 5.0
    driver.millijoules += 2_500
    assert counter.read_joules() == 7.5


@pytest.mark.parametrize(
    "refused", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"]
)
def test_a_gpu_without_a_counter_has_none(driver: Driver, refused: str) -> None:
    driver.refused = refused
    assert open_counter(GPU) is None
    with pytest.raises(OSError, match=f"{refused} answered 3"):
        EnergyCounter()


def test_an_older_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: object())
    assert open_counter(GPU) is None


def test_without_the_drivers_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "LIBRARY", "libnothing-of-this-name.so")
    assert open_counter(GPU) is None


def test_a_cpu_has_none(driver: Driver) -> None:
    assert open_counter(torch.device("cpu")) is None
    assert driver.uuids == []
