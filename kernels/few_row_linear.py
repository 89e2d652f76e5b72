"""The compiled product of few rows with a weight, plain or as oneDNN packed it, which it reads where it lies."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from titan.kernels.cpu_library import COMPILED_DTYPES, kernel
from titan.kernels.linear import linear

NUM_TRIED_ROWS = 8
"""Random rows whose product tells how a weight lies."""

BLOCKS = (64, 48, 32, 16)
"""Outputs that oneDNN's layouts keep in a block, of those that the library can read."""

PLAIN = 1
"""As the size of a block: plain rows."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class WeightStruct(ctypes.Structure):
    """``Weight`` of the source."""

    _fields_ = [
        ("data", _POINTER),
        ("bias", _POINTER),
        ("num_outputs", _INT),
        ("num_inputs", _INT),
        ("block", _INT),
        ("depth", _INT),
    ]


def max_rows(library: ctypes.CDLL, dtype: torch.dtype, weight: WeightStruct) -> int:
    """Most rows for which the library is as fast as oneDNN, or faster."""
    function = kernel(library, "max_rows", dtype)
    function.argtypes, function.restype = [_POINTER], _INT
    return int(function(ctypes.addressof(weight)))


def multiply_few_rows(library: ctypes.CDLL, weight: WeightStruct, x: Tensor) -> Tensor:
    """``x @ weight.T + bias``: [rows, num_inputs] -> [rows, num_outputs], of contiguous rows, best at most `max_rows`."""
    function = kernel(library, "linear", x.dtype)
    function.argtypes, function.restype = [_POINTER, _POINTER, _INT, _POINTER], None
    output = x.new_empty(len(x), weight.num_outputs)
    function(ctypes.addressof(weight), x.data_ptr(), len(x), output.data_ptr())
    return output


def find_weight(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> WeightStruct | None:
    """How the library can read a weight; ``None`` if it cannot.

    oneDNN does not tell its layouts, which differ between processors. The one is taken with which the product of random rows is
    oneDNN's: it follows for these weights, up to rounding, that every element is where it is looked for.

    Args:
        library: the C++ of `cpu/`, compiled.
        weight: [num_outputs, num_inputs], plain or made by `titan.kernels.linear.pack_weight`; it must live as long.
        bias: [num_outputs]; likewise.
    """
    (num_outputs, num_inputs), bias_address = weight.shape, None if bias is None else bias.data_ptr()
    if weight.dtype not in COMPILED_DTYPES:
        return None
    if not weight.is_mkldnn:
        is_plain = weight.is_contiguous()
        return WeightStruct(weight.data_ptr(), bias_address, num_outputs, num_inputs, PLAIN, num_inputs) if is_plain else None
    if not hasattr(torch.ops.mkldnn, "_nbytes"):
        return None
    num_elements = torch.ops.mkldnn._nbytes(weight) // weight.dtype.itemsize
    x = torch.randn(NUM_TRIED_ROWS, num_inputs, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    expected = linear(x, weight, bias).float()
    for block in BLOCKS:
        depth, rest = divmod(num_elements, -(-num_outputs // block) * block)
        if rest or depth % 2 or depth < num_inputs:
            continue
        found = WeightStruct(torch.ops.mkldnn.data_ptr(weight), bias_address, num_outputs, num_inputs, block, depth)
        if _is_close(multiply_few_rows(library, found, x).float(), expected, torch.finfo(weight.dtype).eps):
            return found
    return None


def _is_close(output: Tensor, expected: Tensor, eps: float) -> bool:
    """Whether they differ by rounding alone: of the result, and of the sum, whose terms may be larger than it."""
    return torch.allclose(output, expected, rtol=2 * eps, atol=1e-4 * float(expected.square().mean().sqrt()))
