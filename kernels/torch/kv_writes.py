"""Writing of new keys and values to the slots of the paged cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.kernels.torch.quantised_kv import write_quantised


def write_kv(kv_layer: Tensor, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
    """Write keys and values to their slots; see `titan.kernels.interfaces.LayerOps.write_kv`."""
    planes = [keys] if values is None else [keys, F.pad(values, (0, keys.shape[-1] - values.shape[-1]))]
    rows = torch.stack(planes).transpose(1, 2)  # [num_planes, K, T, D]
    if kv_layer.dtype == torch.int8:
        write_quantised(kv_layer, slots, rows)
    else:
        block_size = kv_layer.shape[3]
        kv_layer[:, :, slots // block_size, slots % block_size] = rows
