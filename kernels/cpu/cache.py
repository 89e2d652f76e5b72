"""Moves and clearing of paged KV in NumPy, which starts sooner than PyTorch; see `titan.kernels.interfaces.CacheOps`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.kv_tensor import KVTensor
from titan.kernels.cpu.huge_pages import map_pages
from titan.kernels.interfaces import PathMove
from titan.kernels.torch.cache import TorchCache, path_places, planes


class HostCache(TorchCache):
    """Cache operations in the memory of the host: few numbers are moved or cleared in a step."""

    def zeros(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.empty(shape, dtype=dtype, device=device).zero_()

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return map_pages(prod(shape) * dtype.itemsize).view(dtype).view(*shape).to(device)

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        old_blocks, old, new_blocks, new = path_places(moves, kv.block_size)
        for numbers in map(_numbers, planes(kv)):
            numbers[:, new_blocks, :, :, new] = numbers[:, old_blocks, :, :, old]

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        for group in kv.groups:
            _numbers(group)[:, block_ids] = 0


def _numbers(tensor: Tensor) -> NDArray[Any]:
    """Return a view of a tensor; bfloat16, which NumPy does not have, as integers."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
