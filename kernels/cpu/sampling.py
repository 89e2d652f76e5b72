"""Distributions, samples and the most likely tokens in the C++ of this folder; see `titan.kernels.interfaces.SamplingOps`."""

from __future__ import annotations

import torch
from torch import Tensor

from titan.core.arrays import Ints
from titan.core.sampling_rows import OPTIONS, SamplingRows
from titan.kernels.cpu.compiled import COMPILED_DTYPES, INT, POINTER, CompiledKernels, address

ARGUMENTS = {
    "argmax": (POINTER, POINTER, INT, INT),
    "distributions": (*[POINTER] * 3, INT, INT),
    "top_candidates": (*[POINTER] * 4, *[INT] * 3),
}
"""Argument types of the library's functions that exist for every dtype."""


class CompiledSampling:
    """See `titan.kernels.interfaces.SamplingOps`; dtypes that the library does not support are converted to float32.

    Args:
        kernels: the compiled C++ of this folder.
    """

    def __init__(self, kernels: CompiledKernels) -> None:
        self._functions = {
            (name, dtype): kernels.function(name, dtype, *types) for name, types in ARGUMENTS.items() for dtype in COMPILED_DTYPES
        }
        self._sample_children = kernels.function("sample_children", None, *[POINTER] * 5, *[INT] * 3)

    def argmax(self, logits: Tensor) -> Tensor:
        logits = readable(logits)
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._call("argmax", logits, tokens, *logits.shape)
        return tokens

    def top_candidates(self, logits: Tensor, count: int, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        logits = readable(logits)
        tokens = torch.empty((logits.shape[0], count), dtype=torch.int64)
        logprobs = torch.empty((logits.shape[0], count), dtype=torch.float32)
        self._call("top_candidates", logits, temperatures.contiguous(), tokens, logprobs, *logits.shape, count)
        return tokens, logprobs

    def probs(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        logits = readable(logits)
        probs = torch.empty(logits.shape, dtype=torch.float32)
        self._call("distributions", logits, address(rows.options, OPTIONS), probs, *logits.shape)
        return probs

    def sample_children(
        self, logits: Tensor, rows: SamplingRows, num_children: Ints, places: Tensor, probs: Tensor, children: Tensor
    ) -> None:
        written = self.probs(logits, rows)
        probs.index_copy_(0, places, written)
        arguments = written, torch.from_numpy(num_children), places, children, *written.shape, children.shape[1]
        self._sample_children(address(rows.options, OPTIONS), *map(_as_argument, arguments))

    def _call(self, name: str, values: Tensor, *arguments: Tensor | int) -> None:
        """Call the library's function for the dtype of ``values`` with tensors and numbers."""
        self._functions[name, values.dtype](*map(_as_argument, (values, *arguments)))


def readable(logits: Tensor) -> Tensor:
    """Return logits as the library reads them: contiguous, of a dtype it supports."""
    return (logits if logits.dtype in COMPILED_DTYPES else logits.float()).contiguous()


def _as_argument(value: Tensor | int) -> int:
    return value if isinstance(value, int) else value.data_ptr()
