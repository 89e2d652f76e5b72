"""Runs of several engines side by side: each goes on for a moment and then gives way to the next.

A machine that others use is now faster, now slower, for seconds at a time. Runs one after the other would compare its moods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from math import inf
from typing import Self

from titan.bench.runs import Run
from titan.bench.samples import rotated
from titan.bench.turns import Turns

SLICE_S = 0.2
"""Seconds for which the first of each cycle goes on: a hundred steps of a small model, one or two of large batches."""

Steps = Generator[int, None, Run]
"""A run that can give way after each step, when it yields how far it is."""


class OwnTime:
    """The time of a run, which passes within this context only."""

    def __init__(self) -> None:
        self._seconds = self._cpu_seconds = 0.0  # less what clocks showed when the context was entered, while inside

    def __enter__(self) -> Self:
        self._seconds, self._cpu_seconds = self._seconds - time.monotonic(), self._cpu_seconds - time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds, self._cpu_seconds = self.seconds(), self.cpu_seconds()

    def seconds(self) -> float:
        """Return the seconds so far; to be called inside, as `cpu_seconds`."""
        return self._seconds + time.monotonic()

    def cpu_seconds(self) -> float:
        """Return those of the process on processors."""
        return self._cpu_seconds + time.process_time()


def run_alone(start: Callable[[OwnTime], Steps]) -> Run:
    """Run to the end without giving way."""
    alone = _Slices(start)
    alone.go_on(inf, inf)
    assert alone.run is not None
    return alone.run


def run_side_by_side(turns: Turns, place: str, starts: Mapping[str, Callable[[OwnTime], Steps]], first: int = 0) -> dict[str, Run]:
    """Run all variants to their ends, in cycles: the first goes on for `SLICE_S`, the others until they are as far as it is.

    Args:
        turns: counts a turn for each variant; one that fails is left out.
        place: where in the measurement.
        starts: by variant; makes ready, which takes no time of the run, and returns its steps.
        first: number of the first cycle, which says who begins.

    Returns:
        The runs of those that did not fail, in the order of ``starts``.
    """
    slices = {variant: _Slices(start) for variant, start in starts.items()}
    left, cycle = [*slices], first
    while left:
        seconds, goal = SLICE_S, inf
        for variant in rotated(left, cycle):
            reached = turns.part(variant, place, partial(slices[variant].go_on, seconds, goal))
            if reached is not None and goal == inf:
                seconds, goal = inf, reached
            if reached is None or slices[variant].run is not None:
                left.remove(variant)
                turns.end()
        cycle += 1
    return {variant: each.run for variant, each in slices.items() if each.run is not None}


class _Slices:
    """A run in slices."""

    def __init__(self, start: Callable[[OwnTime], Steps]) -> None:
        self.run: Run | None = None  # once it is at its end
        self._start, self._own_time, self._reached = start, OwnTime(), 0
        self._steps: Steps | None = None  # not begun

    def go_on(self, seconds: float, goal: float) -> int:
        """Go on for these seconds, or until it is as far as the goal; return how far it is."""
        own_time = self._own_time
        if self._steps is None:
            self._steps = self._start(own_time)
        with own_time:
            end = own_time.seconds() + seconds
            try:
                while self._reached < goal and own_time.seconds() < end:
                    self._reached = next(self._steps)
            except StopIteration as last:
                self.run = last.value
        return self._reached
