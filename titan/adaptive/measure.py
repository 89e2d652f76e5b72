"""The costs of models' passes, measured on free blocks of their KV caches."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch

from titan.adaptive.pass_cost import PassCost
from titan.core.batch import QueryRow, RaggedBatch, build_batch
from titan.core.growth import Feed, chain_spec
from titan.core.proposals import placeholder_chains
from titan.kernels.interfaces import Backend, Runner

MAX_SECONDS = 2.5
"""Time for all measurements, warm-up left out; two sizes of each model, and what context costs, are measured in any case."""

EXPLORE_SECONDS = 0.8
"""Of it, that to find out how many sizes there is time for: they are timed twice there, and once in each further round."""

NUM_ROUNDS = 4
"""Times that each size is measured; the least counts."""

CONTEXT_ROWS = 32
"""Rows of the passes that show what context costs."""

CONTEXT_ROWS_EACH = 2
"""Rows of each request in these passes: for decodes and short chains a token of context costs much the same, for trees more."""

CONTEXT_LEN = 512
"""Tokens before those of the passes that show what context costs."""


class Subject(NamedTuple):
    """A model to measure."""

    runner: Runner
    num_nodes: int  # draft tokens of a request beside its root
    block_ids: Sequence[int]  # of its KV, that may be overwritten, at least one; if there are too few, requests share them
    max_len: int  # maximum tokens of a request
    num_fed: int = 0  # rows up to which passes are measured although those of all requests together have fewer
    is_grown: bool = False  # whether its passes take what growth reports of them, and what else growth takes is the host's


class Extent(NamedTuple):
    """The largest passes."""

    block_size: int  # tokens per KV block
    num_requests: int
    num_rows: int


def measure(subjects: Sequence[Subject], backend: Backend, extent: Extent) -> list[PassCost]:
    """Measure the passes of models, in rounds over all of them, so that what slows the machine down for a while slows all alike.

    Args:
        subjects: the models.
        backend: the one they run on.
        extent: up to which size; less if the requests cannot have as many tokens.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """
    curves = [_Curve(subject, backend, extent) for subject in subjects]
    with torch.inference_mode():
        for curve in curves:
            curve.warm_up()
        begin = time.perf_counter()
        for curve in curves:
            curve.explore(EXPLORE_SECONDS / len(curves))
        for curve in curves:
            curve.measure_context()
        for _ in range(NUM_ROUNDS - 1):
            if time.perf_counter() - begin + sum(curve.round_seconds for curve in curves) > MAX_SECONDS:
                break
            for curve in curves:
                curve.repeat()
                curve.measure_context()
    return [curve.cost() for curve in curves]


class _Curve:
    """The times of one model's passes so far."""

    def __init__(self, subject: Subject, backend: Backend, extent: Extent) -> None:
        self._subject, self._backend, self._extent = subject, backend, extent
        self._num_nodes = min(subject.num_nodes, subject.max_len - 1)
        self._max_rows = min(max(extent.num_rows, subject.num_fed), extent.num_requests * subject.max_len)
        self._padded = [size for size in subject.runner.padded_sizes if size <= self._max_rows]
        self._all_sizes = self._padded or _sizes(self._max_rows)
        self._sizes, self._seconds = list[int](), list[float]()
        self._without_context = self._in_context = float("inf")  # of the passes that show what context costs

    def warm_up(self) -> None:
        """Run a pass: the first of all may compile kernels, and reads weights from wherever they are."""
        self._time(self._all_sizes[0], 0)

    def explore(self, max_seconds: float) -> None:
        """Time sizes as long as there is time; two in any case."""
        begin = time.perf_counter()
        for size in self._all_sizes:
            if len(self._sizes) >= 2 and time.perf_counter() - begin > max_seconds:
                break
            seconds = self._time(size, 0)
            if seconds < max_seconds / 2:  # the first short pass of a size finds nothing in the caches
                seconds = self._time(size, 0)
            place = bisect_left(self._sizes, size)
            self._sizes.insert(place, size)
            self._seconds.insert(place, seconds)

    def repeat(self) -> None:
        """Time all these sizes once more; the least times count."""
        self._seconds = [min(before, self._time(size, 0)) for size, before in zip(self._sizes, self._seconds, strict=True)]

    def measure_context(self) -> None:
        """Time the passes that show what context costs; the least times count."""
        size, n = self._sizes[self._at], self._num_in_context
        self._without_context = min(self._without_context, self._time(size, 0, n))
        self._in_context = min(self._in_context, self._time(size, self._context_len, n))

    @property
    def round_seconds(self) -> float:
        """Time of a further round."""
        return sum(self._seconds) + self._without_context + self._in_context

    def cost(self) -> PassCost:
        """Return the curve."""
        num_context = max(1, self._context_len * self._num_in_context)
        per_token = max(0.0, self._in_context - self._without_context) / num_context
        return PassCost(self._sizes, self._seconds, per_token, is_padded=bool(self._padded))

    @property
    def _at(self) -> int:
        """Index of the size at which context is measured: many requests, but not bound by arithmetic."""
        return min(len(self._sizes) - 1, bisect_left(self._sizes, CONTEXT_ROWS))

    @property
    def _context_len(self) -> int:
        """Tokens of each request before that pass."""
        return min(CONTEXT_LEN, self._subject.max_len - -(-self._sizes[self._at] // self._num_in_context))

    @property
    def _num_in_context(self) -> int:
        """Requests of that pass."""
        size = self._sizes[self._at]
        return min(self._extent.num_requests, max(self._num_requests(size), size // CONTEXT_ROWS_EACH))

    def _num_requests(self, num_rows: int) -> int:
        """Return how many requests a pass of so many rows is of: as few as are needed."""
        return min(self._extent.num_requests, -(-num_rows // (1 + self._num_nodes)))

    def _time(self, num_rows: int, start: int, num_requests: int | None = None) -> float:
        n, runner = num_requests or self._num_requests(num_rows), self._subject.runner
        counts = [num_rows // n + (i < num_rows % n) for i in range(n)]
        tables = self._block_tables(n, start + max(counts))
        if self._subject.is_grown:
            feeds = [Feed(i, tables[i], start, [0] * count, chain_spec(1)) for i, count in enumerate(counts)]
            growth = runner.grow(feeds, n, 1).growth
            assert growth is not None and growth.seconds is not None, "the host waits for passes"
            return growth.seconds
        batch, begin = self._batch(tables, start, counts), time.perf_counter()
        self._backend.download([runner.forward(batch)[:1, :1].float()])  # waits for the device
        return time.perf_counter() - begin

    def _block_tables(self, n: int, num_tokens: int) -> list[list[int]]:
        """Return blocks of each request, for these tokens and a node."""
        block_ids, blocks_each = self._subject.block_ids, num_tokens // self._extent.block_size + 1
        return [[block_ids[(i * blocks_each + j) % len(block_ids)] for j in range(blocks_each)] for i in range(n)]

    def _batch(self, tables: Sequence[Sequence[int]], start: int, counts: Sequence[int]) -> RaggedBatch:
        nodes = [min(count - 1, self._num_nodes) for count in counts]
        rows = [
            QueryRow(table, start, [0] * (count - of_tree), True)
            for table, count, of_tree in zip(tables, counts, nodes, strict=True)
        ]
        trees = placeholder_chains(nodes, self._backend.upload, self._backend.device)
        return build_batch(rows, trees, block_size=self._extent.block_size)


def _sizes(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to ``most``, then what else is below 8, where a row more may be a step of the curve."""
    powers = [2**i for i in range(most.bit_length())]
    coarse = sorted({size for power in powers for size in (power, power * 3 // 2) if size < most} | {most})
    return [*coarse, *(size for size in (5, 7) if size < most)]
