"""The dtypes that models run in, and how options and messages name them."""

from __future__ import annotations

import torch

RUN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the module."""
    return str(dtype).removeprefix("torch.")
