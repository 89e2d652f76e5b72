"""Moves, copies and clearing of paged KV in plain PyTorch; see `titan.kernels.interfaces.CacheOps`."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.kv_tensor import KVTensor, kv_planes
from titan.core.trees import Upload
from titan.kernels.interfaces import PathMove


class TorchCache:
    """Cache operations on any device.

    Args:
        upload: copies arrays to the device.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        sources, targets = self._upload(_path_slots(moves, kv.block_size))
        if kv.layout.is_quantised:
            _move_quantised(kv, sources, targets)
            return
        for group in kv.groups:
            slots = group.view(-1, kv.num_blocks * kv.block_size, group.shape[-1])  # fewer dimensions: less setup per operation
            slots.index_copy_(1, targets, slots.index_select(1, sources))

    def copy_blocks(self, kv: KVTensor, sources: Ints, targets: Ints) -> None:
        source_ids, target_ids = self._upload([sources, targets])
        for group in kv.groups:
            group.index_copy_(3, target_ids, group.index_select(3, source_ids))

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        [ids] = self._upload([block_ids])
        for group in kv.groups:
            group.index_fill_(3, ids, 0)

    def gather_blocks(self, source: KVTensor, target: KVTensor, block_ids: Ints) -> None:
        [ids] = self._upload([block_ids])
        is_same = source is target
        rooms = [group.new_empty(len(ids) if is_same else 0, *group.shape[4:]) for group in source.groups]
        for olds, news, room in zip(source.groups, target.groups, rooms, strict=True):
            for old, new in zip(olds.flatten(0, 2), news.flatten(0, 2), strict=True):  # [num_blocks, block_size, head_dim]
                gathered = torch.index_select(old, 0, ids, out=room if is_same else new[: len(ids)])
                if is_same:
                    new[: len(ids)] = gathered
                else:
                    _discard(old)

    def host_blocks(self, kv: KVTensor, num_blocks: int) -> list[Tensor]:
        return [torch.zeros(host_shape(group, num_blocks), dtype=group.dtype) for group in kv.groups]

    def copy_out(self, kv: KVTensor, host: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
        for group, blocks in zip(kv.groups, host, strict=True):
            for here, away in runs(sources, targets):
                blocks[away].copy_(group[:, :, :, here].movedim(3, 0))

    def copy_in(self, kv: KVTensor, host: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
        for group, blocks in zip(kv.groups, host, strict=True):
            for away, here in runs(sources, targets):
                group[:, :, :, here].copy_(blocks[away].movedim(0, 3))

    def await_copies(self) -> None:
        """Do nothing: copies are complete when they return."""


def _discard(tensor: Tensor) -> None:
    """Give the pages of a contiguous tensor on the host back to the system, if it can take them; the content is lost."""
    if tensor.device.type == "cpu" and hasattr(mmap, "MADV_DONTNEED"):
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: others hold their neighbours too
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def _move_quantised(kv: KVTensor, sources: Tensor, targets: Tensor) -> None:
    """Move slots, int64 [n] each, with their scales."""
    block_size = kv.block_size
    for blocks, group in zip(kv.groups, kv.layout.groups, strict=True):
        for plane in kv_planes(blocks.flatten(0, 2), group.head_dim):  # [rows, blocks, block_size, ...]
            plane[:, targets // block_size, targets % block_size] = plane[:, sources // block_size, sources % block_size]


def host_shape(group: Tensor, num_blocks: int) -> tuple[int, ...]:
    """Return the shape of this many blocks of a group on the host: blocks first, so that each is one piece of memory."""
    return num_blocks, *group.shape[:3], *group.shape[4:]


def runs(sources: Ints, targets: Ints) -> Iterator[tuple[slice, slice]]:
    """Yield the runs of blocks, int64 [n] each, that follow each other on both sides of a copy."""
    ends = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    for start, end in pairwise([0, *ends.tolist(), len(sources)]):
        yield slice(sources[start], sources[start] + end - start), slice(targets[start], targets[start] + end - start)


def _path_slots(moves: Sequence[PathMove], block_size: int) -> list[Ints]:
    """Return the physical slots, int64 [n] each, that hold the nodes of paths, and those they move to."""
    places: tuple[list[int], list[int]] = [], []
    for move in moves:
        for physical, nodes in zip(places, (move.path, range(len(move.path))), strict=True):
            for slot in (move.first_slot + node for node in nodes):
                physical.append(move.block_ids[slot // block_size] * block_size + slot % block_size)
    return [np.array(each, np.int64) for each in places]
