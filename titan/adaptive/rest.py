"""Steps in a row in which nothing is decided or drafted."""

from __future__ import annotations

from dataclasses import dataclass

from titan.adaptive.load import Load


@dataclass(slots=True)
class Rest:
    """Sums up what such steps of the same requests take, those that something held up apart."""

    load: Load  # of the first; it has no candidates
    num_requests: int  # that emit tokens
    longest: float  # seconds that a step takes if nothing holds it up
    num_allowed: int = 0  # steps that may repeat it
    seconds: float = 0.0  # of all steps
    num_usual: int = 0
    usual_host_seconds: float = 0.0  # beside the passes
    usual_target_seconds: float = 0.0
    num_held_up: int = 0
    held_up_host_seconds: float = 0.0
    held_up_target_seconds: float = 0.0

    def note(self, seconds: float, target_seconds: float, draft_seconds: float = 0.0) -> None:
        """Add a step, and the time of its passes."""
        self.seconds += seconds
        if seconds <= self.longest:
            self.num_usual += 1
            self.usual_host_seconds += seconds - target_seconds - draft_seconds
            self.usual_target_seconds += target_seconds
        else:
            self.num_held_up += 1
            self.held_up_host_seconds += seconds - target_seconds - draft_seconds
            self.held_up_target_seconds += target_seconds

    @property
    def num_steps(self) -> int:
        """Number of the steps."""
        return self.num_usual + self.num_held_up

    @property
    def typical_seconds(self) -> tuple[float, float]:
        """Mean of the host's time and of the pass of the target: of usual steps, or of those held up if these are as many."""
        if self.num_usual > self.num_held_up:
            return self.usual_host_seconds / self.num_usual, self.usual_target_seconds / self.num_usual
        return self.held_up_host_seconds / self.num_held_up, self.held_up_target_seconds / self.num_held_up

    @property
    def mean_load(self) -> Load:
        """Load of a step in the middle: each has emitted a token of each request."""
        return self.load._replace(num_context_tokens=self.load.num_context_tokens + self.num_requests * (self.num_steps - 1) // 2)
