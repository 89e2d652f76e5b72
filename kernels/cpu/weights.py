"""Layouts of linear layers' weights in memory: plain, packed by oneDNN, or in tiles of our own.

Plain weights in bfloat16 are read at a third of memory bandwidth. oneDNN packs them, by the operators of Inductor's freezing,
into layouts that it does not disclose. Tiles are float32 weights that bfloat16 holds exactly, stored in bfloat16 for the matrix
units (AMX) of Intel processors: most models are published in bfloat16; run in float32, half of the bits read of each weight are
zeros. In bfloat16, a weight takes half the memory and half the time to read; products are as exact as in float32: see `amx.h`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

from titan.kernels.cpu.library import usable_library

PACKING_ROWS = 8
"""Rows of a typical product; oneDNN's layout hardly depends on their number."""

BLOCK_OUTPUTS = 32
"""``kAmxBlock`` of the C++: outputs stored side by side."""

TILE_INPUTS = 32
"""``kTileInputs`` of the C++."""

CHECKED_ROWS = 1024
"""Rows of a weight that are checked together."""

_LOST_BITS = 0xFFFF
"""Bits of a float32 that bfloat16 lacks."""

HUGE_PAGE_BYTES = 2**21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of <linux/mman.h>; the latter since Linux 6.1

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class WeightStruct(ctypes.Structure):
    """``Weight`` of the C++."""

    _fields_ = [
        ("data", _POINTER),
        ("bias", _POINTER),
        ("num_outputs", _INT),
        ("num_inputs", _INT),
        ("block", _INT),
        ("depth", _INT),
        ("is_bfloat16", _INT),
    ]


def can_pack(dtype: torch.dtype) -> bool:
    """Whether the packed product is available for weights of this dtype."""
    return (
        dtype in (torch.bfloat16, torch.float32)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_weight(weight: Tensor) -> Tensor:
    """Return a weight [out_features, in_features] in the packed layout, which only the products of `linear.py` can read."""
    if weight.is_mkldnn or is_tiled(weight):
        return weight
    if can_tile(weight):
        return tile_weight(weight)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKING_ROWS)
    if hasattr(torch.ops.mkldnn, "_nbytes"):
        use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def has_tiles() -> bool:
    """Whether the processor has AMX units and the library that uses them is available."""
    library = usable_library()
    return library is not None and bool(library.has_tiles())


def can_tile(weight: Tensor) -> bool:
    """Whether `tile_weight` is lossless for a weight [num_outputs, num_inputs], and products with the tiles are fast here."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not has_tiles():
        return False
    if weight.shape[0] % BLOCK_OUTPUTS or weight.shape[1] % TILE_INPUTS:
        return False
    return not any((rows.view(torch.int32) & _LOST_BITS).any() for rows in weight.contiguous().split(CHECKED_ROWS))


def tile_weight(weight: Tensor) -> Tensor:
    """Convert float32 [num_outputs, num_inputs] to bfloat16 [blocks, num_inputs / 2, BLOCK_OUTPUTS, 2]."""
    num_outputs, num_inputs = weight.shape
    blocks = weight.contiguous().bfloat16().view(num_outputs // BLOCK_OUTPUTS, BLOCK_OUTPUTS, num_inputs // 2, 2)
    tiles = blocks.transpose(1, 2).contiguous()
    use_huge_pages(tiles.data_ptr(), tiles.nbytes)
    return tiles


def is_tiled(weight: Tensor) -> bool:
    """Whether `tile_weight` made it: other weights have two dimensions."""
    return weight.dim() == 4


def tiled_struct(tiles: Tensor, bias: Tensor | None) -> WeightStruct:
    """Return how the library reads tiles and a float32 bias [num_outputs]; both must outlive the result."""
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


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Move memory to huge pages, as far as Linux has them; without them reads take longer, but nothing else changes.

    Args:
        address: of memory that is in use.
        num_bytes: size of that memory.
    """
    if not sys.platform.startswith("linux") or num_bytes < HUGE_PAGE_BYTES:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(start, length, MADV_HUGEPAGE) == 0:
        madvise(start, length, MADV_COLLAPSE)
