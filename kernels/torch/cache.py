"""Moves, copies and clearing of paged KV in plain PyTorch; see `titan.kernels.interfaces.CacheOps`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from titan.core.arrays import Ints
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import PathMove


class TorchCache:
    """Runs on any device."""

    def move_paths(self, kv: KVTensor, moves: Sequence[PathMove]) -> None:
        for group in kv.groups:
            slots = group.flatten(3, 4)
            sources, targets = (torch.from_numpy(each).to(slots.device) for each in path_slots(moves, kv.block_size))
            slots.index_copy_(3, targets, slots.index_select(3, sources))

    def copy_blocks(self, kv: KVTensor, sources: Ints, targets: Ints) -> None:
        for group in kv.groups:
            source_ids, target_ids = (torch.from_numpy(each).to(group.device) for each in (sources, targets))
            group.index_copy_(3, target_ids, group.index_select(3, source_ids))

    def clear_blocks(self, kv: KVTensor, block_ids: Ints) -> None:
        for group in kv.groups:
            group.index_fill_(3, torch.from_numpy(block_ids).to(group.device), 0)


def path_slots(moves: Sequence[PathMove], block_size: int) -> tuple[Ints, Ints]:
    """Physical slots, int64 [n] each, that the nodes of paths are in, and that they go to."""
    places: tuple[list[int], list[int]] = [], []
    for move in moves:
        for physical, nodes in zip(places, (move.path, range(len(move.path))), strict=True):
            for slot in (move.first_slot + node for node in nodes):
                physical.append(move.block_ids[slot // block_size] * block_size + slot % block_size)
    sources, targets = (np.array(each, np.int64) for each in places)
    return sources, targets
