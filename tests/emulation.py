"""Runs CUDA kernels on a CPU, compiled for the emulated GPU of `emulated_gpu.h`."""

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from depthmix.kernels import nvrtc
from depthmix.kernels.decode import stream

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++")
PROGRAMS = 3


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let kernels run on a CPU if there is no GPU, with libraries kept in a folder."""
    if torch.cuda.is_available():
        return
    if COMPILER is None:
        pytest.skip("there is no C++ compiler to emulate a GPU with")

    def compile_kernel(
        source: str,
        name: str,
        defines: tuple[tuple[str, int | str], ...],
        device: torch.device,
        *,
        num_threads: int,
        shared_bytes: int,
        overlaps: bool = False,
    ) -> nvrtc.Launch:
        return compile_emulated(folder, name, dict(defines), num_threads, shared_bytes)

    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    monkeypatch.setattr(nvrtc, "find_obstacle", lambda device: None)
    monkeypatch.setattr(stream, "count_programs", lambda device: PROGRAMS)


def compile_emulated(
    folder: Path, name: str, defines: Mapping[str, int | str], num_threads: int, shared_bytes: int
) -> nvrtc.Launch:
    """Compile the kernel of this name for the emulated GPU."""
    assert COMPILER is not None
    kernels = Path(stream.__file__).parent
    parts = [HERE / "emulated_gpu.h", kernels / "ring.cuh", kernels / f"{name}.cu"]
    parts.append(HERE / "emulated_run.h")
    defines = {**defines, "KERNEL": name}
    source = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    source += "".join(path.read_text() for path in parts)
    place = folder / hashlib.sha256(source.encode()).hexdigest()[:16]
    library = place.with_suffix(".so")
    if not library.exists():
        place.with_suffix(".cpp").write_text(source)
        options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        command = [COMPILER, *options, "-o", str(library), str(place.with_suffix(".cpp"))]
        subprocess.run(command, check=True)
    run = ctypes.CDLL(str(library)).run

    def launch(task: ctypes.Structure, num_programs: int) -> None:
        stuck = run(ctypes.byref(task), num_programs, num_threads, shared_bytes)
        assert not stuck, "the threads wait for each other"

    return launch


def check_task(kernel: Path, task: type[ctypes.Structure]) -> None:
    """Check that the argument of a kernel is the same in C++ and here."""
    fields = kernel.read_text().split("struct Task {")[1].split("};")[0]
    lines = [line.split("//")[0].strip().rstrip(";") for line in fields.splitlines()]
    found = [line.replace("*", "* ").split() for line in lines if line]
    kinds = {"int": "c_int", "float": "c_float"}
    expected = [
        (words[-1], "c_void_p" if "*" in "".join(words) else kinds[words[0]]) for words in found
    ]
    assert [(name, kind.__name__) for name, kind, *_ in task._fields_] == expected
