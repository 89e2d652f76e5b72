"""RMSNorm in one launch, alone or after the addition to the residual stream, over rows ``[T, hidden_size]``.

Zhang and Sennrich, "Root mean square layer normalization", 2019.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan.kernels.triton.tools import FLOAT_DTYPES, narrow, require, require_launchable

MAX_HIDDEN_SIZE = 16384
"""Largest hidden size: one program holds a whole row in its registers."""


@triton.jit
def _norm_kernel(
    normed_ptr,  # [T, SIZE]
    x_ptr,  # [T, SIZE]
    residual_ptr,  # [T, SIZE], or None
    weight_ptr,  # [SIZE]
    eps,
    stride_x,
    stride_residual,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # SIZE, padded to a power of two
):
    """One program per row."""
    DTYPE: tl.constexpr = normed_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < SIZE
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        places = residual_ptr + row * stride_residual + columns
        total = narrow(x + tl.load(places, mask=inside, other=0.0).to(tl.float32), DTYPE)
        tl.store(places, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * SIZE + columns, narrow(x * scale * weight, DTYPE), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalise rows, which may be strided, as `titan.kernels.interfaces.LayerOps` says, and round once.

    A ``residual``, [T, hidden_size], is what ``x`` is added to in place, and is normalized instead of ``x``. The sum is rounded
    before it is normalized, as in transformers.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, strides or device, or hidden_size is above 16384.
    """
    device, dtype = x.device, x.dtype
    require_launchable("x", device)
    require("x", x, shape=(None, None), dtypes=FLOAT_DTYPES, device=device, contiguous=False)
    num_rows, hidden_size = x.shape
    if not 0 < hidden_size <= MAX_HIDDEN_SIZE:
        raise ValueError(f"x has shape {list(x.shape)}: hidden_size must be 1 to {MAX_HIDDEN_SIZE}")
    if residual is not None:
        require("residual", residual, shape=x.shape, dtypes=(dtype,), device=device, contiguous=False, is_written=True)
    require("weight", weight, shape=(hidden_size,), dtypes=(dtype, torch.float32), device=device)

    normed = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
    columns = triton.next_power_of_2(hidden_size)
    _norm_kernel[(num_rows,)](
        normed,
        x,
        residual,
        weight,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        SIZE=hidden_size,
        COLUMNS=columns,
        num_warps=min(max(columns // 256, 1), 16),  # eight elements per thread, as long as there are threads
    )
    return normed
