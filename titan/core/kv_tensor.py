"""The paged KV of one model: its layout, its size in bytes, and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

SCALE_BYTES = 4
"""Size of the float32 scale of a quantised key or value."""

Role = Literal["target", "draft"]
"""Whose cache it is."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Consecutive layers whose keys and values have equal shapes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # numbers of a key, and room of a value
    num_planes: int = 2  # keys and values, or only keys


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV that a model keeps of each token."""

    groups: tuple[KVGroup, ...]
    dtype: torch.dtype  # of the stored numbers; int8: quantised

    @property
    def is_quantised(self) -> bool:
        """Whether each key and each value of a head is stored as integers up to 127 and the scale that multiplies them."""
        return self.dtype == torch.int8

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, scales included."""
        return sum(
            each.num_planes * each.num_layers * each.num_kv_heads * self.bytes_per_row(each.head_dim) for each in self.groups
        )

    def bytes_per_row(self, head_dim: int) -> int:
        """Bytes of one key or value of a head."""
        return head_dim * self.dtype.itemsize + SCALE_BYTES * self.is_quantised

    def stored_as(self, kv_cache_dtype: str) -> KVLayout:
        """Return the layout with the dtype that an option names: "int8", or "auto", which changes nothing."""
        return self if kv_cache_dtype == "auto" else replace(self, dtype=getattr(torch, kv_cache_dtype))


class KVTensor:
    """The keys and values of a model in blocks of slots; a slot is ``block * block_size + offset``.

    Args:
        layout: of the model.
        num_blocks: as many as the block pool has.
        block_size: slots of a block.
        device: where it is allocated.
        allocate: a function as `torch.zeros`, such as those of `titan.kernels.interfaces.CacheOps`.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        allocate: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups: tuple[Tensor, ...] = tuple(
            allocate(self._group_shape(each), dtype=layout.dtype, device=device) for each in layout.groups
        )
        """One tensor per group: [num_layers, num_blocks, num_planes, num_kv_heads, block_size, head_dim].

        A pass reads all of a block, which therefore lies in one piece for each layer. Quantised blocks are bytes,
        [..., num_kv_heads, block_size * (head_dim + SCALE_BYTES)], which `kv_planes` takes apart.
        """
        self.layers: Sequence[Tensor] = [layer.movedim(0, 2) for group in self.groups for layer in group]
        """One tensor per layer, [num_planes, num_kv_heads, num_blocks, ...], views of the groups."""

    def _group_shape(self, group: KVGroup) -> tuple[int, ...]:
        shape = group.num_layers, self.num_blocks, group.num_planes, group.num_kv_heads
        if self.layout.is_quantised:
            return *shape, self.block_size * self.layout.bytes_per_row(group.head_dim)
        return *shape, self.block_size, group.head_dim


def kv_planes(blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return views of quantised blocks: their numbers, and the scales, which come after the numbers of each head's part.

    Args:
        blocks: int8 [..., block_size * (head_dim + SCALE_BYTES)].
        head_dim: numbers of a key or a value.

    Returns:
        int8 [..., block_size, head_dim] and float32 [..., block_size].

    Raises:
        ValueError: a block is not whole slots.
    """
    block_size, rest = divmod(blocks.shape[-1], head_dim + SCALE_BYTES)
    if rest:
        raise ValueError(
            f"quantised blocks have {blocks.shape[-1]} bytes: slots of head_dim {head_dim} are {head_dim + SCALE_BYTES}"
        )
    numbers, scales = blocks.split((block_size * head_dim, block_size * SCALE_BYTES), -1)
    return numbers.unflatten(-1, (block_size, head_dim)), scales.view(torch.float32)
