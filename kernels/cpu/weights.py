"""Products of rows with a weight by the C++ of `cpu/`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from titan.kernels.cpu.library import kernel

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
        ("is_bfloat16", _INT),
    ]


def max_rows(library: ctypes.CDLL, dtype: torch.dtype, weight: WeightStruct) -> int:
    """Most rows for which the library is as fast as oneDNN, or faster; it takes more."""
    function = kernel(library, "max_rows", dtype)
    function.argtypes, function.restype = [_POINTER], _INT
    return int(function(ctypes.addressof(weight)))


def multiply_rows(library: ctypes.CDLL, weight: WeightStruct, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``residual + x @ weight.T + bias``: [rows, num_inputs] -> [rows, num_outputs].

    Args:
        library: the C++ of `cpu/`, compiled.
        weight: float32 or bfloat16, as it says.
        x: float32 or bfloat16, contiguous.
        residual: [rows, num_outputs], dtype of ``x``, contiguous; nothing is added without it.
    """
    function = kernel(library, "linear", x.dtype)
    function.argtypes, function.restype = [_POINTER, _POINTER, _INT, _POINTER, _POINTER], None
    output = x.new_empty(len(x), weight.num_outputs)
    added = None if residual is None else residual.data_ptr()
    function(ctypes.addressof(weight), x.data_ptr(), len(x), added, output.data_ptr())
    return output
