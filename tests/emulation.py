"""Runs `stream.cu` on a CPU: compiled for the emulated GPU of `emulated_gpu.h`."""

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from depthmix.kernels.decode import stream

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++")
PROGRAMS = 3


def compile_emulated(
    folder: Path, defines: dict[str, int | str], shared_bytes: int
) -> Callable[[ctypes.Structure, int], None]:
    """As `stream.compile_stream`, with libraries kept in a folder."""
    assert COMPILER is not None
    kernel = Path(stream.__file__).with_name("stream.cu")
    parts = [HERE / "emulated_gpu.h", kernel, HERE / "emulated_run.h"]
    source = "".join(f"#define {name} {value}\n" for name, value in defines.items())
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
        stuck = run(ctypes.byref(task), num_programs, 32 * (stream.WARPS + 1), shared_bytes)
        assert not stuck, "the threads wait for each other"

    return launch


def count_programs(device: torch.device) -> int:
    return PROGRAMS
