"""The seconds of a step by its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Seconds of the parts of a step."""

    schedule: float = 0.0
    prepare: float = 0.0  # deciding on drafts, clearing blocks and learning from the step: what is not of each step
    backlog: float = 0.0  # waiting for the passes of earlier steps, which were of prompts alone
    draft: float = 0.0
    inputs: float = 0.0  # of the target's pass
    target: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    def note_pass(self, parts: Sequence[float], whole: float) -> None:
        """Add drafting, inputs and the target's pass, and what is left of the time of all of them and of verifying."""
        draft, inputs, target = parts
        self.draft, self.inputs, self.target = self.draft + draft, self.inputs + inputs, self.target + target
        self.verify += max(0.0, whole - draft - inputs - target)

    @property
    def whole(self) -> float:
        """Seconds of all of the step."""
        return self.recurring + self.prepare + self.backlog

    @property
    def recurring(self) -> float:
        """Seconds of what each such step takes."""
        return self.schedule + self.draft + self.inputs + self.target + self.verify + self.commit


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
