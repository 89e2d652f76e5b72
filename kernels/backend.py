"""Which devices take the Triton kernels, and what these kernels take."""

from __future__ import annotations

import torch

TRITON_BLOCK_SIZES = (16, 32)
"""Slots of a KV block that tree attention has tiles for."""

MAX_TRITON_REQUESTS = 1024
"""Of a batch: one program plans the attention of them all."""


def takes_triton(device: torch.device) -> bool:
    """Whether models, KV and sampling on this device run the Triton kernels; elsewhere PyTorch or compiled C++ does."""
    return device.type == "cuda"
