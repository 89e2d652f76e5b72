"""Moves, copies and clearing of paged KV by Triton kernels; see `titan.kernels.interfaces.CacheOps`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from titan.core.arrays import Ints
from titan.core.batch import pad_block_tables
from titan.core.kv_tensor import KVTensor
from titan.core.trees import Upload
from titan.kernels.interfaces import PathMove
from titan.kernels.triton.kv_moves import clear_blocks, copy_blocks, move_paths


class TritonCache:
    """One launch per group of layers.

    Args:
        upload: brings arrays to the device.
    """

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        paths = np.zeros((len(moves), max(len(move.path) for move in moves)), np.int32)
        for row, move in zip(paths, moves, strict=True):
            row[: len(move.path)] = move.path
        block_table = pad_block_tables([move.block_ids for move in moves]).astype(np.int32)
        first_slots = np.array([move.first_slot for move in moves])
        num_accepted = np.array([len(move.path) for move in moves], np.int32)
        arguments = self._upload([block_table, first_slots, paths, num_accepted])
        for group in kv.groups:
            move_paths(group, *arguments)

    def copy_blocks(self, kv: KVTensor, sources: Ints, targets: Ints) -> None:
        [pairs] = self._upload([np.stack((sources, targets), 1)])
        for group in kv.groups:
            copy_blocks(group, pairs)

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        [ids] = self._upload([block_ids])
        for group in kv.groups:
            clear_blocks(group, ids)
