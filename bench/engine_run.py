"""Titan under a workload: requests that are all there or arrive at their own times, batched continuously or not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from titan import SamplingParams
from titan.bench.runs import RequestRun, Run
from titan.bench.step_times import step_times
from titan.bench.workloads import Workload
from titan.core.metrics import ratio
from titan.core.request import Request
from titan.engine import Engine
from titan.frontend import FrontEnd

GPU_SAMPLE_SECONDS = 0.2
"""Time between two samples of a GPU's utilisation."""


class Clock(Protocol):
    """Seconds that pass, and waiting for them; the module `time` is one."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


def make_requests(engine: Engine, workload: Workload, *, use_speculative: bool = True, temperature: float = 0.0) -> list[Request]:
    """The requests of a workload, which ignore the end of sequence; request i has seed i."""
    frontend = FrontEnd(engine)
    return [
        frontend.make_request(
            prompt,
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=output_len, ignore_eos=True, use_speculative=use_speculative
            ),
        )
        for i, (prompt, output_len) in enumerate(zip(workload.prompts, workload.output_lens, strict=True))
    ]


def run_workload(
    engine: Engine,
    workload: Workload,
    concurrency: int | None = None,
    *,
    use_speculative: bool = True,
    temperature: float = 0.0,
    is_static: bool = False,
    clock: Clock = time,
) -> Run:
    """Step an idle engine until a workload is done.

    A request that arrives during a step waits for its end, which its latency counts.

    Args:
        engine: takes as many waiting requests as there are.
        workload: each request is added when its time has come.
        concurrency: most requests at once; 1 is no batching, ``None`` leaves it to the engine.
        use_speculative: whether the engine may draft.
        temperature: of the requests.
        is_static: the next requests are added when all of those before are finished.
        clock: of the arrivals and of what is measured.

    Raises:
        RuntimeError: a request was ended before it had its tokens.
    """
    requests = make_requests(engine, workload, use_speculative=use_speculative, temperature=temperature)
    waiting = deque(zip(workload.arrivals, requests, strict=True))
    unfinished: set[Request] = set()
    first_tokens: dict[Request, float] = {}
    finished: dict[Request, float] = {}
    before, num_rows = engine.metrics(), engine.counters.num_sequence_steps
    gpu = _GpuMeter(engine.backend.device)
    cpu_start, start = time.process_time(), clock.monotonic()
    with _observed_usage(engine) as usage:
        while waiting or unfinished:
            now = clock.monotonic() - start
            if waiting and not unfinished and waiting[0][0] > now:
                clock.sleep(waiting[0][0] - now)
                now = waiting[0][0]  # whatever rounding says
            if not (is_static and unfinished):
                while waiting and waiting[0][0] <= now and len(unfinished) < (concurrency or len(requests)):
                    unfinished.add(waiting[0][1])
                    engine.scheduler.add(waiting.popleft()[1])
            changed = engine.step()
            now = clock.monotonic() - start
            for request in changed:
                first_tokens.setdefault(request, now)
                if request.is_finished:
                    _check(request)
                    finished[request] = now
                    unfinished.remove(request)
            gpu.sample()
    seconds, cpu_seconds = clock.monotonic() - start, time.process_time() - cpu_start
    after, num_rows = engine.metrics(), engine.counters.num_sequence_steps - num_rows
    num_steps = after.num_steps - before.num_steps
    runs = [
        RequestRun(request.output_token_ids, finished[request], first_tokens[request], arrival)
        for arrival, request in zip(workload.arrivals, requests, strict=True)
    ]
    return Run(
        runs,
        seconds - workload.arrivals[0],
        {
            "tokens/step": ratio(after.num_emitted_tokens - before.num_emitted_tokens, num_rows),
            "batch": ratio(num_rows, num_steps),
            "ms/step": 1e3 * seconds / num_steps,
            "CPU": cpu_seconds / seconds / torch.get_num_threads(),
            "KV mean": sum(usage) / len(usage),
            "KV peak": max(usage),
            **gpu.figures,
        },
        {
            "proposed per depth": _added(before.proposed_per_depth, after.proposed_per_depth),
            "accepted per depth": _added(before.accepted_per_depth, after.accepted_per_depth),
        },
    )


def run_static(engine: Engine, workload: Workload, batch_size: int) -> Run:
    """Run a workload in batches, each until its longest request has all its tokens; shorter ones run on and are cut.

    This is what a batch that is one tensor does: its rows end together. A request is finished when its batch is.
    """
    batches = [range(first, min(first + batch_size, len(workload))) for first in range(0, len(workload), batch_size)]
    output_lens = [max(workload.output_lens[i] for i in batch) for batch in batches for _ in batch]
    run = run_workload(engine, replace(workload, output_lens=output_lens), batch_size, use_speculative=False, is_static=True)
    ends = [max(run.requests[i].finished for i in batch) for batch in batches for _ in batch]
    requests = [
        replace(request, token_ids=request.token_ids[:wanted], finished=end)
        for request, wanted, end in zip(run.requests, workload.output_lens, ends, strict=True)
    ]
    return replace(run, requests=requests)


def profile_workload(
    engine: Engine, workload: Workload, concurrency: int, *, use_speculative: bool = True, temperature: float = 0.0
) -> Run:
    """Run a workload and time the parts of its steps, those before the first requests have tokens left out; none on a GPU.

    Raises:
        RuntimeError: as `run_workload`.
    """
    requests = make_requests(engine, workload, use_speculative=use_speculative, temperature=temperature)
    start = time.perf_counter()
    for request in requests:
        engine.scheduler.add(request)
    while not all(request.num_output_tokens or request.is_finished for request in requests[:concurrency]):
        engine.step()
    with step_times(engine) as times:
        while engine.scheduler.has_unfinished:
            engine.step()
    seconds = time.perf_counter() - start
    for request in requests:
        _check(request)
    num_tokens = sum(request.metrics.num_emitted_tokens for request in requests)
    num_rows = sum(request.metrics.num_sequence_steps for request in requests)
    runs = [RequestRun(request.output_token_ids, seconds, None) for request in requests]
    return Run(runs, seconds, {"tokens/step": num_tokens / num_rows, **times.figures})


def make_idle(engine: Engine) -> None:
    """Abort all requests of an engine, as after a failure."""
    for request in (*engine.scheduler.running, *engine.scheduler.waiting):
        engine.scheduler.abort(request)


def _check(request: Request) -> None:
    if request.finish_reason != "length":
        raise RuntimeError(f"request {request.request_id} ended early: {request.error or request.finish_reason}")


def _added(before: list[int], after: list[int]) -> list[float]:
    padded = before + [0] * (len(after) - len(before))
    return [new - old for old, new in zip(padded, after, strict=True)]


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
    def figures(self) -> dict[str, float]:
        return {"GPU": sum(self._samples) / len(self._samples) / 100} if self._samples else {}
