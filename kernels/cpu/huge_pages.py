"""Memory in huge pages, as far as Linux has them, for what passes read: the processor looks up fewer addresses meanwhile."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def map_pages(num_bytes: int) -> Tensor:
    """Return memory of its own, zeros that take none before they are written: uint8 [num_bytes], at least 1.

    Raises:
        MemoryError: there is too little.
    """
    try:
        pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be mapped: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
