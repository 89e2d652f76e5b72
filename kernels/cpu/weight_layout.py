"""How the C++ of `cpu/` reads a weight where it lies: plain, in our tiles, or as oneDNN packed it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from titan.kernels.cpu.library import COMPILED_DTYPES
from titan.kernels.cpu.linear import linear
from titan.kernels.cpu.tiled_weights import is_tiled, tiled_struct
from titan.kernels.cpu.weights import WeightStruct, multiply_rows

NUM_TRIED_ROWS = 8
"""Random rows whose product tells how a weight lies."""

BLOCKS = (64, 48, 32, 16)
"""Outputs that oneDNN's layouts keep in a block, of those that the library can read."""

PLAIN = 1
"""As the size of a block: plain rows."""


def find_weight(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> WeightStruct | None:
    """How the library can read a weight; ``None`` if it cannot.

    oneDNN does not tell its layouts, which differ between processors. The one is taken with which the product of random rows is
    oneDNN's: it follows for these weights, up to rounding, that every element is where it is looked for.

    Args:
        library: the C++ of `cpu/`, compiled.
        weight: [num_outputs, num_inputs], plain, or made by `titan.kernels.cpu.linear.pack_weight`; it must live as long.
        bias: [num_outputs]; likewise.
    """
    if weight.dtype not in COMPILED_DTYPES:
        return None
    if is_tiled(weight):
        return tiled_struct(weight, bias)
    (num_outputs, num_inputs), bias_address = weight.shape, None if bias is None else bias.data_ptr()
    is_bfloat16 = weight.dtype == torch.bfloat16
    if not weight.is_mkldnn:
        plain = WeightStruct(weight.data_ptr(), bias_address, num_outputs, num_inputs, PLAIN, num_inputs, is_bfloat16)
        return plain if weight.is_contiguous() else None
    if not hasattr(torch.ops.mkldnn, "_nbytes"):
        return None
    num_elements = torch.ops.mkldnn._nbytes(weight) // weight.dtype.itemsize
    x = torch.randn(NUM_TRIED_ROWS, num_inputs, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    expected = linear(x, weight, bias).float()
    for block in BLOCKS:
        depth, rest = divmod(num_elements, -(-num_outputs // block) * block)
        if rest or depth % 2 or depth < num_inputs:
            continue
        found = WeightStruct(torch.ops.mkldnn.data_ptr(weight), bias_address, num_outputs, num_inputs, block, depth, is_bfloat16)
        if _is_close(multiply_rows(library, found, x).float(), expected, torch.finfo(weight.dtype).eps):
            return found
    return None


def _is_close(output: Tensor, expected: Tensor, eps: float) -> bool:
    """Whether they differ by rounding alone: of the result, and of the sum, whose terms may be larger than it."""
    return torch.allclose(output, expected, rtol=2 * eps, atol=1e-4 * float(expected.square().mean().sqrt()))
