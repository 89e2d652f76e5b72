"""The gate of the feed-forward layer in one launch: SiLU or GELU of one half of a row times the other half.

Shazeer, "GLU variants improve transformer", 2020 (SwiGLU, GEGLU).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.tools import FLOAT_DTYPES, narrow, require, require_launchable

MAX_COLUMNS_PER_PROGRAM = 1024
"""Columns of one program: with four warps, sixteen bytes of bfloat16 per thread and load."""


@triton.jit
def _gate_kernel(
    output_ptr,  # [T, SIZE]
    gate_up_ptr,  # [T, 2 * SIZE]
    stride_gate_up,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # of one program
    HAS_GELU: tl.constexpr,
):
    """One program per row and piece of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    places = gate_up_ptr + row * stride_gate_up + columns
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + SIZE, mask=inside, other=0.0).to(tl.float32)
    steepened = gate
    if HAS_GELU:  # Hendrycks and Gimpel, "Gaussian error linear units", 2016: its approximation by tanh, written with a sigmoid
        steepened = 1.5957691216 * (gate + 0.044715 * gate * gate * gate)
    product = gate * tl.sigmoid(steepened) * up
    tl.store(output_ptr + row * SIZE + columns, narrow(product, output_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``, with ``silu(x) = x / (1 + exp(-x))``, in float32, and round once."""
    return _gate(gate_up, has_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Compute ``gelu(gate) * up``, with ``gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``, as `silu_mul`."""
    return _gate(gate_up, has_gelu=True)


def _gate(gate_up: Tensor, *, has_gelu: bool) -> Tensor:
    device, dtype = gate_up.device, gate_up.dtype
    require_launchable("gate_up", device)
    require("gate_up", gate_up, shape=(None, None), dtypes=FLOAT_DTYPES, device=device, contiguous=False)
    num_rows, num_columns = gate_up.shape
    if num_columns % 2 or not num_columns:
        raise ValueError(f"gate_up has shape {list(gate_up.shape)}: its rows must have two halves")

    size = num_columns // 2
    output = torch.empty(num_rows, size, dtype=dtype, device=device)
    columns = min(triton.next_power_of_2(size), MAX_COLUMNS_PER_PROGRAM)
    _gate_kernel[(num_rows, triton.cdiv(size, columns))](
        output, gate_up, gate_up.stride(0), SIZE=size, COLUMNS=columns, HAS_GELU=has_gelu, num_warps=4
    )
    return output
