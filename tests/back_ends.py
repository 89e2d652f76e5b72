"""The back ends that tests are parametrised over, by name."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from interpreted import triton_backend

from titan.kernels.backend import choose_backend
from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.cpu.compiled import CompiledKernels
from titan.kernels.cpu.kinds import Kind, kinds_here
from titan.kernels.cpu.library import load_library
from titan.kernels.interfaces import Backend
from titan.kernels.torch.backend import TorchBackend

BEST, *OTHERS = kinds_here()
KINDS = {"cpu": BEST} | {f"cpu-{kind.name}": kind for kind in OTHERS if kind.name != "native"}
"""The kinds of processors that this one can run as, the best one first."""
WITH_PAIRS = next((kind for kind in (BEST, *OTHERS) if kind.name == "avx512bf16"), None)
if WITH_PAIRS is not None and BEST.name != "amx":
    emulated = Path(__file__).parent / "kernels" / "emulated_amx.h"
    contents = f"-DEMULATED=0x{sha256(emulated.read_bytes()).hexdigest()[:16]}"  # libraries are found again by their flags
    KINDS["cpu-amx"] = Kind("amx", "emulated", (*WITH_PAIRS.flags, "-O2", contents, "-include", str(emulated)), lambda: True)
CODED = [name for name, kind in KINDS.items() if kind.name != "native"]
"""Those that read weights of 8 bits."""

ON_HOST = ("torch", "cpu")
BACK_ENDS = ("torch", *KINDS, "triton")


@cache
def cpu_backend() -> Backend:
    """What is chosen for this CPU; to be called by tests, not by modules, which every worker would compile it for."""
    return choose_backend(torch.device("cpu"))


def make_kernels(kind: Kind, num_threads: int = 1) -> CompiledKernels:
    """With threads of their own; the test is skipped where C++ cannot be compiled."""
    loaded = load_library(kind)
    if loaded.library is None:
        pytest.skip(loaded.description)
    return CompiledKernels(loaded, num_threads)


def make_back_end(name: str) -> Backend:
    """A back end of its own, with a single thread: models and batches of tests are too small to gain from more."""
    if name in KINDS:
        return CpuBackend(make_kernels(KINDS[name]))
    return {"torch": TorchBackend(torch.device("cpu")), "triton": triton_backend()}[name]
