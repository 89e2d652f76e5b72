"""Compiles `cpu_kernels.cpp` for this machine, once, and loads it.

The library lies in the user's cache folder under a name that changes with the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CPU_KERNELS = "TITAN_CPU_KERNELS"
"""Environment variable: "torch" keeps PyTorch's operations in use."""

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
OPENMP_RUNTIMES = ("libgomp", "libomp", "libiomp")
COMPILE_SECONDS = 120
"""After so long, a compiler is given up."""


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    description: str  # for people


def usable_library() -> ctypes.CDLL | None:
    """The library, unless there is none or the user wants PyTorch.

    Raises:
        ValueError: the environment variable `CPU_KERNELS` has an unknown value.
    """
    choice = os.environ.get(CPU_KERNELS, "auto")
    if choice not in ("auto", "torch"):
        raise ValueError(f"{CPU_KERNELS}={choice} is not allowed: allowed are 'auto' and 'torch'")
    return None if choice == "torch" else load_library().library


@cache
def load_library() -> LoadedLibrary:
    """Compile if that has not been done before, and load."""
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return LoadedLibrary(None, "not compiled: no C++ compiler was found (c++, g++, clang++, or the variable CXX)")
    try:
        path = _library_path(compiler)
        if not path.exists():
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        return LoadedLibrary(None, f"not compiled: {compiler} failed: {output.strip().splitlines()[-1]}")
    if len(runtimes := _openmp_runtimes()) > 1:
        # threads of two runtimes wait for work actively, and take the cores from one another
        return LoadedLibrary(None, f"not used: PyTorch has another OpenMP runtime than {compiler} ({', '.join(sorted(runtimes))})")
    return LoadedLibrary(library, f"compiled by {compiler}: {path}")


def _library_path(compiler: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS).stdout
    identity = "\n".join((SOURCE.read_text(encoding="utf-8"), version, *FLAGS, platform.machine(), _processor()))
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_folder / "titan" / f"cpu_kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


def _processor() -> str:
    """What tells processors with other instructions apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # others may compile at the same time
        built = Path(folder) / path.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        built.replace(path)


def _openmp_runtimes() -> set[str]:
    """OpenMP runtimes of this process."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    files = {line.split()[-1] for line in lines if "/" in line}
    return {path for path in files if Path(path).name.startswith(OPENMP_RUNTIMES)}
