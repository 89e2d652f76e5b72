"""Copies of small arrays from the host to the device, without synchronizing, and of results back, which synchronizes.

A copy from pageable memory waits until the device has done all earlier work; one from pinned memory is queued after it.
Pinned memory comes from PyTorch's cache, which reuses a buffer only after the copies from it have run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Alignment of every array, in bytes: Triton recompiles a kernel for pointers of other alignments."""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device, *, into: Tensor | None = None) -> list[Tensor]:
    """Copy arrays to the device in one copy.

    Args:
        arrays: of any shapes, and of dtypes that PyTorch has.
        device: the target of the copy.
        into: uint8 [at least `packed_size`] on the device, whose beginning is overwritten; ``None``: new memory. Arrays of the
            same shapes and dtypes always get the same addresses in it.

    Returns:
        Tensors of the same dtypes and shapes, one after the other in memory.
    """
    staging = torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host, start = staging.numpy(), 0
    places = []
    for array in arrays:
        host[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
        places.append(slice(start, start + array.nbytes))
        start = _aligned(start + array.nbytes)
    if into is None:
        packed = staging.to(device, non_blocking=True)
    else:
        packed = into[: len(staging)]
        packed.copy_(staging, non_blocking=True)
    return [packed[place].view(_torch_dtype(array)).view(array.shape) for place, array in zip(places, arrays, strict=True)]


def download(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Copy tensors to the host in one copy, which waits until the device has computed them.

    Args:
        tensors: contiguous, of any shapes, all on one device.

    Returns:
        Arrays of the same dtypes and shapes.
    """
    packed = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors]).cpu().numpy()
    arrays, start = [], 0
    for tensor in tensors:
        end = start + tensor.nbytes
        arrays.append(packed[start:end].view(_numpy_dtype(tensor.dtype)).reshape(tensor.shape))
        start = end
    return arrays


def packed_size(arrays: Sequence[NDArray[Any]]) -> int:
    """Return the number of bytes that `upload` needs for the arrays."""
    return sum(_aligned(array.nbytes) for array in arrays)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _torch_dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
