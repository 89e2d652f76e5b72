"""Replay of small passes as CUDA graphs: one launch in place of hundreds, which take the host longer than the device.

A graph is captured for fixed shapes, so a batch is padded to the next of a bounded number of sizes. Sizes are captured on first
use, which costs a fraction of a second each: most of them are never used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from titan.kernels.interfaces import PassLimits

MAX_GRAPH_TOKENS = 1024
"""Most tokens of a graph; larger passes keep the device busy for longer than it takes to launch them."""


class PassSize(NamedTuple):
    """The shapes of a pass."""

    num_tokens: int
    num_requests: int
    max_query_len: int  # no query is longer


class GraphSizes:
    """The sizes that passes are padded to.

    Requests are padded by at most a quarter, or to a small number; tokens to a number per request. The number of sizes is at most
    the number of request counts times the square of the number of query lengths.

    Args:
        limits: of the passes.
    """

    def __init__(self, limits: PassLimits) -> None:
        self.request_counts = _ladder(limits.num_requests, [1, 2, 4, 8, 16, 24, 32])
        self.query_lens = _ladder(limits.query_len, [1, 2, 4, 8, 16, 32, 64])

    @property
    def largest(self) -> PassSize:
        """The most tokens, requests and tokens per request of any size."""
        num_requests, query_len = self.request_counts[-1], self.query_lens[-1]
        return PassSize(min(num_requests * query_len, MAX_GRAPH_TOKENS), num_requests, query_len)

    def find(self, size: PassSize) -> PassSize | None:
        """Return the smallest size that holds a pass; ``None`` if none does."""
        num_tokens, num_requests, max_query_len = size
        if num_requests > self.request_counts[-1] or max_query_len > self.query_lens[-1]:
            return None
        num_requests = _at_least(self.request_counts, num_requests)
        num_tokens = num_requests * _at_least(self.query_lens, -(-num_tokens // num_requests))
        if num_tokens > MAX_GRAPH_TOKENS:
            return None
        return PassSize(num_tokens, num_requests, _at_least(self.query_lens, max_query_len))


class Replay(NamedTuple):
    """A captured pass."""

    run: Callable[[], None]
    output: Tensor  # written by `run`


Capture = Callable[[Callable[[], Tensor]], Replay | None]
"""Records what a function launches on the device, without running it; the function must have run before. Returns ``None`` if the
device has no memory left for it."""


def cuda_graph_capture() -> Capture:
    """Return a `Capture` on the current device, in CUDA graphs that share the memory of their intermediate results."""
    pool = torch.cuda.graph_pool_handle()

    def capture(function: Callable[[], Tensor]) -> Replay | None:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = _capture_stream(torch.cuda.current_device())
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # other threads continue
                output = function()
        except RuntimeError as error:
            torch.cuda.set_stream(before)  # torch.cuda.graph stays on its own stream if it cannot end a capture
            if not _is_out_of_memory(error):
                raise
            return None
        return Replay(graph.replay, output)

    return capture


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of a device's captures, always the same one: matrix products keep memory per stream."""
    return torch.cuda.Stream(device)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error is about memory, or one before it: ending a broken capture raises an error of its own."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__context__
    return False


def _ladder(largest: int, steps: Sequence[int]) -> list[int]:
    """Return the steps up to ``largest``, which is the last; beyond ``steps``, each is a quarter more than the one before."""
    ladder = [step for step in steps if step < largest]
    while ladder and ladder[-1] >= steps[-1] and (step := ladder[-1] + ladder[-1] // 32 * 8) < largest:
        ladder.append(step)
    return [*ladder, largest]


def _at_least(ladder: list[int], count: int) -> int:
    return ladder[bisect_left(ladder, count)]
