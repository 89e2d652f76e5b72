"""Writes, moves and clearing of paged KV: plain PyTorch.

A cache is one tensor ``[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]``; a layer of it is
``[2, num_blocks, num_kv_heads, block_size, head_dim]``. A slot is ``block * block_size + offset``.
"""

from __future__ import annotations

from torch import Tensor


def write_kv(kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values ``[T, num_kv_heads, head_dim]`` to slots int64 ``[T]`` of one layer, in place."""
    block_size = kv_layer.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_layer[0][blocks, :, offsets] = k
    kv_layer[1][blocks, :, offsets] = v


def move_kv(kv: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy the KV of all layers from slot to slot, int64 ``[n]`` each; sources are read before targets are written."""
    block_size = kv.shape[4]
    source = kv[:, :, source_slots // block_size, :, source_slots % block_size]
    kv[:, :, target_slots // block_size, :, target_slots % block_size] = source


def clear_blocks(kv: Tensor, block_ids: Tensor) -> None:
    """Zero blocks int64 ``[n]`` of all layers: what a former owner left must not reach the new one."""
    kv.index_fill_(2, block_ids, 0)
