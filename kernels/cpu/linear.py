"""Products of rows with weights in any layout, by the C++ of this folder or by oneDNN."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.kernels.cpu.library import COMPILED_DTYPES, kernel, load_library
from titan.kernels.cpu.weights import WeightStruct, is_tiled, tiled_struct

NUM_TRIED_ROWS = 8
"""Number of random rows whose product reveals the layout of a weight."""

BLOCKS = (64, 48, 32, 16)
"""Outputs per block in those of oneDNN's layouts that the library can read."""

PLAIN = 1
"""Block size that stands for plain rows."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias`` with a packed or plain weight: [rows, in_features] -> [rows, out_features]."""
    if weight.is_mkldnn:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return output
    if is_tiled(weight):
        return multiply_by_tiles(x, weight, bias, None)
    return F.linear(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Compute ``residual + x @ weight.T + bias``, with the sum fused into the product if the weight is packed."""
    if weight.is_mkldnn:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")
        return output
    if is_tiled(weight):
        return multiply_by_tiles(x, weight, bias, residual)
    return F.linear(x, weight, bias).add_(residual)


def max_rows(library: ctypes.CDLL, dtype: torch.dtype, weight: WeightStruct) -> int:
    """Return the largest number of rows for which the library is at least as fast as oneDNN; it accepts more."""
    function = kernel(library, "max_rows", dtype)
    function.argtypes, function.restype = [_POINTER], _INT
    return int(function(ctypes.addressof(weight)))


def multiply_rows(library: ctypes.CDLL, weight: WeightStruct, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Compute ``residual + x @ weight.T + bias``: [rows, num_inputs] -> [rows, num_outputs].

    Args:
        library: the compiled C++ of this folder.
        weight: float32 or bfloat16, as ``is_bfloat16`` says.
        x: float32 or bfloat16, contiguous.
        residual: [rows, num_outputs], dtype of ``x``, contiguous; ``None``: nothing is added.
    """
    function = kernel(library, "linear", x.dtype)
    function.argtypes, function.restype = [_POINTER, _POINTER, _INT, _POINTER, _POINTER], None
    output = x.new_empty(len(x), weight.num_outputs)
    added = None if residual is None else residual.data_ptr()
    function(ctypes.addressof(weight), x.data_ptr(), len(x), added, output.data_ptr())
    return output


def multiply_by_tiles(x: Tensor, tiles: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Compute ``residual + x @ weight.T + bias`` of float32 rows: [rows, num_inputs] -> [rows, num_outputs]."""
    library = load_library().library
    assert library is not None, "it was there when the weight was tiled"
    return multiply_rows(library, tiled_struct(tiles, bias), x.contiguous(), None if residual is None else residual.contiguous())


def find_weight(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> WeightStruct | None:
    """Return how the library can read a weight; ``None`` if it cannot.

    oneDNN does not disclose its layouts, which differ between processors. The layout chosen is the one whose product with random
    rows is oneDNN's: up to rounding, it follows for these weights that every element is where it is read.

    Args:
        library: the compiled C++ of this folder.
        weight: [num_outputs, num_inputs], plain, or made by `titan.kernels.cpu.weights.pack_weight`; it must outlive the result.
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
    """Whether two results differ by rounding alone: of the result, and of the sum, whose terms may be larger than it."""
    return torch.allclose(output, expected, rtol=2 * eps, atol=1e-4 * float(expected.square().mean().sqrt()))
