"""CUDA C++ kernels, compiled at first use, for what cannot be expressed in Triton.

Owns compilation and launches. Knows nothing of what a kernel computes. Needs `cuda.bindings`, which
CUDA builds of torch include.
"""

import ctypes
import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

Launch = Callable[[ctypes.Structure, int], None]
"""Launches a kernel, given its argument and the number of programs."""


@functools.cache
def find_obstacle(device: torch.device) -> str | None:
    """Say why this device cannot run such kernels; None if it can."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return "it is not a CUDA device"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it has no bulk copies (they came with compute capability 9.0)"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed"
    return None


@functools.cache
def compile_kernel(
    source: str,
    name: str,
    defines: tuple[tuple[str, int | str], ...],
    device: torch.device,
    *,
    num_threads: int,
    shared_bytes: int,
    overlaps: bool = False,
) -> Launch:
    """Compile a kernel whose only argument is a structure, passed by value; cached per device.

    All programs of a launch are resident at the same time, so they can wait for each other. One
    that `overlaps` may start while the kernel before it still runs; its programs cannot wait for
    each other.
    """
    driver = import_module("cuda.bindings.driver")
    major, minor = torch.cuda.get_device_capability(device)
    binary = _compile(source, name, defines, f"sm_{major}{minor}")
    with torch.cuda.device(device):
        # creates the device's context, if there is none yet
        torch.cuda.current_stream().synchronize()
        module = _check(driver.cuModuleLoadData(binary))
        kernel = _check(driver.cuModuleGetFunction(module, name.encode()))
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(kernel, most, shared_bytes))

    def launch(argument: ctypes.Structure, num_programs: int) -> None:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = num_programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream(device).cuda_stream
        attribute, kinds = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
        if overlaps:
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
        else:
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        config.attrs, config.numAttrs = [attribute], 1
        places = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        _check(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(places), 0))

    return launch


def _compile(
    source: str, name: str, defines: tuple[tuple[str, int | str], ...], arch: str
) -> bytes:
    nvrtc = import_module("cuda.bindings.nvrtc")
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    options = ["--std=c++17", f"--gpu-architecture={arch}"]
    options += [f"--define-macro={key}={value}" for key, value in defines]
    done = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(done[0]):
        log = bytes(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{name}.cu does not compile:\n{log.decode(errors='replace')}")
    binary = bytes(_check(nvrtc.nvrtcGetCUBINSize(program)))
    _check(nvrtc.nvrtcGetCUBIN(program, binary))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return binary


def _check(result: tuple[Any, ...]) -> Any:
    """Return the values of a driver call; raise if its error code is not 0."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA reports {status.name}")
    return values[0] if len(values) == 1 else values
