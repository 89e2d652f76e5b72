"""Memory for packed weights, side by side in huge pages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.kernels.cpu.huge_pages import map_pages

CHUNK_BYTES = 64 * 2**20
"""Memory that is mapped at a time. Most weights are too small, or lie too unevenly, to fill huge pages of 2 MiB alone."""

CACHE_LINE_BYTES = 64


class WeightMemory:
    """Hands out memory from chunks, each of which is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk: Callable[[], NDArray[np.uint8] | None] = lambda: None  # a weak reference: tensors alone keep it
        self._num_taken = 0
        self.lock = Lock()
        """Held from taking memory to the last cut of it."""

    def take(self, num_bytes: int) -> Tensor:
        """Return memory that begins with a cache line: uint8 [num_bytes].

        Raises:
            MemoryError: there is not so much.
        """
        size = round_up(num_bytes, CACHE_LINE_BYTES)
        if (chunk := self._chunk()) is None or self._num_taken + size > len(chunk):
            chunk, self._num_taken = map_pages(max(size, CHUNK_BYTES)).numpy(), 0
            self._chunk = weakref.ref(chunk)
        first = self._num_taken
        self._num_taken += size
        return torch.from_numpy(chunk[first : first + num_bytes])

    def cut(self, taken: Tensor, num_bytes: int) -> Tensor:
        """Return the first bytes of what was handed out last; the others are handed out again."""
        self._num_taken += round_up(num_bytes, CACHE_LINE_BYTES) - round_up(len(taken), CACHE_LINE_BYTES)
        return taken[:num_bytes]


def round_up(size: int, step: int) -> int:
    """Return the least multiple of a step that is not below a size."""
    return -(-size // step) * step
