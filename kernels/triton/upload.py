"""Copies of small arrays from the host to the device, without synchronizing, and of results back, which synchronizes.

A copy from pageable memory waits until the device has done all earlier work; one from pinned memory is queued after it.
Pinned memory comes from PyTorch's cache, which reuses a buffer only after the copies from it have run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Alignment of every array, in bytes: Triton recompiles a kernel for pointers of other alignments."""

_NUMPY_DTYPES = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)
}
TORCH_DTYPES = {there: here for here, there in _NUMPY_DTYPES.items()}
"""Dtypes of tensors by those of arrays."""


def allocate_staging(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate bytes on the host from which a copy to the device can be queued."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one copy.

    Args:
        arrays: of any shapes, and of the dtypes bool, uint8, int32, int64, float32 or float64.
        device: the target of the copy.

    Returns:
        Tensors of the same dtypes and shapes, one after the other in memory.
    """
    starts = [0, *accumulate([aligned(array.nbytes) for array in arrays])]
    staging = allocate_staging(starts[-1], device)
    host = staging.numpy()
    for array, start in zip(arrays, starts, strict=False):
        host[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    packed, tensors = staging.to(device, non_blocking=True), list[Tensor]()
    for array, start in zip(arrays, starts, strict=False):
        tensor = packed[start : start + array.nbytes].view(TORCH_DTYPES[array.dtype])
        tensors.append(tensor if array.ndim == 1 else tensor.view(array.shape))
    return tensors


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
        arrays.append(packed[start:end].view(_NUMPY_DTYPES[tensor.dtype]).reshape(tensor.shape))
        start = end
    return arrays


def aligned(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
