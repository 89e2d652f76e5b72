"""A check whether an error is due to lack of memory, so that less at once may still be possible."""

from __future__ import annotations

import torch

MESSAGES = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")
"""Parts of the messages, in lower case, of plain `RuntimeError`s for lack of memory: PyTorch's CPU allocator raises these."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in MESSAGES)
