"""Which devices take the Triton kernels."""

from __future__ import annotations

import torch


def takes_triton(device: torch.device) -> bool:
    """Whether models, KV and sampling on this device run the Triton kernels; elsewhere PyTorch or compiled C++ does."""
    return device.type == "cuda"
