"""Steps in a row in which nothing is decided or drafted."""

from __future__ import annotations

from dataclasses import dataclass, field

from titan.adaptive.load import Load


@dataclass(slots=True)
class StepSums:
    """Seconds of steps."""

    num_steps: int = 0
    host_seconds: float = 0.0  # beside the passes
    target_seconds: float = 0.0

    def add(self, host_seconds: float, target_seconds: float) -> None:
        """Add a step."""
        self.num_steps += 1
        self.host_seconds += host_seconds
        self.target_seconds += target_seconds


@dataclass(slots=True)
class Rest:
    """Sums up what such steps of the same requests take, those that something held up apart."""

    load: Load  # of the first; it has no candidates
    num_requests: int  # that emit tokens
    longest: float  # seconds that a step takes if nothing holds it up
    num_allowed: int = 0  # steps that may repeat it
    seconds: float = 0.0  # of all steps
    usual: StepSums = field(default_factory=StepSums)
    held_up: StepSums = field(default_factory=StepSums)

    def note(self, seconds: float, target_seconds: float, draft_seconds: float = 0.0) -> None:
        """Add a step, and the time of its passes."""
        self.seconds += seconds
        sums = self.usual if seconds <= self.longest else self.held_up
        sums.add(seconds - target_seconds - draft_seconds, target_seconds)

    @property
    def num_steps(self) -> int:
        """Number of the steps."""
        return self.usual.num_steps + self.held_up.num_steps

    @property
    def typical_seconds(self) -> tuple[float, float]:
        """Mean of the host's time and of the pass of the target: of usual steps, or of those held up if these are as many."""
        sums = self.usual if self.usual.num_steps > self.held_up.num_steps else self.held_up
        return sums.host_seconds / sums.num_steps, sums.target_seconds / sums.num_steps

    @property
    def mean_load(self) -> Load:
        """Load of a step in the middle: each has emitted a token of each request."""
        return self.load._replace(num_context_tokens=self.load.num_context_tokens + self.num_requests * (self.num_steps - 1) // 2)
