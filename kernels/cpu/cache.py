"""Moves, copies and clearing of paged KV by the C++ of this folder; see `titan.kernels.interfaces.CacheOps`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from titan.core.arrays import Ints
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import PathMove
from titan.kernels.torch.cache import TorchCache, path_slots

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _CacheStruct(ctypes.Structure):
    """``KvCache`` of the source."""

    _fields_ = [
        ("data", _POINTER),
        *((name, _INT) for name in ("num_layers", "num_kv_heads", "block_size", "row_bytes")),
        ("strides", _INT * 5),
    ]


class CompiledCache(TorchCache):
    """Copies blocks as PyTorch does.

    Args:
        library: the C++ of this folder, compiled.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        sources, targets = path_slots(moves, kv.block_size)
        for group in kv.groups:
            self._library.move_slots(ctypes.byref(_struct(group)), _pointer(sources), _pointer(targets), _INT(len(sources)))

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        for group in kv.groups:
            self._library.clear_blocks(ctypes.byref(_struct(group)), _pointer(block_ids), _INT(len(block_ids)))


def _struct(group: Tensor) -> _CacheStruct:
    size = group.element_size()
    strides = (_INT * 5)(*(stride * size for stride in group.stride()[:5]))
    return _CacheStruct(group.data_ptr(), group.shape[0], group.shape[2], group.shape[4], group.shape[5] * size, strides)


def _pointer(array: Ints) -> ctypes.c_void_p:
    return _POINTER(array.ctypes.data)
