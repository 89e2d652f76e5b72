"""Packing of linear layers' weights, the same for all kinds of processors: blocks of 16 outputs whose weights lie side by side.

bfloat16 weights are packed as pairs of inputs, [outputs / 16, inputs / 2, 16, 2], and so are float32 ones that bfloat16 holds
exactly: most models are published in bfloat16; run in float32, half of the bits read of each weight would be zeros. Other float32
weights are packed as [outputs / 16, inputs, 16], in float16 if that holds them exactly.

With AVX-512 or AVX2, pairs are kept in codes of 12 bits, without loss (``codes.h``): a pass of few rows takes as long as reading
the weights does. Those whose mantissas end after 3 bits take 8 bits.

A packed weight is a tensor of integers, so that no operation of PyTorch takes it for numbers: int32 [out_features, inputs / 2] of
pairs, uint8 [out_features, bytes of a block / 16] of codes, int8 of those of 8 bits, uint16 [out_features, inputs] of float16, or
uint32 of float32. Its first rows are a weight, too. Its storage is padded to whole blocks; of pairs and codes, to multiples of 32
outputs and inputs, tiles of the matrix units. The rare weights of codes stand behind the blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.kernels.cpu.compiled import INT, POINTER, CompiledKernels
from titan.kernels.cpu.structs import WeightStruct, constant
from titan.kernels.cpu.weight_memory import round_up
from titan.kernels.torch.backend import using_threads

BLOCK, PAIR_INPUTS = constant("kBlock"), constant("kPairInputs")
"""Outputs side by side, and what inputs and outputs of pairs are padded to."""

CHUNK_ROWS = 256
"""Outputs that are packed together: little memory is needed at a time, and there is work for all threads."""

CODE_BITS = {torch.uint8: 12, torch.int8: 8}
"""Bits of a weight in codes, by the dtype of packed weights."""

HEADER_BYTES, RARE_BYTES = constant("kHeaderBytes"), constant("kRareBytes")
"""Sizes of ``CodeHeader`` and ``RareWeight`` of the C++."""

LARGEST_8_BITS = 0x7F70
"""Bits of the largest number of bfloat16 with 3 bits of mantissa."""

MAX_RARE = 1 / 1024
"""Largest part of a weight's numbers that may be rare: their products are added one by one. Of normal ones 1 / 4000 is."""

FORMATS = {
    torch.uint32: constant("kFloat32"),
    torch.uint16: constant("kFloat16"),
    torch.int32: constant("kPairs"),
    torch.uint8: constant("kCodes"),
    torch.int8: constant("kShortCodes"),
}
"""``WeightFormat`` of the C++, by the dtype of packed weights."""

NUMBERS = {torch.uint32: torch.float32, torch.uint16: torch.float16, torch.int32: torch.bfloat16}
"""What packed weights hold."""


def pack_weight(weight: Tensor, kernels: CompiledKernels) -> Tensor:
    """Pack a weight [out_features, in_features] of float32 or bfloat16."""
    with kernels.weight_memory.lock:
        return _pack(weight, kernels)


def _pack(weight: Tensor, kernels: CompiledKernels) -> Tensor:
    kind = next(kind for kind in (torch.int32, torch.uint16, torch.uint32) if _is_held(weight, NUMBERS[kind]))
    if kind == torch.int32 and kernels.has_codes and weight.numel() and (coded := _make_codes(weight, kernels)) is not None:
        return coded
    (num_outputs, num_inputs), step = weight.shape, PAIR_INPUTS if kind == torch.int32 else BLOCK
    depth = round_up(num_inputs, step) // 2 if kind == torch.int32 else num_inputs
    num_rows = round_up(num_outputs, step)
    packed = kernels.weight_memory.take(num_rows * depth * kind.itemsize).view(kind).view(num_rows, depth)
    word = torch.int16 if kind == torch.uint16 else torch.int32  # PyTorch copies few things of unsigned ones
    with using_threads(kernels.num_threads):
        for first, rows in _pieces(weight, NUMBERS[kind], len(packed), depth * kind.itemsize // NUMBERS[kind].itemsize):
            blocks = packed[first : first + len(rows)].view(word).view(len(rows) // BLOCK, depth, BLOCK)
            blocks.copy_(rows.view(word).view(len(rows) // BLOCK, BLOCK, depth).transpose(1, 2))
    return packed[:num_outputs]


def round_to_8_bits(weight: Tensor) -> None:
    """Round a weight of float32 or bfloat16 in place to bfloat16, and that to 3 bits of mantissa, each to nearest, ties to even.

    With the sign and the exponent, of which the weights of a block have few, these are 8 bits each; e4m3 numbers have the same
    precision (Micikevicius et al., "FP8 formats for deep learning", 2022).
    """
    for rows in weight.split(CHUNK_ROWS):
        bits = rows.bfloat16().view(torch.int16)
        half = 7 + (bits >> 4 & 1)
        rounded = torch.where(bits & 0x7FFF < LARGEST_8_BITS, bits + half, bits) & ~15  # not to infinity
        rows.copy_(rounded.view(torch.bfloat16))


def _make_codes(weight: Tensor, kernels: CompiledKernels) -> Tensor | None:
    """Return a weight in codes; ``None`` if too many of its numbers are rare."""
    num_rows, depth = (round_up(size, PAIR_INPUTS) for size in weight.shape)
    pieces = (each for _, rows in _pieces(weight, torch.bfloat16, num_rows, depth) for each in rows.split(CHUNK_ROWS))
    dtype = torch.uint8 if any((each.view(torch.int16) & 15).any() for each in pieces) else torch.int8
    num_blocks, most_rare, num_rare = num_rows // BLOCK, int(MAX_RARE * weight.numel()), torch.zeros(1, dtype=torch.int64)
    num_bytes = num_blocks * (HEADER_BYTES + BLOCK * depth * CODE_BITS[dtype] // 8)
    taken = kernels.weight_memory.take(num_bytes + most_rare * RARE_BYTES)
    make = kernels.function(f"make_codes_{CODE_BITS[dtype]}", None, POINTER, *[INT] * 3, POINTER, INT, INT, POINTER)
    for first, rows in _pieces(weight, torch.bfloat16, num_rows, depth):
        place = first // BLOCK, taken.data_ptr(), num_blocks
        make(rows.data_ptr(), len(rows), depth, *place, most_rare, num_rare.data_ptr())
    has_room = int(num_rare) <= most_rare
    coded = kernels.weight_memory.cut(taken, num_bytes + int(num_rare) * RARE_BYTES if has_room else 0).view(dtype)
    return coded[:num_bytes].view(num_rows, -1)[: len(weight)] if has_room else None


def _pieces(weight: Tensor, dtype: torch.dtype, num_rows: int, num_inputs: int) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces of a weight in a dtype, padded to a size with zeros, each after its first row; all of it at once if it is so."""
    is_whole = weight.dtype == dtype and weight.is_contiguous() and weight.shape == (num_rows, num_inputs)
    if is_whole and weight.storage_offset() % 2 == 0:  # else it cannot be viewed as pairs
        yield 0, weight
        return
    for first in range(0, num_rows, CHUNK_ROWS):
        rows = weight[first : first + CHUNK_ROWS].to(dtype)
        padding = num_inputs - weight.shape[1], min(CHUNK_ROWS, num_rows - first) - len(rows)
        yield first, F.pad(rows, (0, padding[0], 0, padding[1])).contiguous()


def is_packed(weight: Tensor) -> bool:
    """Whether `pack_weight` made it."""
    return weight.dtype in FORMATS


def weight_struct(packed: Tensor, bias: Tensor | None, num_inputs: int) -> ctypes.Structure:
    """Return how the library reads a packed weight and a bias [out_features]; both must outlive the result."""
    pointer = None if bias is None else bias.data_ptr()
    return WeightStruct(packed.data_ptr(), pointer, len(packed), num_inputs, FORMATS[packed.dtype])


def _is_held(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a dtype holds all numbers of a weight exactly."""
    return weight.dtype == dtype or all(torch.equal(rows.to(dtype).to(weight.dtype), rows) for rows in weight.split(CHUNK_ROWS))
