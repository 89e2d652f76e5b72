"""Quantised keys and values in plain PyTorch.

Each key and each value of a head is stored as ``round(x / scale)`` with ``scale = max(|x|) / 127``: no number is off by more than
half a scale. A pass reads even the keys and values that it has just written from the cache, so that logits do not depend on how
tokens are split into passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan.core.kv_tensor import kv_planes

LARGEST = 127
"""Largest quantised number."""
LEAST_SIZE = 1e-30
"""A row's largest absolute value counts as this one if it is less: numbers below about 4e-33 then become zeros."""


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows of numbers to integers, to nearest, ties to even.

    Args:
        rows: [..., D], any float dtype.

    Returns:
        int8 [..., D], and their scales, float32 [...]; NaN for a row with a number that is not finite.
    """
    wide = rows.float()
    sizes = wide.abs().amax(-1).clamp(min=LEAST_SIZE)
    numbers = (wide * (LARGEST / sizes)[..., None]).round().nan_to_num(0.0, LARGEST, -LARGEST)
    return numbers.to(torch.int8), torch.where(sizes.isfinite(), sizes / LARGEST, torch.nan)


def dequantise(blocks: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers that quantised blocks stand for: int8 [..., bytes] -> [..., block_size, head_dim]."""
    numbers, scales = kv_planes(blocks, head_dim)
    return (numbers * scales[..., None]).to(dtype)
