"""The paged KV of one model: its layout, its size in bytes, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Role = Literal["target", "draft"]
"""Whose cache it is."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Consecutive layers whose keys and values have equal shapes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # of keys and of values


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV that a model keeps of each token."""

    groups: tuple[KVGroup, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return sum(2 * each.num_layers * each.num_kv_heads * each.head_dim for each in self.groups) * self.dtype.itemsize


class KVTensor:
    """The keys and values of a model in blocks of slots; a slot is ``block * block_size + offset``.

    Args:
        layout: of the model.
        num_blocks: as many as the block pool has.
        block_size: slots of a block.
        device: where it is allocated, filled with zeros.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups: tuple[Tensor, ...] = tuple(
            torch.zeros(
                (each.num_layers, 2, each.num_kv_heads, num_blocks, block_size, each.head_dim), dtype=layout.dtype, device=device
            )
            for each in layout.groups
        )
        """One tensor per group: [num_layers, 2, num_kv_heads, num_blocks, block_size, head_dim]."""
        self.layers: Sequence[Tensor] = [layer for group in self.groups for layer in group]
        """One tensor per layer: [2, num_kv_heads, num_blocks, block_size, head_dim], views of the groups."""
