"""Replay of passes as CUDA graphs: one launch in place of hundreds, which take the host longer than the device.

A graph is captured for fixed shapes, so a batch is padded to the next of a small number of sizes. An engine can capture them all
before it serves: to capture one on first use waits for the device, and may compile kernels.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from titan.core.out_of_memory import is_out_of_memory
from titan.kernels.interfaces import PassCounts, PassLimits
from titan.kernels.triton.streams import WHOLE_DEVICE, own_stream

MAX_GRAPH_TOKENS = 4096
"""Most tokens of a graph without prefill chunks; larger passes keep the device busy for longer than it takes to launch them."""

CHUNKED_TOKENS = (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 544, 576, 640, 768, 896, 1024)
"""Tokens of graphs of passes with prefill chunks; larger ones keep the device busy for longer than it takes to launch them.

Closest together above 512, the length of chunks by default: decodes run beside them."""

FEW_REQUESTS = 64
"""Requests that such passes are padded to; where there are more, to the most that there may be."""

MAX_FREE_TOKENS = 64
"""Tokens up to which padding is free: by arithmetic, such a pass waits for the weights as long as one of a single token does, but
for a draft's of 8 bits."""


class PassSize(NamedTuple):
    """The shapes of a pass."""

    num_tokens: int
    num_requests: int
    max_query_len: int  # no query is longer


class GraphSizes:
    """The sizes that passes are padded to.

    Requests are padded by at most a quarter, or to a small number; the longest query to 1, 2 (a draft is fed one or two tokens
    before it grows trees), 8, 64 or the limit, as it mostly decides how attention is tiled; tokens to a number per request, or in a
    small pass to that of the longest query. With a prefill chunk, a query longer than the limit, any query may have all tokens.
    """

    def __init__(self, limits: PassLimits) -> None:
        self.request_counts = _ladder(limits.num_requests, [1, 2, 4, 8, 16, 24, 32])
        self.query_lens = _ladder(limits.query_len, [1, 2, 8, 64])
        self.tokens_per_request = _ladder(limits.query_len, [1, 2, 3, 4, 5, 6, 8, 16, 32, 64])
        self._chunked_requests = sorted({min(FEW_REQUESTS, limits.num_requests), limits.num_requests})
        # those from the limit on are one; without small passes there are none
        self._chunked_tokens = sorted({min(each, limits.num_tokens) for each in CHUNKED_TOKENS if limits.query_len})

    @property
    def largest(self) -> PassSize:
        """The most tokens and requests of any size, and the longest query of one without chunks."""
        num_requests, query_len = self.request_counts[-1], self.query_lens[-1]
        num_tokens = min(num_requests * query_len, MAX_GRAPH_TOKENS)
        return PassSize(max([num_tokens, *self._chunked_tokens[-1:]]), num_requests, query_len)

    def find(self, size: PassSize) -> PassSize | None:
        """Return the smallest size that holds a pass; ``None`` if none does."""
        num_tokens, num_requests, max_query_len = size
        if num_requests > self.request_counts[-1]:
            return None
        if max_query_len > self.query_lens[-1]:
            num_tokens = next((each for each in self._chunked_tokens if each >= num_tokens), 0)
            return PassSize(num_tokens, _at_least(self._chunked_requests, num_requests), num_tokens) if num_tokens else None
        num_requests, max_query_len = _at_least(self.request_counts, num_requests), _at_least(self.query_lens, max_query_len)
        per_request = max_query_len
        if num_requests * max_query_len > MAX_FREE_TOKENS:
            per_request = _at_least(self.tokens_per_request, -(-num_tokens // num_requests))
        num_tokens = num_requests * per_request
        return None if num_tokens > MAX_GRAPH_TOKENS else PassSize(num_tokens, num_requests, max_query_len)

    def without_chunks(self) -> list[PassSize]:
        """Return every size that passes without chunks find, the one of most tokens first: graphs share the memory of the first."""
        found = set()
        for fewer, num_requests in pairwise([0, *self.request_counts]):
            for shorter, longest in pairwise([0, *self.query_lens]):
                fewest_tokens = fewer + shorter + 1  # one request has a query of this class, the others one token
                for per_request in self.tokens_per_request:
                    num_tokens = min(max(per_request * num_requests, fewest_tokens), num_requests * longest)
                    found.add(self.find(PassSize(num_tokens, num_requests, longest)))
        return sorted((size for size in found if size is not None), reverse=True)

    def with_chunks(self) -> list[PassSize]:
        """Return every size that passes with chunks find, the one of most tokens first."""
        chunk = self.query_lens[-1] + 1  # of one request, beside one token of each other one
        found = list[PassSize]()
        for fewer, num_requests in pairwise([0, *self._chunked_requests]):
            found += [PassSize(each, num_requests, each) for each in self._chunked_tokens if each >= fewer + chunk]
        return sorted(found, reverse=True)


class Replay(NamedTuple):
    """A captured pass."""

    run: Callable[[], None]
    output: Tensor  # written by `run`


Capture = Callable[[Callable[[], Tensor]], Replay | None]
"""Records what a function launches on the device, without running it; the function must have run before. Returns ``None`` if the
device has no memory left for it."""


class Replays:
    """Captured passes by key. Those that memory is too short for run without a graph, and are not tried again.

    Args:
        capture: records them.
        counts: of passes; updated.
        device: for messages.
        may_fail: whether the passes may do what cannot be captured, as the modules of other libraries do: from the first one on
            that fails, for whatever reason, none is captured.
    """

    def __init__(self, capture: Capture, counts: PassCounts, device: torch.device, *, may_fail: bool = False) -> None:
        self._capture, self._counts, self._device, self._may_fail = capture, counts, device, may_fail
        self._has_failed = False
        self._replays: dict[Hashable, Replay | None] = {}

    def lacks(self, key: Hashable) -> bool:
        """Whether these passes could not be recorded, or will not be."""
        return self._replays[key] is None if key in self._replays else self._has_failed

    def __contains__(self, key: Hashable) -> bool:
        """Whether these passes were recorded, or could not be."""
        return key in self._replays

    def record(self, key: Hashable, passes: Callable[[], Tensor], description: str) -> Tensor:
        """Run passes, which also compiles their kernels as a capture requires, then capture them; return the output of the run."""
        output = passes()
        self._replays[key] = None if self._has_failed else self._captured(passes, description)
        return output

    def _captured(self, passes: Callable[[], Tensor], description: str) -> Replay | None:
        try:
            replay = self._capture(passes)
        except Exception as error:
            if not self._may_fail:
                raise
            self._has_failed = True
            logging.getLogger(__name__).warning(
                "this model gets no further CUDA graphs, since %s could not be captured: %s: %s",
                description,
                type(error).__name__,
                error,
            )
            return None
        if replay is None and None not in self._replays.values():
            logging.getLogger(__name__).warning(
                "%s has no memory for the CUDA graph of %s, which runs without one, as may others: a smaller KV cache leaves room "
                "for graphs",
                self._device,
                description,
            )
        return replay

    def run(self, key: Hashable, passes: Callable[[], Tensor], num_passes: int = 1) -> Tensor:
        """Return the output of recorded passes over the inputs of now, valid until the next ones."""
        replay = self._replays[key]
        if replay is None:
            self._counts.num_eager += num_passes
            return passes()
        self._counts.num_replayed += num_passes
        replay.run()
        return replay.output


def cuda_graph_capture() -> Capture:
    """Return a `Capture` on the current device, in CUDA graphs that share the memory of their intermediate results.

    It must live as long as its replays. It has a stream of its own: matrix products keep memory per stream, which PyTorch frees
    when a graph that was captured on that stream is destroyed, while others still use it
    (https://github.com/pytorch/pytorch/issues/193402).

    Raises:
        RuntimeError: all streams of the device have an owner.
    """
    pool, owner = torch.cuda.graph_pool_handle(), own_stream()
    failed: list[torch.cuda.CUDAGraph] = []  # destroyed together with the others, for the same reason

    def capture(function: Callable[[], Tensor]) -> Replay | None:
        nonlocal pool
        graph, before, is_collecting = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), gc.isenabled()
        gc.disable()  # what is collected may wait for the device, which ends a capture
        try:
            with WHOLE_DEVICE, torch.cuda.graph(graph, pool=pool, stream=owner.stream, capture_error_mode="thread_local"):
                output = function()
        except BaseException as error:
            torch.cuda.set_stream(before)  # torch.cuda.graph stays on its own stream if it cannot end a capture
            if _end_recording(pool):
                pool = torch.cuda.graph_pool_handle()
            failed.append(graph)
            if not _is_of_memory(error):
                raise
            return None
        finally:
            if is_collecting:
                gc.enable()
        return Replay(graph.replay, output)

    return capture


def _end_recording(pool: tuple[int, int]) -> bool:
    """End what a capture that cannot be ended leaves recording in a pool; return whether there was such a capture.

    PyTorch 2.11 would go on to allocate there. Its allocator of page-locked memory records on, and takes no other capture there.
    """
    try:
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    except (RuntimeError, AttributeError):
        return False
    return True


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether an error is about memory, or one before it: ending a broken capture raises an error of its own."""
    while error is not None:
        if is_out_of_memory(error):
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
