"""How much memory a device has left for the KV cache, measured by running the largest passes before there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from titan.core.options import EngineConfig
from titan.core.sampling_params import SamplingParams
from titan.core.trees import DraftTree
from titan.execute.batch import Segment, build_batch
from titan.execute.model_runner import make_runner
from titan.kernels.torch.sampling import draw
from titan.kernels.triton.cuda_graphs import PassCounts, PassLimits
from titan.memory.kv_cache import allocate_kv
from titan.models.config import ModelConfig
from titan.models.decoder import Decoder
from titan.sample.logits import TransformedRows, transform_logits

CPU = torch.device("cpu")

ALL_PENALTIES = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)


class MemoryProbe(Protocol):
    """Memory of a device."""

    def free(self) -> int:
        """Bytes that could be allocated now."""

    def peak(self, function: Callable[[], None]) -> int:
        """Bytes that a function takes at most, beyond those taken before."""


class CudaMemory:
    """Memory of a CUDA device, what PyTorch holds in reserve for later allocations counted as free.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak(self, function: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        function()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def memory_for_kv(
    target: Decoder, draft: ModelConfig | None, config: EngineConfig, limits: PassLimits, max_model_len: int, probe: MemoryProbe
) -> int:
    """Free bytes that the passes of an engine leave.

    The largest pass of each model runs once, and the heaviest things that are done with its logits: penalties for all of them, and
    as many probabilities as a draft draws its tokens from. A draft model, which is not loaded yet, runs with weights of 0; what it
    takes is the same, its weights included.

    Args:
        target: loaded.
        draft: config of the draft model, if there is one.
        config: of the engine.
        limits: of the small passes.
        max_model_len: most tokens of a request.
        probe: of the target's device.

    Raises:
        ValueError: not even one pass fits.
    """

    def run_all() -> None:
        models = [target]
        if draft is not None:
            models.append(_blank_model(draft, target))
        for model in models:
            _run_largest_pass(model, config, limits, min(max_model_len, model.max_positions))

    try:
        peak = probe.peak(run_all)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"max_num_batched_tokens={config.schedule.max_num_batched_tokens} and max_batch_size={config.schedule.max_batch_size} "
            f"need more memory than {target.device} has: lower them"
        ) from error
    return max(0, probe.free() - peak)  # free now: what was loaded for the first pass stays


def _blank_model(config: ModelConfig, target: Decoder) -> Decoder:
    """A model of that config whose weights are 0, where and as the target is."""
    model = Decoder(config, dtype=target.dtype, device=target.device)
    for weight in model.parameters():
        weight.zero_()
    model.prepare()
    return model


def _run_largest_pass(model: Decoder, config: EngineConfig, limits: PassLimits, max_len: int) -> None:
    """As many tokens as a step may have, spread over as many requests, each of which wants the logits of a whole tree.

    Block tables are as long as any can be: their length decides how much room the parts of split contexts get.
    """
    num_requests, block_size = config.schedule.max_batch_size, config.memory.block_size
    num_tokens = min(config.schedule.max_num_batched_tokens // num_requests, max_len)
    tree = DraftTree.chain([0] * min(limits.query_len - 1, num_tokens - 1))
    block_ids = [0] * -(-max_len // block_size)
    segment = Segment(block_ids, 0, [0] * (num_tokens - tree.num_nodes), tree, root_position=num_tokens - tree.num_nodes - 1)
    model_config = model.config
    kv = allocate_kv(
        model_config.num_layers, 1, model_config.num_kv_heads, block_size, model_config.head_dim, model.dtype, model.device
    )
    with torch.inference_mode():
        runner = make_runner(model, kv, limits, PassCounts())
        logits = runner.forward(build_batch([segment] * num_requests, block_size=block_size))
        _use_logits(logits, num_requests)


def _use_logits(logits: Tensor, num_requests: int) -> None:
    """The heaviest things that are done with logits, [L, vocab], of which each request has as many."""
    rows = torch.arange(len(logits)).chunk(num_requests)
    penalized = [TransformedRows(ALL_PENALTIES, [0], [0], {row: [] for row in each.tolist()}) for each in rows]
    scores = transform_logits(logits, penalized, ()).logits
    # verification draws from logits by kernels that need no room: these probabilities stand for q, of no more rows than there are
    draw(scores.softmax(-1), torch.full((len(scores),), 0.5, dtype=torch.float64, device=scores.device))
