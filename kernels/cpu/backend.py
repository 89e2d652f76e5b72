"""The back end of a CPU with a compiler: C++ where it pays off, PyTorch for the rest."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.kv_tensor import KVTensor
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.library import COMPILED_DTYPES, load_library
from titan.kernels.cpu.runner import TRAITS, make_compiled_runner
from titan.kernels.cpu.sampling import CompiledSampling
from titan.kernels.cpu.trees import CompiledTrees
from titan.kernels.cpu.weights import can_pack, has_tiles
from titan.kernels.interfaces import LayerOps, PassCounts, PassLimits, Runner
from titan.kernels.torch.backend import TorchBackend


class CpuBackend(TorchBackend):
    """See `titan.kernels.interfaces.Backend`.

    Args:
        library: the compiled C++ of this folder.
    """

    name = "compiled C++"

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(torch.device("cpu"), load_library().description)
        sampling = CompiledSampling(library)
        self._library = library
        self.sampling, self.trees = sampling, CompiledTrees(library, sampling, self.upload)

    def layer_ops(self, dtype: torch.dtype, traits: frozenset[str]) -> LayerOps:
        if dtype in COMPILED_DTYPES and traits <= TRAITS:
            return CompiledOps(self._library, dtype)
        return super().layer_ops(dtype, traits)

    def prepare(self, model: Any, kv: KVTensor, limits: PassLimits, counts: PassCounts) -> Runner:
        if model.dtype in COMPILED_DTYPES and (runner := make_compiled_runner(self, self._library, model, kv)) is not None:
            return runner
        return super().prepare(model, kv, limits, counts)

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in tensors]

    def facts(self) -> dict[str, str]:
        packed = {
            f"linear, {str(dtype).removeprefix('torch.')}": "oneDNN, packed weights"
            if can_pack(dtype)
            else "torch.nn.functional.linear"
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }
        if has_tiles():
            packed["linear, float32"] = f"AMX where bfloat16 holds the weight exactly, else {packed['linear, float32']}"
        return super().facts() | packed
