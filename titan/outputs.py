"""What a user gets back: `RequestOutput`, `CompletionOutput` and their metrics; names follow vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestMetrics:
    """Times (seconds, monotonic clock) and counts of one request."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prefix-cache hit length at the last admission
    num_preemptions: int = 0
    num_sequence_steps: int = 0  # target steps that emitted tokens for this request
    proposed_per_depth: list[int] = field(default_factory=list)  # draft tokens, entry d-1 for depth d
    accepted_per_depth: list[int] = field(default_factory=list)
    num_emitted_tokens: int = 0  # final tokens included

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens proposed."""
        return sum(self.proposed_per_depth)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens accepted; final (recovered or bonus) tokens are not counted."""
        return sum(self.accepted_per_depth)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target step, final token included."""
        return self.num_emitted_tokens / self.num_sequence_steps if self.num_sequence_steps else 0.0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence.

    ``finish_reason`` is "stop", "length" or "abort" once finished; ``stop_reason`` is the stop token id or stop
    string that ended it, ``None`` for end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of one request; ``error`` says why it was aborted, when it was."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
