"""Titan under a workload: without batching, in static batches, or with continuous batching, with or without drafts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from titan.bench.profiling import greedy_params
from titan.bench.runs import RequestRun, Run, StepCounts
from titan.bench.workloads import Workload
from titan.core.metrics import ratio
from titan.core.request import Request
from titan.engine import Engine
from titan.frontend import FrontEnd

GPU_SAMPLE_SECONDS = 0.2
"""Time between two samples of a GPU's utilisation."""


def run_continuous(engine: Engine, workload: Workload, concurrency: int, *, use_speculative: bool) -> Run:
    """Run a workload with at most ``concurrency`` requests at once; one that ends makes room for the next.

    A concurrency of 1 is no batching.
    """
    return _drive(engine, workload, workload.output_lens, concurrency, use_speculative=use_speculative, is_static=False)


def run_static(engine: Engine, workload: Workload, batch_size: int) -> Run:
    """Run a workload in batches, each until its longest request has all its tokens; shorter ones run on and are cut.

    This is what a batch that is one tensor does: its rows end together. A request is finished when its batch is.
    """
    batches = [range(first, min(first + batch_size, len(workload))) for first in range(0, len(workload), batch_size)]
    output_lens = [max(workload.output_lens[i] for i in batch) for batch in batches for _ in batch]
    run = _drive(engine, workload, output_lens, batch_size, use_speculative=False, is_static=True)
    ends = [max(run.requests[i].finished_seconds for i in batch) for batch in batches for _ in batch]
    requests = [replace(request, finished_seconds=end) for request, end in zip(run.requests, ends, strict=True)]
    return replace(run, requests=requests)


def _drive(
    engine: Engine, workload: Workload, output_lens: list[int], concurrency: int, *, use_speculative: bool, is_static: bool
) -> Run:
    """Step an idle engine until the workload is done; token counts are those of the workload, whatever was generated."""
    counters = engine.counters
    before = engine.metrics()
    rows_before = counters.num_sequence_steps
    gpu = _GpuMeter(engine.backend.device)
    cpu_start, start = time.process_time(), time.monotonic()
    frontend = FrontEnd(engine)
    requests = [
        frontend.make_request(prompt, greedy_params(output_len, use_speculative=use_speculative))
        for prompt, output_len in zip(workload.prompts, output_lens, strict=True)
    ]
    waiting = deque(requests)
    unfinished: set[Request] = set()
    with _observed_usage(engine) as usage:
        while waiting or unfinished:
            if not (is_static and unfinished):
                while waiting and len(unfinished) < concurrency:
                    unfinished.add(waiting[0])
                    engine.scheduler.add(waiting.popleft())
            unfinished.difference_update(request for request in engine.step() if request.is_finished)
            gpu.sample()
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
    after = engine.metrics()
    num_steps = after.num_steps - before.num_steps
    num_rows = counters.num_sequence_steps - rows_before
    return Run(
        requests=[_finished(request, wanted, start) for request, wanted in zip(requests, workload.output_lens, strict=True)],
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        mean_acceptance_length=ratio(after.num_emitted_tokens - before.num_emitted_tokens, num_rows),
        gpu_use=gpu.mean,
        steps=StepCounts(
            num_steps=num_steps,
            step_seconds=seconds / num_steps,
            mean_batch_size=ratio(num_rows, num_steps),
            mean_kv_usage=sum(usage) / len(usage),
            peak_kv_usage=max(usage),
            proposed_per_depth=_added(before.proposed_per_depth, after.proposed_per_depth),
            accepted_per_depth=_added(before.accepted_per_depth, after.accepted_per_depth),
        ),
    )


def make_idle(engine: Engine) -> None:
    """Abort all requests of an engine, as after a failure."""
    for request in (*engine.scheduler.running, *engine.scheduler.waiting):
        engine.scheduler.abort(request)


@contextmanager
def _observed_usage(engine: Engine) -> Iterator[list[float]]:
    """Collect the share of KV blocks in use in the middle of each step, when those of the step are reserved and none is freed."""
    usage: list[float] = []
    pool = engine.kv.pool

    def observe(*_: object) -> None:
        usage.append(1 - pool.num_free / pool.num_blocks)

    engine.observers.append(observe)
    try:
        yield usage
    finally:
        engine.observers.remove(observe)


def _finished(request: Request, num_tokens: int, start: float) -> RequestRun:
    """What is kept of a request.

    Raises:
        RuntimeError: it was ended before it had its tokens.
    """
    metrics = request.metrics
    if request.num_output_tokens < num_tokens or metrics.first_token_time is None or metrics.finished_time is None:
        raise RuntimeError(f"request {request.request_id} ended early: {request.error or request.finish_reason}")
    tokens = request.output_token_ids[:num_tokens]
    return RequestRun(tokens, metrics.first_token_time - start, metrics.finished_time - start)


def _added(before: list[int], after: list[int]) -> list[int]:
    padded = before + [0] * (len(after) - len(before))
    return [new - old for old, new in zip(padded, after, strict=True)]


class _GpuMeter:
    """Samples how busy a GPU is, as NVML tells; nothing on a CPU or without the package nvidia-ml-py."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_on = device.type == "cuda"
        self._samples: list[int] = []
        self._next = 0.0

    def sample(self) -> None:
        if self._is_on and time.monotonic() >= self._next:
            self._next = time.monotonic() + GPU_SAMPLE_SECONDS
            try:
                self._samples.append(torch.cuda.utilization(self._device))
            except (ModuleNotFoundError, RuntimeError):
                self._is_on = False

    @property
    def mean(self) -> float | None:
        return sum(self._samples) / len(self._samples) / 100 if self._samples else None
