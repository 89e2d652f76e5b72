"""The seconds of a step by its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Seconds of the parts of a step."""

    schedule: float = 0.0
    adapt: float = 0.0  # irregular work: deciding what is drafted, and learning from the step
    clear: float = 0.0  # irregular work: clearing new blocks
    backlog: float = 0.0  # waiting for passes that earlier steps, of prompts alone without logprobs, left to the device
    draft: float = 0.0
    inputs: float = 0.0  # building the batch of the target's pass
    target: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    def note_pass(self, parts: Sequence[float], whole: float) -> None:
        """Add the three timed parts, drafting, inputs and the target's pass; the remainder of ``whole`` is verification."""
        draft, inputs, target = parts
        self.draft, self.inputs, self.target = self.draft + draft, self.inputs + inputs, self.target + target
        self.verify += max(0.0, whole - draft - inputs - target)

    @property
    def whole(self) -> float:
        return self.recurring + self.adapt + self.clear + self.backlog

    @property
    def recurring(self) -> float:
        """Seconds of the parts that every step has: all but `adapt`, `clear` and `backlog`."""
        return self.schedule + self.draft + self.inputs + self.target + self.verify + self.commit


class Stopwatch:
    """Fills in `StepTimes`: ``watch.times.draft += watch.lap()``.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times = StepTimes()
        self._clock = clock
        self.last = clock()  # time of the last lap

    def lap(self) -> float:
        """Return the seconds since the last lap, or since the start, and begin the next one."""
        before, self.last = self.last, self._clock()
        return self.last - before
