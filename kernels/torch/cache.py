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
    """Cache operations on any device."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def zeros(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        old_blocks, old, new_blocks, new = path_places(moves, kv.block_size)
        moved, columns = [*planes(kv)], list[Ints]()
        for plane in moved:
            columns += [layer_rows(plane, old_blocks), layer_rows(plane, new_blocks)]
            columns += [np.tile(offsets, len(plane)) for offsets in (old, new)]
        uploaded = iter(self._upload(columns))
        for plane, sources, targets, from_offsets, to_offsets in zip(moved, *[uploaded] * 4, strict=True):
            rows = as_rows(plane)
            rows[targets, :, :, to_offsets] = rows[sources, :, :, from_offsets]

    def copy_blocks(self, kv: KVTensor, sources: Ints, targets: Ints) -> None:
        uploaded = iter(self._upload([layer_rows(group, each) for group in kv.groups for each in (sources, targets)]))
        for group, olds, news in zip(kv.groups, uploaded, uploaded, strict=True):
            rows = as_rows(group)
            rows.index_copy_(0, news, rows.index_select(0, olds))

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        for group, rows in zip(kv.groups, self._upload([layer_rows(group, block_ids) for group in kv.groups]), strict=True):
            as_rows(group).index_fill_(0, rows, 0)

    def gather_blocks(self, source: KVTensor, target: KVTensor, block_ids: Ints) -> None:
        [ids] = self._upload([block_ids])
        is_same = source is target
        # allocated before anything moves
        buffers = [group.new_empty(len(ids) if is_same else 0, *group.shape[2:]) for group in source.groups]
        for old_layers, new_layers, buffer in zip(source.groups, target.groups, buffers, strict=True):
            for old, new in zip(old_layers, new_layers, strict=True):
                gathered = torch.index_select(old, 0, ids, out=buffer if is_same else new[: len(ids)])
                if is_same:
                    new[: len(ids)] = gathered
                else:
                    _discard(old)

    def host_blocks(self, kv: KVTensor, num_blocks: int) -> list[Tensor]:
        # the dimension of blocks first, so that each block is contiguous
        return [torch.zeros(num_blocks, group.shape[0], *group.shape[2:], dtype=group.dtype) for group in kv.groups]

    def copy_out(self, kv: KVTensor, host: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
        for group, blocks in zip(kv.groups, host, strict=True):
            for here, away in runs(sources, targets):
                blocks[away].copy_(group[:, here].transpose(0, 1))

    def copy_in(self, kv: KVTensor, host: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
        for group, blocks in zip(kv.groups, host, strict=True):
            for away, here in runs(sources, targets):
                group[:, here].copy_(blocks[away].transpose(0, 1))

    def await_copies(self) -> None:
        """Do nothing: copies are complete when they return."""


def _discard(tensor: Tensor) -> None:
    """Return the pages of a contiguous tensor on the host to the system, where that is possible; its content is lost."""
    if tensor.device.type == "cpu" and hasattr(mmap, "MADV_DONTNEED"):
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: the others also hold other data
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def as_rows(group: Tensor) -> Tensor:
    """View the blocks of all layers of a group, [num_layers, num_blocks, ...], as rows.

    An operation on a few rows is one launch, where PyTorch makes one for every 2 GiB that an operation on all layers spans.
    """
    return group.view(-1, *group.shape[2:])


def layer_rows(group: Tensor, block_ids: Ints) -> Ints:
    """Return the rows of blocks, int64 [n], in `as_rows` of a group: int64 [num_layers * n], layer by layer."""
    return (np.arange(group.shape[0])[:, None] * group.shape[1] + block_ids).ravel()


def runs(sources: Ints, targets: Ints) -> Iterator[tuple[slice, slice]]:
    """Split a copy of blocks, int64 [n] each, into runs that are consecutive in both sources and targets."""
    ends = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    for start, end in pairwise([0, *ends.tolist(), len(sources)]):
        yield slice(sources[start], sources[start] + end - start), slice(targets[start], targets[start] + end - start)


def planes(kv: KVTensor) -> Iterator[Tensor]:
    """Yield views [num_layers, num_blocks, num_planes, num_kv_heads, block_size, ...] of all numbers in a cache."""
    for blocks, group in zip(kv.groups, kv.layout.groups, strict=True):
        yield from kv_planes(blocks, group.head_dim) if kv.layout.is_quantised else (blocks,)


def path_places(moves: Sequence[PathMove], block_size: int) -> list[Ints]:
    """Return the sources and the targets of path moves: old blocks, offsets in them, new blocks, offsets in them; int64 [n] each.

    Nodes that are in place already are left out.
    """
    olds = [(move.block_ids, move.first_slot + node) for move in moves for i, node in enumerate(move.path) if node != i]
    news = [(move.block_ids, move.first_slot + i) for move in moves for i, node in enumerate(move.path) if node != i]
    columns = list[list[int]]()
    for slots in (olds, news):
        columns += [block_ids[slot // block_size] for block_ids, slot in slots], [slot % block_size for _, slot in slots]
    return [np.array(each, np.int64) for each in columns]
