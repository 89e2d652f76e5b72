"""Writes, moves and clearing of paged KV: by PyTorch, the compiled library on a CPU, or `titan.kernels.triton.kv_moves` on a GPU.

A cache is one tensor ``[num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim]``; a layer of it is
``[2, num_kv_heads, num_blocks, block_size, head_dim]``. A slot is ``block * block_size + offset``.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from titan.kernels import backend
from titan.kernels.cpu.library import usable_library
from titan.kernels.upload import to_device

Int = NDArray[np.int64]

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _CacheStruct(ctypes.Structure):
    """``KvCache`` of the source."""

    _fields_ = [
        ("data", _POINTER),
        *((name, _INT) for name in ("num_layers", "num_kv_heads", "block_size", "row_bytes")),
        ("strides", _INT * 5),
    ]


def write_kv(kv_layer: Tensor, new_kv: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values ``[T, 2, num_kv_heads, head_dim]`` to slots int64 ``[T]`` of one layer, in place."""
    kv_layer.flatten(2, 3).index_copy_(2, slot_mapping, new_kv.permute(1, 2, 0, 3))


def move_kv(kv: Tensor, source_slots: Int, target_slots: Int) -> None:
    """Copy the KV of all layers from slot to slot, int64 ``[n]`` each; sources are read before targets are written."""
    if kv.is_cpu and (library := usable_library()) is not None:
        library.move_slots(ctypes.byref(_cache_struct(kv)), *map(_pointer, (source_slots, target_slots)), _INT(len(source_slots)))
        return
    slots = kv.flatten(3, 4)
    slots.index_copy_(3, to_device(target_slots, kv.device), slots.index_select(3, to_device(source_slots, kv.device)))


def clear_blocks(kv: Tensor, block_ids: Int) -> None:
    """Zero blocks int64 ``[n]`` of all layers: what a former owner left must not reach the new one."""
    if backend.takes_triton(kv.device):
        from titan.kernels.triton import kv_moves  # not every platform has triton

        kv_moves.clear_blocks(kv, to_device(block_ids, kv.device))
    elif kv.is_cpu and (library := usable_library()) is not None:
        library.clear_blocks(ctypes.byref(_cache_struct(kv)), _pointer(block_ids), _INT(len(block_ids)))
    else:
        kv.index_fill_(3, to_device(block_ids, kv.device), 0)


def _cache_struct(kv: Tensor) -> _CacheStruct:
    size = kv.element_size()
    strides = (_INT * 5)(*(stride * size for stride in kv.stride()[:5]))
    return _CacheStruct(kv.data_ptr(), kv.shape[0], kv.shape[2], kv.shape[4], kv.shape[5] * size, strides)


def _pointer(array: Int) -> ctypes.c_void_p:
    return _POINTER(array.ctypes.data)
