"""Choice of a device's back end, made once, when an engine starts."""

from __future__ import annotations

import os

import torch

from titan.kernels.cpu.library import CPU_KERNELS, load_library, usable_library
from titan.kernels.interfaces import Backend
from titan.kernels.torch.backend import TorchBackend


def choose_backend(device: torch.device) -> Backend:
    """Choose Triton on CUDA, compiled C++ on a CPU with a compiler, else PyTorch.

    Args:
        device: the device, with its index.

    Raises:
        ValueError: the environment variable `TITAN_CPU_KERNELS` has an unknown value.
    """
    if device.type == "cuda":
        from titan.kernels.triton.backend import TritonBackend  # not every platform has triton

        return TritonBackend(device)
    if (library := usable_library()) is None:
        is_chosen = os.environ.get(CPU_KERNELS) == "torch"
        return TorchBackend(device, "PyTorch" if is_chosen else f"PyTorch; the C++ was {load_library().description}")
    from titan.kernels.cpu.backend import CpuBackend

    return CpuBackend(library)


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``, a CUDA device with its index; "auto" is CUDA if available.

    Raises:
        ValueError: the device is unknown or absent.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is not a device: allowed are 'auto', 'cpu', 'cuda', 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported: allowed are 'auto', 'cpu', 'cuda', 'cuda:N'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} is not here: {torch.cuda.device_count()} CUDA devices were found")
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device
