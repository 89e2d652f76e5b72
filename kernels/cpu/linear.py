"""Linear layers for few rows on a CPU: weights packed once, into our tiles or for oneDNN.

Plain `F.linear` in bfloat16 reads unpacked weights at a third of the memory bandwidth; the packed product reaches it.
The operators are those of Inductor's freezing; where they are missing, or the weights are elsewhere, `F.linear` runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.kernels.cpu.huge_pages import use_huge_pages
from titan.kernels.cpu.tiled_weights import can_tile, is_tiled, multiply_by_tiles, tile_weight

PACKING_ROWS = 8
"""Rows of a typical product; the packed layout hardly depends on it."""


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
    """A weight [out_features, in_features] in the packed layout, which only the products of this file can read."""
    if weight.is_mkldnn or is_tiled(weight):
        return weight
    if can_tile(weight):
        return tile_weight(weight)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKING_ROWS)
    if hasattr(torch.ops.mkldnn, "_nbytes"):
        use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` with a packed or a plain weight: [rows, in_features] -> [rows, out_features]."""
    if weight.is_mkldnn:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return output
    if is_tiled(weight):
        return multiply_by_tiles(x, weight, bias, None)
    return F.linear(x, weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual + x @ weight.T + bias``, the sum fused into the product where the weight is packed."""
    if weight.is_mkldnn:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")
        return output
    if is_tiled(weight):
        return multiply_by_tiles(x, weight, bias, residual)
    return F.linear(x, weight, bias).add_(residual)
