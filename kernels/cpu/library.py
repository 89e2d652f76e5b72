"""Compiles the C++ of this folder for a kind of processor, once, and loads it.

The library is kept in the user's cache folder, under a name that changes with the source, the compiler and the processor, and that
holds its checksum: a file that was cut short would be loaded, and crash later.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from titan.core.random import Purpose
from titan.kernels.cpu.kinds import Kind, cpu_info

SOURCE = Path(__file__).parent / "library.cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fno-fast-math",  # some compilers' default, with which NaN is not seen
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fPIC",
    "-pthread",
    "-shared",
    *(f"-DTITAN_{purpose.name}={purpose.value}" for purpose in Purpose),
)
LOG = logging.getLogger(__name__)
COMPILE_SECONDS = 600
"""Time limit of compiling, which takes several minutes where a container has a part of a core."""

VERSION_SECONDS = 60
"""Time limit of asking a compiler for its version."""


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """The library, or the reason why there is none."""

    library: ctypes.CDLL | None
    description: str  # for people
    path: Path | None = None  # of the file that is kept


@cache
def load_library(kind: Kind) -> LoadedLibrary:
    """Compile the library for this processor as one of a kind, unless that has been done before, and load it."""
    compiler = os.environ.get("CXX", "").strip() or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return _without_library("no C++ compiler was found (c++, g++, clang++, or the variable CXX)")
    try:
        words = shlex.split(compiler)
        command = [*words, *FLAGS, *kind.flags]
        identity = _identity(words, command)
        folder = _cache_folder()
        path, library = _find(folder, identity) if folder else (None, None)
        if library is None:
            with tempfile.TemporaryDirectory(prefix="titan-") as temporary:  # loaded, a library needs its file no more
                built = _compile(command, Path(temporary))
                if folder:
                    _keep(built, folder, identity)
                    path, library = _find(folder, identity)
                library = library or ctypes.CDLL(str(built))
            if path is None:
                LOG.warning(
                    "this is done at every start, because the cache folder cannot be written, or what is in it not be run: set "
                    "XDG_CACHE_HOME to one that can"
                )
    except (OSError, subprocess.SubprocessError, ValueError) as error:  # the last of a CXX that is no command
        return _without_library(f"{compiler}: {_reason(error)}")
    return LoadedLibrary(library, f"{kind.name} ({kind.description}), compiled by {compiler}", path)


def _without_library(reason: str) -> LoadedLibrary:
    LOG.warning(
        "the kernels of this CPU are PyTorch's, which are several times slower; not compiled: %s; with TITAN_CPU_KERNELS=torch "
        "nothing is compiled, and this is not said",
        reason,
    )
    return LoadedLibrary(None, f"not compiled: {reason}")


def _reason(error: Exception) -> str:
    """Return the error that a compiler or the system reports, in one line."""
    lines = [line.strip() for line in str(getattr(error, "stderr", None) or "").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("collect2:")]  # which only says that the linker has failed
    return next((line for line in lines if "error" in line), lines[-1] if lines else str(error))


def _identity(compiler: list[str], command: list[str]) -> str:
    """Return text that differs between libraries of different sources, compilers and processors."""
    version = _run([*compiler, "--version"], VERSION_SECONDS)
    sources = [file.read_text(encoding="utf-8") for file in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    return _digest("\n".join((*sources, version, *command, platform.machine(), _processor())).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _cache_folder() -> Path | None:
    """Return the user's cache folder; ``None`` if the user has none."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # Path.home() raises the latter for a user without a home
        return None
    return folder


def _find(folder: Path, identity: str) -> tuple[Path, ctypes.CDLL] | tuple[None, None]:
    """Load the library of an identity, if there is one that is whole and can be loaded, and return its path with it."""
    for path in folder.glob(f"cpu_kernels-{identity}-*.so"):
        with suppress(OSError):  # of another user, or in a folder of which nothing is run
            if path.stem.endswith(_digest(path.read_bytes())):
                return path, ctypes.CDLL(str(path))
    return None, None


def _processor() -> str:
    """Return text that differs between processors with different instruction sets."""
    if not (lines := cpu_info()):
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(command: list[str], folder: Path) -> Path:
    """Compile the library into a folder and return its path."""
    LOG.warning("compiling the kernels of this CPU, which takes half a minute to a minute")
    built = folder / "cpu_kernels.so"
    _run([*command, str(SOURCE), "-o", str(built)], COMPILE_SECONDS)
    return built


def _keep(built: Path, folder: Path, identity: str) -> None:
    """Copy a library into the cache folder, unless that cannot be written, or is full."""
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder) as temporary:  # other processes may do so at the same time
        Path(shutil.copy(built, temporary)).replace(folder / f"cpu_kernels-{identity}-{_digest(built.read_bytes())}.so")


def _run(command: list[str], seconds: float) -> str:
    """Run a compiler and return its output; if it takes too long, or this is interrupted, all that it has started ends with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return output
