"""The least time of a CPU's decode pass: its products alone, by the same kernels, and its KV read at the plain speed of memory."""

from __future__ import annotations

from statistics import median
from timeit import repeat

import torch

from titan.bench.step_times import model_of
from titan.engine import Engine

READ_BYTES = 2**29  # far more than caches hold


def floor_seconds(engine: Engine, num_requests: int, context_len: float) -> float:
    """Return the least time of a pass in which each of ``num_requests`` decodes one token after ``context_len`` others."""
    model = model_of(engine.runner)
    hidden, heads, ffn = (
        torch.ones(num_requests, size, dtype=model.dtype)
        for size in (model.config.hidden_size, model.config.num_heads * model.config.head_dim, model.config.intermediate_size)
    )
    layers = [(w.qkv_weight, w.output_weight, w.gate_up_weight, w.down_weight) for w in model.layer_weights]

    def multiply_all() -> None:
        for layer in layers:
            for x, weight in zip((hidden, heads, hidden, ffn), layer, strict=True):
                model.ops.linear(x, weight, None)
        model.logits(hidden)

    read_seconds = min(repeat(torch.ones(READ_BYTES // 8, dtype=torch.int64).sum, number=1, repeat=9))
    num_kv_bytes = num_requests * context_len * model.kv_layout.bytes_per_token
    return median(repeat(multiply_all, number=1, repeat=9)) + num_kv_bytes * read_seconds / READ_BYTES
