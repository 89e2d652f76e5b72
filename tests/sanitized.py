"""A plugin of pytest for `make sanitize`: packed weights and KV caches of CPUs come from the allocator, which is watched.

They have memory mapped for them otherwise, beyond whose ends nobody looks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan.kernels.cpu import cache, weight_memory


def allocate(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


cache.map_pages = weight_memory.map_pages = allocate
weight_memory.CHUNK_BYTES = 0  # each weight has its own
