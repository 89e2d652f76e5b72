"""Choice of a device's back end, made once, when an engine starts."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch

from titan.kernels.cpu.compiled import CompiledKernels
from titan.kernels.cpu.kinds import choose_kind
from titan.kernels.cpu.library import load_library
from titan.kernels.interfaces import Backend
from titan.kernels.torch.backend import TorchBackend


def choose_backend(device: torch.device, num_threads: int | None = None) -> Backend:
    """Choose Triton on CUDA, compiled C++ on a CPU with a compiler, else PyTorch.

    Args:
        device: the device, with its index.
        num_threads: threads of a CPU; ``None``: one per physical core.

    Raises:
        ValueError: ``num_threads`` is given for a device that is not a CPU, or the environment variable `TITAN_CPU_KERNELS` has a
            value that is not allowed.
    """
    if device.type == "cuda":
        from titan.kernels.triton.backend import TritonBackend  # not every platform has triton

        if num_threads is not None:
            raise ValueError(f"num_threads={num_threads} is not allowed with device={str(device)!r}: it is for a CPU")
        return TritonBackend(device)
    if (kind := choose_kind()) is None:
        return TorchBackend(device, "PyTorch", num_threads)
    loaded = load_library(kind)
    if loaded.library is None:
        return TorchBackend(device, f"PyTorch, which is several times slower; the C++ was {loaded.description}", num_threads)
    from titan.kernels.cpu.backend import CpuBackend

    return CpuBackend(CompiledKernels(loaded, num_threads))


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``, a CUDA device with its index; "auto" is CUDA if available, with Triton.

    Raises:
        ValueError: the device is unknown or absent, or is a CUDA device without Triton.
    """
    has_triton = find_spec("triton") is not None
    if name == "auto":
        has_cuda = torch.cuda.is_available()
        if has_cuda and not has_triton:
            warnings.warn("there is a CUDA device, but not the package triton: device='auto' is the CPU", stacklevel=2)
        name = "cuda" if has_cuda and has_triton else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is not a device: allowed are 'auto', 'cpu', 'cuda', 'cuda:N'") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ValueError(f"device={name!r} is not supported: allowed are 'auto', 'cpu', 'cuda', 'cuda:N'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} is not here: {torch.cuda.device_count()} CUDA devices were found")
    if device.type == "cuda" and not has_triton:
        raise ValueError(f"device={name!r} is not possible: the package triton is not installed; device='cpu' runs without")
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device
