"""Compiles the C++ of this folder for a kind of processor, once, and loads it.

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

from titan.core.limits import MAX_NODES
from titan.core.random import Purpose
from titan.kernels.cpu.kinds import Kind

SOURCE = Path(__file__).parent / "library.cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fPIC",
    "-pthread",
    "-shared",
    f"-DTITAN_MAX_NODES={MAX_NODES}",
    *(f"-DTITAN_{purpose.name}={purpose.value}" for purpose in Purpose),
)
COMPILE_SECONDS = 120
"""Time limit of a run of the compiler."""


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """The library, or the reason why there is none."""

    library: ctypes.CDLL | None
    description: str  # for people


@cache
def load_library(kind: Kind) -> LoadedLibrary:
    """Compile the library for this processor as one of a kind, unless that has been done before, and load it."""
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return _without_library("no C++ compiler was found (c++, g++, clang++, or the variable CXX)")
    command = [*shlex.split(compiler), *FLAGS, *kind.flags]
    try:
        path = _library_path(command)
        library = _open(command, path)
    except (OSError, subprocess.SubprocessError) as error:
        return _without_library(f"{compiler}: {_reason(error)}")
    return LoadedLibrary(library, f"{kind.name} ({kind.description}), compiled by {compiler}: {path}")


def _without_library(reason: str) -> LoadedLibrary:
    logging.getLogger(__name__).warning(
        "the kernels of this CPU are PyTorch's, which are several times slower; not compiled: %s", reason
    )
    return LoadedLibrary(None, f"not compiled: {reason}")


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
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS).stdout
    sources = [file.read_text(encoding="utf-8") for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    identity = "\n".join((*sources, version, *command, platform.machine(), _processor()))
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
        full_command = [*command, str(SOURCE), "-o", str(built)]
        subprocess.run(full_command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        built.replace(path)
