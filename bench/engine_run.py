"""Titan under a workload: requests that are all there or arrive at their own times, batched continuously or not."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import mean
from typing import Any

import torch

from titan import SamplingParams
from titan.bench.runs import RequestRun, Run
from titan.bench.side_by_side import OwnTime, Steps, run_alone
from titan.bench.step_times import step_times
from titan.bench.workloads import Workload
from titan.core.outputs import merge_metrics
from titan.core.request import Request
from titan.engine import Engine
from titan.frontend.input_processor import InputProcessor

NUM_DEPTHS = 6
"""Depths of draft trees of which figures say how often a token was accepted."""


def make_requests(engine: Engine, workload: Workload, **options: Any) -> list[Request]:
    """The requests of a workload, which ignore the end of sequence, and have by default temperature 0.

    Request i has the same random numbers each time, and no seed of its own, with which its drafts would not be sampled.

    Raises:
        ValueError: one of them would end before it has its tokens, for want of room.
    """
    inputs = InputProcessor(engine)
    options = {"temperature": 0.0, "ignore_eos": True, **options}
    requests = [
        inputs.make_request(prompt, SamplingParams(**options, max_tokens=output_len), terms)
        for prompt, output_len, terms in zip(workload.prompts, workload.output_lens, workload.terms, strict=True)
    ]
    if [request.max_tokens for request in requests] != workload.output_lens:
        raise ValueError(f"the engine has no room for requests of {workload.max_len} tokens: max_model_len={engine.max_model_len}")
    return requests


def run_workload(engine: Engine, workload: Workload, concurrency: int | None = None, **options: Any) -> Run:
    """Step an idle engine until a workload is done: `workload_steps`, without giving way; also says how busy the device is.

    Raises:
        RuntimeError, RuntimeWarning: as `serve`.
    """
    run = run_alone(lambda own_time: workload_steps(engine, workload, own_time, concurrency, **options))
    gpu_use = engine.backend.utilization()  # of the last moments, which side by side are of others
    return run if gpu_use is None else replace(run, figures={**run.figures, "GPU": gpu_use})


def workload_steps(
    engine: Engine,
    workload: Workload,
    own_time: OwnTime,
    concurrency: int | None = None,
    *,
    use_speculative: bool = True,
    is_static: bool = False,
    **sampling: Any,
) -> Steps:
    """Step an idle engine until a workload is done; yields the tokens emitted so far after each step.

    Figures are of the whole run, and of its decode steps, if there are any. A request that arrives during a step waits until the
    step ends; its latency includes that wait.

    Args:
        engine: takes as many waiting requests as there are.
        workload: each request is added when its time has come.
        own_time: of the run.
        concurrency: most requests at once; 1 is no batching, ``None`` leaves it to the engine.
        use_speculative: whether the engine may draft.
        is_static: the next requests are added when all of those before are finished.
        sampling: options of the requests; see `make_requests`.

    Raises:
        RuntimeError, RuntimeWarning: as `serve`.
    """
    # within the time of the run, as those of other engines are made
    requests = make_requests(engine, workload, use_speculative=use_speculative, **sampling)
    changes: dict[Request, list[float]] = {request: [] for request in requests}
    seconds, num_before = 0.0, engine.counters.num_emitted_tokens
    clock = own_time.seconds
    with step_times(engine) as times:
        for seconds, changed in serve(engine, workload, requests, concurrency or len(requests), clock, is_static=is_static):
            for request in changed:
                changes[request].append(seconds)
            yield engine.counters.num_emitted_tokens - num_before
    cpu_seconds = own_time.cpu_seconds()
    runs = [
        RequestRun(request.output_token_ids, changes[request][-1], changes[request][0], arrival)
        for arrival, request in zip(workload.arrivals, requests, strict=True)
    ]
    figures = {
        **_step_figures(requests),
        "batch": sum(request.metrics.num_sequence_steps for request in requests) / len(times.steps),
        "ms/step": 1e3 * seconds / len(times.steps),
        "CPU": cpu_seconds / seconds / torch.get_num_threads(),
        "KV mean": mean(times.kv_use),
        "KV peak": max(times.kv_use),
        **times.figures,
    }
    return Run(runs, seconds - workload.arrivals[0], figures)


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


def first_steps(engine: Engine, workload: Workload, num_steps: int, own_time: OwnTime) -> Steps:
    """Run the first steps of requests that all arrive together, and abort them; yields their number.

    Raises:
        RuntimeError, RuntimeWarning: as `serve`.
    """
    requests = make_requests(engine, workload)
    seconds = 0.0
    steps = islice(serve(engine, workload, requests, len(requests), own_time.seconds), num_steps)
    for number, (seconds, _) in enumerate(steps, 1):  # noqa: B007 - the last counts
        yield number
    make_idle(engine)
    return Run([RequestRun(request.output_token_ids, seconds, None) for request in requests], seconds, _step_figures(requests))


def make_idle(engine: Engine) -> None:
    """Abort all requests of an engine, as after a failure."""
    for request in engine.scheduler.in_flight:
        engine.scheduler.abort(request)


def serve(
    engine: Engine,
    workload: Workload,
    requests: Sequence[Request],
    concurrency: int,
    clock: Callable[[], float] | None = None,
    *,
    is_static: bool = False,
) -> Iterator[tuple[float, list[Request]]]:
    """Step an engine until all requests are finished; yields, after each step, the seconds until then and what it changed.

    Args:
        engine: an idle one.
        workload: says when its requests are added.
        requests: those of the workload.
        concurrency: most requests at once.
        clock: seconds since the start of the run; ``None``: the start is now.
        is_static: as of `run_workload`.

    Raises:
        RuntimeError: a request was ended before it had its tokens.
        RuntimeWarning: the drafter failed, which elsewhere costs drafts and no request.
    """
    waiting = deque(zip(workload.arrivals, requests, strict=True))
    unfinished: set[Request] = set()
    start = time.monotonic()
    clock = clock or (lambda: time.monotonic() - start)
    while waiting or unfinished:
        now = clock()
        if waiting and not unfinished and waiting[0][0] > now:
            time.sleep(waiting[0][0] - now)
            now = waiting[0][0]  # whatever rounding says
        may_add = not (is_static and unfinished)
        while may_add and waiting and waiting[0][0] <= now and len(unfinished) < concurrency:
            _, request = waiting.popleft()
            request.metrics.arrival_time = engine.scheduler.clock()
            engine.scheduler.add(request)
            unfinished.add(request)
        with warnings.catch_warnings():  # only around the step: filters are the process's
            warnings.filterwarnings("error", "the drafter .* failed", RuntimeWarning)
            changed = engine.step()
        for request in changed:
            if request.is_finished and request.finish_reason != "length":
                raise RuntimeError(f"request {request.request_id} ended early: {request.error or request.finish_reason}")
        unfinished -= {request for request in changed if request.is_finished}
        yield clock(), changed


def _step_figures(requests: Sequence[Request]) -> dict[str, float]:
    """Per request and step: tokens emitted, draft tokens verified, and those accepted at the first depths."""
    metrics = merge_metrics([request.metrics for request in requests])
    num_steps, accepted = metrics.num_sequence_steps, [*metrics.accepted_per_depth, *[0] * NUM_DEPTHS]
    depths = {f"depth {depth}": number / num_steps for depth, number in enumerate(accepted[:NUM_DEPTHS], 1)}
    return {
        "tokens/step": metrics.mean_acceptance_length,
        "nodes/step": metrics.num_draft_tokens / num_steps,
        **(depths if metrics.num_draft_tokens else {}),
    }
