"""RMSNorm in plain PyTorch: Zhang and Sennrich, "Root mean square layer normalization", 2019."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: [..., size].
        weight: broadcast against ``x``.
        eps: added to the mean square.
    """
    size = x.shape[-1]
    # on a CPU F.rms_norm is ten small operations and layer_norm one; (x, -x) has mean 0 and variance mean(x ** 2)
    return F.layer_norm(torch.cat((x, -x), -1), (2 * size,), None, None, eps)[..., :size] * weight
