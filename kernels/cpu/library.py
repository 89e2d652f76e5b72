"""Compiles the C++ of `cpu/` for this machine, once, and loads it.

The library is kept in the user's cache folder under a name that changes with the source, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from titan.core.limits import MAX_NODES
from titan.core.random import Purpose

CPU_KERNELS = "TITAN_CPU_KERNELS"
"""Environment variable that selects the kernels: "torch" keeps PyTorch's operations in use."""

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that the library's functions exist for."""

SOURCE = Path(__file__).parent / "library.cpp"
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
    f"-DTITAN_MAX_NODES={MAX_NODES}",
    *(f"-DTITAN_{purpose.name}={purpose.value}" for purpose in Purpose),
)
OPENMP_RUNTIMES = ("libgomp", "libomp", "libiomp")
COMPILE_SECONDS = 120
"""Time limit of a run of the compiler."""


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """The library, or the reason why there is none."""

    library: ctypes.CDLL | None
    description: str  # for people


@cache
def usable_library() -> ctypes.CDLL | None:
    """Return the library, or ``None`` if there is none or the user wants PyTorch; the environment is read once.

    Raises:
        ValueError: the environment variable `CPU_KERNELS` has an unknown value.
    """
    choice = os.environ.get(CPU_KERNELS, "auto")
    if choice not in ("auto", "torch"):
        raise ValueError(f"{CPU_KERNELS}={choice} is not allowed: allowed are 'auto' and 'torch'")
    return None if choice == "torch" else load_library().library


@cache
def kernel(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> Any:
    """Return the function of a name for tensors of a dtype, looked up once; the caller sets its argument types."""
    return getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")


_NOTHING = ctypes.c_char * 0


def address(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array's data; faster than `ndarray.ctypes`, which read-only arrays need."""
    return ctypes.addressof(_NOTHING.from_buffer(array)) if array.flags.writeable else array.ctypes.data  # type: ignore[arg-type]


@cache
def load_library() -> LoadedLibrary:
    """Compile the library unless that has been done before, and load it."""
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return LoadedLibrary(None, "not compiled: no C++ compiler was found (c++, g++, clang++, or the variable CXX)")
    command, runtimes = shlex.split(compiler), _openmp_runtimes()
    try:
        path = _library_path(command)
        library = _open(command, path)
    except (OSError, subprocess.SubprocessError) as error:
        return _without_library(f"not compiled: {compiler}: {_reason(error)}")
    if runtimes and (added := _openmp_runtimes() - runtimes):
        # the threads of two runtimes spin while they wait for work, and take the cores from one another
        return _without_library(f"not used: it brought another OpenMP runtime than PyTorch's, {', '.join(sorted(added))}")
    return LoadedLibrary(library, f"compiled by {compiler}: {path}")


def _without_library(description: str) -> LoadedLibrary:
    logging.getLogger(__name__).warning("the kernels of this CPU are PyTorch's, which are slower; %s", description)
    return LoadedLibrary(None, description)


def _open(command: list[str], path: Path) -> ctypes.CDLL:
    if not path.exists():
        _compile(command, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # a truncated file
        _compile(command, path)
        return ctypes.CDLL(str(path))


def _reason(error: Exception) -> str:
    """Return the error that a compiler or the system reports, in one line."""
    lines = [line.strip() for line in str(getattr(error, "stderr", None) or "").splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else str(error))


def _library_path(command: list[str]) -> Path:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS).stdout
    sources = [file.read_text(encoding="utf-8") for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    identity = "\n".join((*sources, version, *command, *FLAGS, platform.machine(), _processor()))
    return _cache_folder() / f"cpu_kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


def _cache_folder() -> Path:
    """Return the user's cache folder, or one for this process if the user has none that is writable."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # Path.home() raises the latter for a user without a home
        return Path(tempfile.mkdtemp(prefix="titan-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="titan-"))


def _processor() -> str:
    """Return text that differs between processors with different instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(command: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # other processes may compile at the same time
        built = Path(folder) / path.name
        full_command = [*command, *FLAGS, str(SOURCE), "-o", str(built)]
        subprocess.run(full_command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        built.replace(path)


def _openmp_runtimes() -> set[str]:
    """Return the OpenMP runtimes that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    files = {line.split()[-1] for line in lines if "/" in line}
    return {path for path in files if Path(path).name.startswith(OPENMP_RUNTIMES)}
