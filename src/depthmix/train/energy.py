"""The GPU's own counter of Joules: of the whole board, idle power included.

Read from the driver's library via ctypes, because every driver ships that library, but not a Python
package for it.
"""

import ctypes

import torch

LIBRARY = "libnvidia-ml.so.1"


class EnergyCounter:
    """The counter of torch's current GPU."""

    def __init__(self) -> None:
        """Raises OSError with an explanation if there is no such counter."""
        self._nvml = ctypes.CDLL(LIBRARY)
        self._ask("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        # torch's device numbers follow CUDA_VISIBLE_DEVICES, but the driver's do not
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        self.read_joules()

    def _ask(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._nvml, name)
        except AttributeError as error:
            raise OSError(f"{LIBRARY} has no {name}") from error
        if code := function(*arguments):
            raise OSError(f"{name} answered {code}")

    def read_joules(self) -> float:
        """Joules since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3


def open_counter(device: torch.device) -> EnergyCounter | None:
    """The device's counter; None on a CPU, and where the driver has none."""
    if device.type != "cuda":
        return None
    try:
        return EnergyCounter()
    except OSError:
        return None
