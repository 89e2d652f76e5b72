"""The back end of a CPU with a compiler: C++ where it pays off, PyTorch for the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.dtypes import dtype_name
from titan.core.kv_tensor import KVTensor
from titan.kernels.cpu.cache import HostCache
from titan.kernels.cpu.compiled import COMPILED_DTYPES, CompiledKernels
from titan.kernels.cpu.layers import CompiledOps
from titan.kernels.cpu.runner import OP_TRAITS, CompiledRunner, is_one_call
from titan.kernels.cpu.sampling import CompiledSampling
from titan.kernels.cpu.trees import CompiledTrees
from titan.kernels.interfaces import LayerOps, PassCounts, PassLimits, Runner
from titan.kernels.torch.backend import TorchBackend, host_by_default, using_threads

LOG = logging.getLogger(__name__)


class CpuBackend(TorchBackend):
    """See `titan.kernels.interfaces.Backend`.

    Args:
        kernels: the compiled C++ of this folder.
    """

    name = "compiled C++"

    def __init__(self, kernels: CompiledKernels) -> None:
        super().__init__(torch.device("cpu"), kernels.description, kernels.num_threads)
        self._torch_models: WeakSet[Any] = WeakSet()  # models whose layers PyTorch runs
        sampling = CompiledSampling(kernels)
        self._kernels = kernels
        self.sampling = sampling
        self.trees = CompiledTrees(kernels, sampling, self.upload)
        self.cache = HostCache(self.upload)

    def active(self) -> AbstractContextManager[None]:
        # else PyTorch's threads would take cores from the kernels' own; what is left to it beside them is on one thread, also
        # the products of absorbed latents, and of linear layers that stay its own, as those of quantised checkpoints
        return host_by_default(using_threads(self.num_threads if self._torch_models else 1))

    def layer_ops(self, dtype: torch.dtype, traits: frozenset[str]) -> LayerOps:
        return CompiledOps(self._kernels, dtype) if _has_kernels(dtype, traits) else super().layer_ops(dtype, traits)

    def prepare(self, model: Any, kv: KVTensor, limits: PassLimits, counts: PassCounts) -> Runner:
        if not _has_kernels(model.dtype, model.config.traits):
            if model.dtype not in {*COMPILED_DTYPES, *(each.dtype for each in self._torch_models)}:  # once, also with a draft
                name = dtype_name(model.dtype)
                LOG.warning("nothing is compiled for models in %s: many times slower than float32 and bfloat16", name)
            self._torch_models.add(model)
        if is_one_call(model, kv):
            return CompiledRunner(self, self._kernels, model, kv)
        return super().prepare(model, kv, limits, counts)

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in tensors]

    def facts(self) -> dict[str, str]:
        return super().facts() | {"library": str(self._kernels.path or "not kept")}


def _has_kernels(dtype: torch.dtype, traits: frozenset[str]) -> bool:
    """Whether linear layers and attention of such a model are in C++."""
    return dtype in COMPILED_DTYPES and traits <= OP_TRAITS
