"""The back end of a CUDA device: Triton kernels, CUDA graphs, and no synchronization in a step before its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from titan.core.kv_tensor import KVTensor
from titan.core.limits import MAX_NODES
from titan.kernels.interfaces import CacheOps, KVMemory, LayerOps, PassCounts, PassLimits, Runner, SamplingOps, TreeOps, WarmUp
from titan.kernels.torch.backend import host_by_default
from titan.kernels.torch.layers import TorchOps
from titan.kernels.torch.runner import TorchRunner
from titan.kernels.triton.attention_plan import BLOCK_SIZES, MAX_REQUESTS
from titan.kernels.triton.cache import CudaCache
from titan.kernels.triton.cuda_graphs import Capture, cuda_graph_capture
from titan.kernels.triton.layers import TritonOps
from titan.kernels.triton.pass_inputs import BlockTables
from titan.kernels.triton.runner import TritonRunner
from titan.kernels.triton.sampling import TritonSampling
from titan.kernels.triton.streams import WHOLE_DEVICE
from titan.kernels.triton.tree_select import CANDIDATES
from titan.kernels.triton.trees import TritonTrees
from titan.kernels.triton.upload import download, upload
from titan.kernels.triton.warm_up import verify_idle_trees

KV_MEMORY_SHARE = 0.9
"""Share of the device memory left by the largest passes that the KV caches take, unless their size is given; the rest is for
graphs, and for later drafts."""

ATTENTION_TRAITS = frozenset({"sliding_window", "chunked_window", "soft_cap", "sinks", "narrow_values", "latent_kv"})
"""Traits of layers that the attention supports; see `titan.core.attention.LayerSpec.traits`."""

DECODER_TRAITS = frozenset(
    {"rms_norm", "pre_norm", "post_norm", "qk_norm", "row_norm", "silu", "gelu_tanh", "rope", "rope_per_layer", "tied_embedding"}
    | {"attention_bias", "output_bias", "mlp_bias"}
)
"""Traits of Titan's own decoder that the other operations of a layer support; see `titan.models.config.ModelConfig.traits`."""

TRAITS = ATTENTION_TRAITS | DECODER_TRAITS | {"transformers"}
"""Traits of models that run with these operations, and in CUDA graphs; modules of transformers need the attention alone."""


class TritonBackend:
    """See `titan.kernels.interfaces.Backend`.

    Args:
        device: the device, with its index.
        capture: makes a `Capture`, one for each model.
    """

    name = "Triton"
    is_host = False

    def __init__(self, device: torch.device, capture: Callable[[], Capture] = cuda_graph_capture) -> None:
        self.device = device
        self._capture = capture
        self._tables: dict[tuple[int, int], BlockTables] = {}  # by shape: those of target and draft are the same
        self.upload = partial(upload, device=device)  # no method: the cycle would keep this back end until a collection
        sampling = TritonSampling(self.upload)
        self.cache: CacheOps = CudaCache(self.upload, device)
        self.sampling: SamplingOps = sampling
        self.trees: TreeOps = TritonTrees(device, self.upload, sampling)

    def active(self) -> AbstractContextManager[None]:
        # the caller, another engine or another thread, which runs the next step, may have another device and stream
        return host_by_default(torch.cuda.stream(torch.cuda.default_stream(self.device)))

    def check_limits(self, *, block_size: int, max_batch_size: int) -> None:
        if block_size not in BLOCK_SIZES:
            allowed = " or ".join(map(str, BLOCK_SIZES))
            raise ValueError(f"block_size={block_size} is not supported on {self.device}: it must be {allowed}")
        if max_batch_size > MAX_REQUESTS:
            raise ValueError(
                f"max_batch_size={max_batch_size} is not supported on {self.device}: it must be at most {MAX_REQUESTS}"
            )

    def supports(self, dtype: torch.dtype) -> bool:
        return True

    def layer_ops(self, dtype: torch.dtype, traits: frozenset[str]) -> LayerOps:
        return TritonOps(self.device, dtype) if traits <= TRAITS else TorchOps(self.device)

    def prepare(self, model: Any, kv: KVTensor, limits: PassLimits, counts: PassCounts) -> Runner:
        if not model.config.traits <= TRAITS:
            return TorchRunner(self, model, kv)
        num_blocks = limits.num_blocks + -(-MAX_NODES // kv.block_size)  # a beam writes more nodes than a request may keep
        shape = limits.num_requests, num_blocks
        if shape not in self._tables:
            self._tables[shape] = BlockTables(*shape, self.device)
        return TritonRunner(self, model, kv, limits, self._tables[shape], counts, self._capture())

    def free_memory(self) -> int:
        with WHOLE_DEVICE:
            torch.cuda.empty_cache()  # what PyTorch keeps for later, and what graphs that are gone had
        return torch.cuda.mem_get_info(self.device)[0]

    def utilization(self) -> float | None:
        try:
            return torch.cuda.utilization(self.device) / 100
        except Exception:  # noqa: BLE001 - the library that asks may be missing, or the device may not tell
            return None

    def memory_for_kv(self, run_largest_passes: Callable[[], None]) -> KVMemory:
        with WHOLE_DEVICE:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run_largest_passes()
        with WHOLE_DEVICE:
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_reserved(self.device) - before
            torch.cuda.empty_cache()
        # free memory now: what was loaded for the first pass stays
        free, total = torch.cuda.mem_get_info(self.device)
        return KVMemory(total, free - peak, int(max(0, free - peak) * KV_MEMORY_SHARE))

    def download(self, tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
        return download(tensors)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, marks: Sequence[Any]) -> list[float]:
        marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def warm_up(self, vocab_size: int, dtype: torch.dtype) -> Sequence[WarmUp]:
        few, many, _ = CANDIDATES  # the third is more than any drafter here selects from
        dtypes = {dtype, torch.float32}  # the second where a request's options change logits
        return [partial(verify_idle_trees, self, vocab_size, *each) for each in product(dtypes, (few, many))]

    def facts(self) -> dict[str, str]:
        return {"device": torch.cuda.get_device_name(self.device), "kernels": "Triton"}
