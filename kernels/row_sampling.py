"""The largest logit, softmax at a temperature and draws: the parts of sampling that look at the whole vocabulary."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from titan.kernels.cpu_library import COMPILED_DTYPES, usable_library

TINY_TEMPERATURE = 1e-3
"""Above it, no logit that a model makes overflows when it is divided."""


def argmax_rows(logits: Tensor) -> Tensor:
    """The first of the most likely tokens of each row.

    Args:
        logits: [n, vocab], any float dtype.

    Returns:
        int64 [n]; -1 where the largest logit is not finite.
    """
    if logits.device.type == "cpu" and logits.dtype in COMPILED_DTYPES and (library := usable_library()) is not None:
        logits = logits.contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        _call(library[f"argmax_{str(logits.dtype).removeprefix('torch.')}"], (logits, tokens), logits.shape)
        return tokens
    best, tokens = logits.max(-1)  # on a CPU five times as fast as argmax in bfloat16
    return tokens.masked_fill(~torch.isfinite(best), -1)


def softmax_at(logits: Tensor, temperatures: Tensor) -> Tensor:
    """The softmax of logits divided by a temperature per row.

    Args:
        logits: [n, vocab], float32, bfloat16 or float16; not changed.
        temperatures: float32 [n], above 0.

    Returns:
        float32 [n, vocab]; NaN in a row whose largest logit is not finite.
    """
    if logits.device.type == "cpu" and logits.dtype in COMPILED_DTYPES and (library := usable_library()) is not None:
        logits, temperatures = logits.contiguous(), temperatures.float().contiguous()
        probs = torch.empty(logits.shape, dtype=torch.float32)
        function = library[f"softmax_{str(logits.dtype).removeprefix('torch.')}"]
        _call(function, (logits, temperatures, probs), logits.shape)
        return probs
    scaled = logits.to(torch.float32, copy=True)
    if (temperatures < TINY_TEMPERATURE).any():
        scaled -= scaled.amax(-1, keepdim=True)  # lest the division leads to infinity minus infinity
    return scaled.div_(temperatures[:, None]).softmax(-1)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: one token per row.

    Args:
        probs: float32 [n, vocab], not necessarily normalised, at least one entry > 0 per row.
        uniform: float64 [n] in (0, 1).

    Returns:
        int64 [n]; a token of probability 0 never comes out.
    """
    if probs.device.type == "cpu" and (library := usable_library()) is not None:
        probs, uniform = probs.float().contiguous(), uniform.double().contiguous()
        tokens = torch.empty(probs.shape[0], dtype=torch.int64)
        _call(library["draw_float32"], (probs, uniform, tokens), probs.shape)
        return tokens
    cdf = probs.double().cumsum(-1)
    total = cdf[:, -1]
    # below the total whatever rounding does, so that the CDF steps over it, which it does at a possible token only
    height = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, height[:, None], right=True)[:, 0]


def _call(function: ctypes._NamedFuncPointer, tensors: tuple[Tensor, ...], shape: torch.Size) -> None:
    """Call a function of the CPU library that takes tensors and the number and the size of their rows."""
    function.restype = None
    function(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), *map(ctypes.c_int64, shape))
