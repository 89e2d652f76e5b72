"""Float32 weights that bfloat16 holds exactly, kept as such in tiles for the matrix units (AMX) of Intel processors.

Most models are published in bfloat16; run in float32, half of what is read of each weight are zeros. Kept in bfloat16, it
takes half the memory, and half the time to read; products are as exact as those of float32: see `cpu/amx.h`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan.kernels.cpu.huge_pages import use_huge_pages
from titan.kernels.cpu.library import load_library, usable_library
from titan.kernels.cpu.weights import WeightStruct, multiply_rows

BLOCK_OUTPUTS = 32
"""``kAmxBlock`` of the source: outputs that stand side by side."""

TILE_INPUTS = 32
"""``kTileInputs`` of the source."""

CHECKED_ROWS = 1024
"""Rows of a weight that are looked at together."""

_LOST_BITS = 0xFFFF
"""Of a float32, those that bfloat16 has not."""


def has_tiles() -> bool:
    """Whether the processor has the units, and the library that uses them is there."""
    library = usable_library()
    return library is not None and bool(library.has_tiles())


def can_tile(weight: Tensor) -> bool:
    """Whether `tile_weight` loses nothing of a weight [num_outputs, num_inputs], and products with the tiles are fast here."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not has_tiles():
        return False
    if weight.shape[0] % BLOCK_OUTPUTS or weight.shape[1] % TILE_INPUTS:
        return False
    return not any((rows.view(torch.int32) & _LOST_BITS).any() for rows in weight.contiguous().split(CHECKED_ROWS))


def tile_weight(weight: Tensor) -> Tensor:
    """Float32 [num_outputs, num_inputs] to bfloat16 [blocks, num_inputs / 2, BLOCK_OUTPUTS, 2]."""
    num_outputs, num_inputs = weight.shape
    blocks = weight.contiguous().bfloat16().view(num_outputs // BLOCK_OUTPUTS, BLOCK_OUTPUTS, num_inputs // 2, 2)
    tiles = blocks.transpose(1, 2).contiguous()
    use_huge_pages(tiles.data_ptr(), tiles.nbytes)
    return tiles


def is_tiled(weight: Tensor) -> bool:
    """Whether `tile_weight` made it: other weights have two dimensions."""
    return weight.dim() == 4


def tiled_struct(tiles: Tensor, bias: Tensor | None) -> WeightStruct:
    """How the library reads tiles, and a float32 bias [num_outputs]; both must live as long."""
    num_blocks, num_pairs = tiles.shape[:2]
    return WeightStruct(
        data=tiles.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        num_outputs=num_blocks * BLOCK_OUTPUTS,
        num_inputs=2 * num_pairs,
        block=BLOCK_OUTPUTS,
        depth=2 * num_pairs,
        is_bfloat16=True,
    )


def multiply_by_tiles(x: Tensor, tiles: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """``residual + x @ weight.T + bias`` of float32 rows: [rows, num_inputs] -> [rows, num_outputs]."""
    library = load_library().library
    assert library is not None, "it was there when the weight was tiled"
    return multiply_rows(library, tiled_struct(tiles, bias), x.contiguous(), None if residual is None else residual.contiguous())
