"""The seconds of a step by its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Seconds of the parts of a step. On a device that works on its own, ``target`` is all from drafting to the results."""

    schedule: float = 0.0
    prepare: float = 0.0  # deciding on drafts, clearing blocks and learning from the step: what is not of each step
    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    rest: float = 0.0  # inputs of the pass, and committing

    @property
    def whole(self) -> float:
        """Of all of the step."""
        return self.recurring + self.prepare

    @property
    def recurring(self) -> float:
        """Of what each such step takes."""
        return self.schedule + self.draft + self.target + self.verify + self.rest


class Stopwatch:
    """Fills in `StepTimes`: ``watch.times.draft += watch.lap()``.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times = StepTimes()
        self._clock = clock
        self.last = clock()  # time of the last look

    def lap(self) -> float:
        """Return the seconds since the last look at the clock."""
        before, self.last = self.last, self._clock()
        return self.last - before
