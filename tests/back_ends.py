"""The back ends that tests are parametrised over, by name."""

from __future__ import annotations

import pytest
import torch
from interpreted import triton_backend

from titan.kernels.cpu.backend import CpuBackend
from titan.kernels.cpu.kinds import CPU_KERNELS
from titan.kernels.cpu.library import load_library
from titan.kernels.interfaces import Backend
from titan.kernels.torch.backend import TorchBackend

ON_HOST = ("torch", "cpu")
BACK_ENDS = (*ON_HOST, "triton")


def make_back_end(name: str) -> Backend:
    """A back end of its own; the test is skipped where C++ cannot be compiled."""
    match name:
        case "torch":
            return TorchBackend(torch.device("cpu"))
        case "cpu":
            loaded = load_library()
            if loaded.library is None:
                pytest.skip(loaded.description)
            return CpuBackend(loaded.library)
        case "triton":
            return triton_backend()
    raise ValueError(f"{name!r} is not a back end: {BACK_ENDS}")


def choose_cpu_kernels(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    """Let ``TITAN_CPU_KERNELS`` have this value until the test ends."""
    monkeypatch.setenv(CPU_KERNELS, choice)
    usable_library.cache_clear()
