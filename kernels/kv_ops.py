"""Writes, moves and clearing of paged KV: plain PyTorch, but for blocks that `titan.kernels.kv_moves` clears.

A cache is one tensor ``[num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim]``; a layer of it is
``[2, num_kv_heads, num_blocks, block_size, head_dim]``. A slot is ``block * block_size + offset``.
"""

from __future__ import annotations

from torch import Tensor

from titan.kernels import backend


def write_kv(kv_layer: Tensor, new_kv: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values ``[T, 2, num_kv_heads, head_dim]`` to slots int64 ``[T]`` of one layer, in place."""
    kv_layer.flatten(2, 3).index_copy_(2, slot_mapping, new_kv.permute(1, 2, 0, 3))


def move_kv(kv: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy the KV of all layers from slot to slot, int64 ``[n]`` each; sources are read before targets are written."""
    slots = kv.flatten(3, 4)
    slots.index_copy_(3, target_slots, slots.index_select(3, source_slots))


def clear_blocks(kv: Tensor, block_ids: Tensor) -> None:
    """Zero blocks int64 ``[n]`` of all layers: what a former owner left must not reach the new one."""
    if backend.takes_triton(kv.device):
        from titan.kernels import kv_moves  # not every platform has triton

        kv_moves.clear_blocks(kv, block_ids)
        return
    kv.index_fill_(3, block_ids, 0)
