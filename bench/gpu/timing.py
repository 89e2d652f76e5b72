"""Times of work on a device: CUDA graphs replayed between events; on a CPU, where times mean little, one plain call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

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
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize(device)
    on_device = [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profile.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return covered_seconds(on_device, MAX_GRAPH_GAP)


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
