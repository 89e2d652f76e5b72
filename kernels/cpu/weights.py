"""Packing of linear layers' weights, the same for all kinds of processors.

Blocks of 16 outputs: for each pair of inputs, the weights of the block's outputs lie side by side, [outputs / 16, inputs / 2, 16, 2].
So are bfloat16 weights packed, and float32 ones that bfloat16 holds exactly: most models are published in bfloat16; run in float32,
half of the bits read of each weight would be zeros. Other float32 weights are packed as [outputs / 16, inputs, 16].

A packed weight is a tensor of integers, so that no operation of PyTorch takes it for numbers: int32 [out_features, inputs / 2],
each a pair, or uint32 [out_features, inputs], each the bits of a float32; what the shape says of the order holds only as a whole. Its
storage is padded to whole blocks, of pairs to multiples of 32 outputs and inputs: tiles of the matrix units.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

BLOCK = 16
"""``kBlock`` of the C++: outputs side by side."""

PAIR_INPUTS = 32
"""``kPairInputs`` of the C++."""

CHUNK_ROWS = 32
"""Outputs that are packed together, so that little memory is needed at a time."""

_LOST_BITS = 0xFFFF
"""Bits of a float32 that bfloat16 lacks."""

HUGE_PAGE_BYTES = 2**21
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of <linux/mman.h>; the latter since Linux 6.1

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class WeightStruct(ctypes.Structure):
    """``Weight`` of the C++."""

    _fields_ = [("data", _POINTER), ("bias", _POINTER), ("num_outputs", _INT), ("num_inputs", _INT), ("has_pairs", _INT)]


def pack_weight(weight: Tensor) -> Tensor:
    """Pack a weight [out_features, in_features] of float32 or bfloat16; return one that is packed as it is."""
    if is_packed(weight):
        return weight
    num_outputs, num_inputs = weight.shape
    has_pairs = weight.dtype == torch.bfloat16 or _is_held_by_bfloat16(weight)
    step = PAIR_INPUTS if has_pairs else BLOCK
    depth = -(-num_inputs // step) * step // 2 if has_pairs else num_inputs
    packed = torch.zeros(-(-num_outputs // step) * step, depth, dtype=torch.int32)
    use_huge_pages(packed.data_ptr(), packed.nbytes)
    for rows, target in zip(weight.split(CHUNK_ROWS), packed.split(CHUNK_ROWS), strict=True):
        words = torch.zeros(len(target), depth * 2 if has_pairs else depth, dtype=torch.bfloat16 if has_pairs else weight.dtype)
        words[: len(rows), :num_inputs] = rows
        blocks = words.view(torch.int32).view(-1, BLOCK, depth)
        target.view(-1, depth, BLOCK).copy_(blocks.transpose(1, 2))
    return packed[:num_outputs] if has_pairs else packed[:num_outputs].view(torch.uint32)


def is_packed(weight: Tensor) -> bool:
    """Whether `pack_weight` made it."""
    return weight.dtype in (torch.int32, torch.uint32)


def has_pairs(packed: Tensor) -> bool:
    """Whether a packed weight holds pairs of bfloat16, not float32."""
    return packed.dtype == torch.int32


def look_up(token_ids: Tensor, packed: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Return rows of a packed weight: int64 [n] -> [n, size]."""
    padded = packed.view(torch.int32).as_strided((-(-len(packed) // BLOCK), packed.shape[1], BLOCK), (packed.shape[1] * BLOCK, BLOCK, 1))
    words = padded[token_ids // BLOCK, :, token_ids % BLOCK]
    return words.view(torch.bfloat16 if has_pairs(packed) else torch.float32)[:, :size].to(dtype)


def weight_struct(packed: Tensor, bias: Tensor | None, num_inputs: int) -> WeightStruct:
    """Return how the library reads a packed weight and a bias [out_features]; both must outlive the result."""
    pointer = None if bias is None else bias.data_ptr()
    return WeightStruct(packed.data_ptr(), pointer, len(packed), num_inputs, has_pairs(packed))


def _is_held_by_bfloat16(weight: Tensor) -> bool:
    return not any((rows.view(torch.int32) & _LOST_BITS).any() for rows in weight.contiguous().split(CHUNK_ROWS))


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
