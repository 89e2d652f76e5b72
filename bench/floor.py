"""The least time of a CPU's decode pass: its products alone, by the same kernels, and its KV read at the plain speed of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from titan.bench.step_times import model_of
from titan.engine import Engine
from titan.models.decoder import Decoder

NUM_ROUNDS = 9
READ_BYTES = 2**29
"""Memory that is read to measure the speed: far more than caches hold."""


def floor_seconds(engine: Engine, num_requests: int, context_len: float) -> float:
    """Return the least time of a pass in which each of ``num_requests`` decodes one token after ``context_len`` others."""
    model = model_of(engine.runner)
    buffer = torch.ones(READ_BYTES // torch.int64.itemsize, dtype=torch.int64)
    per_byte = min(_times(buffer.sum)) / READ_BYTES
    kv_bytes = num_requests * context_len * model.kv_layout.bytes_per_token
    return statistics.median(_times(lambda: _multiply_all(model, num_requests))) + kv_bytes * per_byte


def _multiply_all(model: Decoder, num_rows: int) -> None:
    config = model.config
    sizes = {"qkv_weight": config.hidden_size, "output_weight": config.num_heads * config.head_dim}
    sizes |= {"gate_up_weight": config.hidden_size, "down_weight": config.intermediate_size}
    rows = {size: torch.ones(num_rows, size, dtype=model.dtype) for size in sizes.values()}
    for weights in model.layer_weights:
        for name, size in sizes.items():
            model.ops.linear(rows[size], getattr(weights, name), None)
    model.logits(rows[config.hidden_size])


def _times(work: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds
