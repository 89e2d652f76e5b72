"""Distributions, samples and the most likely tokens in the C++ of this folder; see `titan.kernels.interfaces.SamplingOps`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.sampling_rows import SamplingRows
from titan.kernels.cpu.compiled import COMPILED_DTYPES, CompiledKernels, address
from titan.kernels.torch.sampling import distributions

_POINTER = ctypes.c_void_p


class CompiledSampling:
    """See `titan.kernels.interfaces.SamplingOps`; dtypes that the library does not support are converted to float32.

    Args:
        kernels: the compiled C++ of this folder.
    """

    def __init__(self, kernels: CompiledKernels) -> None:
        self._kernels = kernels

    def argmax(self, logits: Tensor) -> Tensor:
        logits = readable(logits)
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._call("argmax", logits, tokens, *logits.shape)
        return tokens

    def top_candidates(self, logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logits = readable(logits)
        tokens = torch.empty((logits.shape[0], count), dtype=torch.int64)
        logprobs = torch.empty((logits.shape[0], count), dtype=torch.float32)
        self._call("best_children", logits, temperatures.contiguous(), tokens, logprobs, *logits.shape, count)
        return tokens, logprobs

    def probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return distributions(logits, rows, self.softmax)

    def softmax(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """See `titan.kernels.torch.sampling.softmax_at`."""
        logits = readable(logits)
        probs = torch.empty(logits.shape, dtype=torch.float32)
        self._call("softmax", logits, temperatures.contiguous(), probs, *logits.shape)
        return probs

    def sample_children(
        self, logits: Tensor, rows: SamplingRows, num_children: Ints, places: Tensor, probs: Tensor, children: Tensor
    ) -> None:
        written = self.probs(logits, rows)
        probs.index_copy_(0, places, written)
        arguments = written, torch.from_numpy(num_children), places, children, *written.shape, children.shape[1]
        types = [_POINTER, *map(_type, arguments)]
        self._kernels.function("draw_children", None, *types)(address(rows.options), *map(_as_argument, arguments))

    def _call(self, name: str, values: Tensor, *arguments: Tensor | int) -> None:
        """Call the library's function for the dtype of ``values`` with tensors and numbers."""
        arguments = values, *arguments
        self._kernels.function(name, values.dtype, *map(_type, arguments))(*map(_as_argument, arguments))


def readable(logits: Tensor) -> Tensor:
    """Return logits as the library reads them: contiguous, of a dtype it supports."""
    return (logits if logits.dtype in COMPILED_DTYPES else logits.float()).contiguous()


def _type(value: Tensor | int) -> Any:
    return ctypes.c_int64 if isinstance(value, int) else _POINTER


def _as_argument(value: Tensor | int) -> int:
    return value if isinstance(value, int) else value.data_ptr()
