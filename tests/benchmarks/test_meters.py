"""The cost of a repeated step: what is counted, and how much is queued at once."""

from typing import Any

import meters
import pytest


class Meter:
    """A counter of the calls that were made, as Joules."""

    joules = 0.0

    def read_joules(self) -> float:
        return self.joules


@pytest.mark.parametrize(("num_queued", "wanted"), [(1, 2), (50, 50)])
def test_energy_is_that_of_the_counted_calls(
    num_queued: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter: Any = Meter()
    numbers: list[int] = []
    waits: list[int] = []

    def call(number: int) -> None:
        meter.joules += 3
        numbers.append(number)

    monkeypatch.setattr(meters, "ENERGY_SECONDS", 0.0)
    monkeypatch.setattr(meters.torch.cuda, "synchronize", lambda: waits.append(len(numbers)))
    assert meters.measure_energy(call, meter, num_queued=num_queued) == (3, wanted)
    # the first one is not counted
    assert numbers == list(range(wanted + 1))
    assert waits == list(range(1, wanted + 2, num_queued))
