"""The largest pass of an engine, run once before the KV cache is allocated if a back end wants to measure its memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from titan.core.batch import QueryRow, build_batch
from titan.core.kv_tensor import KVTensor
from titan.core.options import EngineConfig
from titan.core.out_of_memory import is_out_of_memory
from titan.core.proposals import placeholder_chains
from titan.core.sampling_params import SamplingParams
from titan.core.sampling_rows import SamplingRows
from titan.kernels.interfaces import Backend, Model, PassCounts, PassLimits
from titan.verify.transforms import TransformedRows, transform_logits

ALL_PENALTIES = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1)


def run_largest_pass(backend: Backend, model: Model, config: EngineConfig, limits: PassLimits, max_model_len: int) -> None:
    """Run the largest pass: the maximum tokens of a step spread over the maximum requests, each with logits of a whole tree.

    Then run the heaviest operations on its logits: penalties for all of them, and as many probabilities as a draft samples its
    tokens from. Block tables have their maximum length, which decides how much memory the parts of split contexts get. A draft's
    passes are assumed to need no more.

    Raises:
        ValueError: the device has too little memory.
    """
    try:
        _run(backend, model, config, limits, max_model_len)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"max_num_batched_tokens={config.schedule.max_num_batched_tokens} and max_batch_size={config.schedule.max_batch_size} "
            f"need more memory than {backend.device} has: lower them"
        ) from error


def _run(backend: Backend, model: Model, config: EngineConfig, limits: PassLimits, max_model_len: int) -> None:
    num_requests, block_size = config.schedule.max_batch_size, config.memory.block_size
    num_tokens = min(config.schedule.max_num_batched_tokens // num_requests, max_model_len)
    num_nodes = min(limits.query_len - 1, num_tokens - 1)
    row = QueryRow([0] * -(-max_model_len // block_size), 0, [0] * (num_tokens - num_nodes))
    trees = placeholder_chains([num_nodes] * num_requests, backend.upload, backend.device)
    kv = KVTensor(model.kv_layout.stored_as(config.memory.kv_cache_dtype), 1, block_size, backend.device)
    with torch.inference_mode():
        eager = limits._replace(query_len=0)  # a graph would keep memory of its own
        runner = backend.prepare(model, kv, eager, PassCounts())
        logits = runner.forward(build_batch([row] * num_requests, trees, block_size=block_size))
        _use_logits(backend, logits, num_requests)


def _use_logits(backend: Backend, logits: Tensor, num_requests: int) -> None:
    """Penalise logits, [L, vocab], divided evenly among the requests, and sample two children of each row: one takes less."""
    num_rows = len(logits)
    of_requests = np.array_split(np.arange(num_rows), num_requests)
    token = np.zeros(1, np.int64)
    penalized = [TransformedRows(ALL_PENALTIES, [], token, token, {row: [] for row in each.tolist()}) for each in of_requests]
    scores = transform_logits(logits, penalized, {}, backend.upload).logits
    rows = SamplingRows.of([(ALL_PENALTIES, 0, 0)] * num_rows)
    [places] = backend.upload([np.arange(num_rows)])
    probs, children = torch.empty_like(scores), torch.empty((num_rows, 2), dtype=torch.int64, device=scores.device)
    backend.sampling.sample_children(scores, rows, np.full(num_rows, 2), places, probs, children)
