"""The least time of a CPU's decode pass: its products alone, by the same kernels, and its KV read at the plain speed of memory."""

from __future__ import annotations

from statistics import median
from timeit import repeat

import torch

from titan.bench.step_times import model_of
from titan.engine import Engine


def floor_seconds(engine: Engine, num_requests: int, context_len: float) -> float:
    """Return the least time of a pass in which each of ``num_requests`` decodes one token after ``context_len`` others."""
    model = model_of(engine.runner)
    sizes = model.config.hidden_size, model.config.num_heads * model.config.head_dim, model.config.intermediate_size
    hidden, heads, ffn = (torch.ones(num_requests, size, dtype=model.dtype) for size in sizes)

    def multiply_all() -> None:
        for layer in model.layer_weights:
            weights = layer.qkv_weight, layer.output_weight, layer.gate_up_weight, layer.down_weight
            for x, weight in zip((hidden, heads, hidden, ffn), weights, strict=True):
                model.ops.linear(x, weight, None)
        model.logits(hidden)

    buffer = torch.ones(2**26, dtype=torch.int64)  # far more than caches hold
    per_byte = min(repeat(buffer.sum, number=1, repeat=9)) / buffer.nbytes
    num_kv_bytes = num_requests * context_len * engine.kv.tensors["target"].layout.bytes_per_token
    return median(repeat(multiply_all, number=1, repeat=9)) + num_kv_bytes * per_byte
