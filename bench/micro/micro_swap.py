"""What preemption costs a request of 1,024 tokens: its KV is copied out and in again, or computed again; and a plain copy of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest
import torch

from titan.bench.engine_run import make_requests
from titan.bench.prompts import random_prompts
from titan.bench.workloads import Lengths, take_workload
from titan.core.options import EngineConfig
from titan.core.request import Request
from titan.engine import Engine
from titan.models.files import ModelFiles, resolve_model
from titan.models.loader import open_model

NUM_TOKENS, NUM_ROUNDS = 1024, 10
pytestmark = pytest.mark.benchmark(group="kernel")


def make_running(pair: tuple[str, str], seed: int) -> tuple[Engine, Request]:
    """Return a pair with a request whose prompt is in both caches."""
    config = EngineConfig.of(
        speculation="fixed",
        max_draft_tokens=1,
        prefill_chunk_size=2 * NUM_TOKENS,
        enable_prefix_caching=False,
        preemption_mode="swap",
        swap_space=2**28,
    )
    engine = Engine(config, open_model(ModelFiles(resolve_model(pair[0], "target"))), pair[1])
    prompts = random_prompts(Lengths(NUM_TOKENS, NUM_TOKENS), engine.model_config.vocab_size, seed)
    [request] = make_requests(engine, take_workload(prompts, 1, repeat(4 * NUM_ROUNDS)), temperature=0.0)
    engine.scheduler.add(request)
    engine.step()
    return engine, request


def test_swap(measure: Callable[..., Any], swap_pair: tuple[str, str], seed: int) -> None:
    """Out of both caches and in again."""
    engine, request = make_running(swap_pair, seed)

    def run() -> None:
        assert engine.kv.swap_out(request)
        engine.kv.admit(request)
        engine.kv.await_copies()

    measure(run)


def test_copy_of_swapped_bytes(measure: Callable[..., Any], swap_pair: tuple[str, str], seed: int) -> None:
    """Copy as many bytes as a swap does, from one piece of memory to another and back."""
    engine, request = make_running(swap_pair, seed)
    num_bytes = len(request.block_ids) * engine.kv.bytes_per_block
    here = torch.ones(num_bytes, dtype=torch.uint8, device=engine.backend.device)
    away = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=not engine.backend.is_host)

    def run() -> None:
        away.copy_(here, non_blocking=True)
        here.copy_(away, non_blocking=True)

    measure(run)


def test_recompute(benchmark: Any, swap_pair: tuple[str, str], seed: int) -> None:
    """A step that computes a preempted request again, prompt and all."""
    engine, request = make_running(swap_pair, seed)
    benchmark.pedantic(engine.step, setup=lambda: engine.scheduler.queues.preempt(request), rounds=NUM_ROUNDS)
