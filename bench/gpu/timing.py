"""Times of work on a device: CUDA graphs replayed between events; on a CPU, where times mean little, one plain call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType

Work = Callable[[], object]

NUM_WARM_UPS = 2
MIN_REPLAYS, MAX_REPLAYS = 5, 200
MAX_GRAPH_GAP = 4e-6
"""Seconds between two kernels that count as running: what lies between kernels of one graph is not the host's."""


def median_seconds(work: Work, device: torch.device, *, seconds: float = 0.1) -> float:
    """How long work takes that launches kernels without waiting: the median over replays that take about ``seconds`` together."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UPS):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    once = _time_replays(graph.replay, 1)[0]
    num_replays = min(max(int(seconds / max(once, 1e-6)), MIN_REPLAYS), MAX_REPLAYS)
    return median(_time_replays(graph.replay, num_replays))


def _time_replays(replay: Callable[[], None], num_replays: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_replays)]
    for start, end in events:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def busy_seconds(work: Work, device: torch.device) -> float | None:
    """Seconds of the work, which may wait for the device, in which it runs kernels or copies; ``None`` on a CPU."""
    if device.type != "cuda":
        return None
    events = [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in _profiled(work, device).events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return covered_seconds(events, MAX_GRAPH_GAP)


def heaviest(work: Work, device: torch.device, num_steps: int) -> dict[str, float]:
    """The heaviest twelve of steps, by name and "us/step": kernels of the device; operators of the host without their callees."""
    times: dict[str, dict[str, float]] = {"device": {}, "host": {}}
    for each in _profiled(work, device, torch.profiler.ProfilerActivity.CPU).key_averages():
        if each.device_type == DeviceType.CUDA and not each.is_user_annotation:
            times["device"][each.key] = each.self_device_time_total / num_steps
        elif each.device_type == DeviceType.CPU:
            times["host"][each.key] = each.self_cpu_time_total / num_steps
    largest = {kind: sorted(found.items(), key=itemgetter(1), reverse=True)[:12] for kind, found in times.items()}
    return {f"{kind}, us/step: {name}": microseconds for kind, found in largest.items() for name, microseconds in found}


def _profiled(work: Work, device: torch.device, *activities: torch.profiler.ProfilerActivity) -> Any:
    if device.type == "cuda":
        activities = (*activities, torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        work()
        synchronize(device)
    return profile


def covered_seconds(intervals: Iterable[tuple[float, float]], max_gap: float) -> float:
    """Length of the union of intervals, gaps up to ``max_gap`` between them included."""
    total, covered_to = 0.0, float("-inf")
    for start, end in sorted(intervals):
        from_here = covered_to if start - covered_to <= max_gap else start
        total += max(end - from_here, 0.0)
        covered_to = max(covered_to, end)
    return total


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
