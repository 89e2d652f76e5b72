"""The back end in plain PyTorch: the shortest correct one, the reference for the others, and their fallback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from threading import RLock, get_ident
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.host_memory import host_memory
from titan.core.kv_tensor import KVTensor
from titan.kernels.interfaces import CacheOps, KVMemory, LayerOps, PassCounts, PassLimits, Runner, SamplingOps, TreeOps, WarmUp
from titan.kernels.torch.cache import TorchCache
from titan.kernels.torch.layers import TorchOps
from titan.kernels.torch.runner import TorchRunner
from titan.kernels.torch.sampling import TorchSampling
from titan.kernels.torch.trees import TorchTrees

KV_MEMORY_SHARE = 0.4
"""Share of the host's free memory that the KV caches take at most, unless their size is given."""


class _Context(NamedTuple):
    """An open context of `using_threads`."""

    thread: int  # identifier of the Python thread
    before: int  # number of PyTorch's threads to restore
    num_threads: int  # number of PyTorch's threads inside


_open_contexts: list[_Context] = []
_lock = RLock()


def torch_threads() -> int:
    """Return PyTorch's number of threads outside of `using_threads`; a new Python thread would see the number inside of it."""
    with _lock:
        return _open_contexts[0].before if _open_contexts else torch.get_num_threads()


@contextmanager
def using_threads(num_threads: int) -> Iterator[None]:
    """Let PyTorch use this many threads for the computations of this Python thread.

    PyTorch cannot set this for one Python thread alone: another one whose first parallel operation runs meanwhile keeps the number.
    """
    own, before = get_ident(), torch.get_num_threads()
    with _lock:
        is_inner = any(each.thread == own for each in _open_contexts)
        if not is_inner and any(each.num_threads == before for each in _open_contexts):
            before = torch_threads()  # the number seen here is another thread's
        context = _Context(own, before, num_threads)
    try:
        with _lock:
            _open_contexts.append(context)
        _set_threads(num_threads)
        yield
    finally:
        try:
            _set_threads(before)
        finally:
            with _lock:
                if context in _open_contexts:  # else an interrupt came first
                    _open_contexts.remove(context)


def host_by_default(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return ``context`` with the host as PyTorch's default device, even if the caller has set another one."""
    return context if torch.empty(0).is_cpu else _on_the_host(context)


@contextmanager
def _on_the_host(context: AbstractContextManager[Any]) -> Iterator[None]:
    with torch.device("cpu"), context:
        yield


def _set_threads(num_threads: int) -> None:
    if torch.get_num_threads() != num_threads:  # a call has another effect: MKL then never uses fewer
        torch.set_num_threads(num_threads)


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device; on a CPU, the tensors share their memory."""
    return [torch.from_numpy(array).to(device) for array in arrays]


class TorchBackend:
    """See `titan.kernels.interfaces.Backend`.

    Args:
        device: any that PyTorch supports; but `memory_for_kv` measures the host's memory, and `mark` the host's clock.
        description: of the kernels, for users; says why faster ones are missing if they could be expected.
        num_threads: threads of PyTorch while an engine with this back end runs; ``None``: as many as otherwise.
    """

    name = "PyTorch"

    def __init__(self, device: torch.device, description: str = "PyTorch", num_threads: int | None = None) -> None:
        self.device = device
        self.is_host = device.type == "cpu"
        self.num_threads = torch_threads() if num_threads is None else num_threads
        self._description = description
        self.upload = partial(upload, device=device)  # no method: the cycle would keep this back end until a collection
        self.cache: CacheOps = TorchCache(self.upload)
        self.sampling: SamplingOps = TorchSampling(self.upload)
        self.trees: TreeOps = TorchTrees(self.sampling, self.upload)

    def active(self) -> AbstractContextManager[None]:
        return host_by_default(using_threads(self.num_threads))

    def check_limits(self, *, block_size: int, max_batch_size: int) -> None:
        """Accept all limits."""

    def supports(self, dtype: torch.dtype) -> bool:
        if dtype == torch.bfloat16:
            return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]
        return dtype == torch.float32

    def layer_ops(self, dtype: torch.dtype, traits: frozenset[str]) -> LayerOps:
        return TorchOps(self.device)

    def prepare(self, model: Any, kv: KVTensor, limits: PassLimits, counts: PassCounts) -> Runner:
        return TorchRunner(self, model, kv)

    def free_memory(self) -> int:
        return host_memory().available

    def utilization(self) -> float | None:
        return None

    def memory_for_kv(self, run_largest_passes: Callable[[], None]) -> KVMemory:
        available, total = host_memory()
        return KVMemory(total, available, int(available * KV_MEMORY_SHARE))

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        return [tensor.cpu().numpy() for tensor in tensors]

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]

    def warm_up(self, vocab_size: int, dtype: torch.dtype) -> Sequence[WarmUp]:
        return ()

    def facts(self) -> dict[str, str]:
        return {"device": f"{self.device.type}, {self.num_threads} threads", "kernels": self._description}
