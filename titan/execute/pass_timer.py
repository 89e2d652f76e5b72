"""The seconds that the passes of a step take on the device."""

from __future__ import annotations

from typing import Any

from titan.core.step import StepPlan
from titan.core.step_times import Stopwatch
from titan.kernels.interfaces import Backend


class PassTimer:
    """Times the parts of a step's passes; steps of prompts alone, without logprobs of them, may run one step ahead of the device.

    Args:
        backend: runs the passes.
        runs_ahead: whether steps without results, which are those of prompts alone without logprobs, do not wait for their own
            passes.
    """

    def __init__(self, backend: Backend, *, runs_ahead: bool) -> None:
        self._backend, self._runs_ahead = backend, runs_ahead
        self._marks = list[Any]()
        self.pending: Any = None  # end mark of launched passes that nobody has waited for; None: there are none

    def start(self, plan: StepPlan, watch: Stopwatch) -> None:
        """Begin the first part; if the plan has results, wait for earlier launches, so that they are not timed as this step's."""
        if self.pending is not None and plan.has_results:
            self._wait(self._backend.mark(), watch)
        self._marks = [self._backend.mark()]

    def mark(self) -> None:
        """End a part: drafting, then the inputs of the target's pass, then this pass."""
        self._marks.append(self._backend.mark())

    def finish(self, watch: Stopwatch, *, has_results: bool) -> None:
        """Note the times of all parts; without results to fetch, run ahead if allowed, and wait for the step before instead."""
        before, self.pending = self.pending, None
        if has_results or not self._runs_ahead:
            watch.times.note_pass(self._backend.seconds_between(self._marks), watch.lap())
            return
        self.pending = self._marks[-1]
        watch.times.target += watch.lap()
        if before is not None:
            self._wait(before, watch)  # no further ahead: a new request waits for all that is launched

    def _wait(self, mark: Any, watch: Stopwatch) -> None:
        self._backend.seconds_between([mark])
        watch.times.backlog += watch.lap()
