"""Results for the user: `RequestOutput`, `CompletionOutput` and their metrics; names follow vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest


@dataclass(slots=True)
class RequestMetrics:
    """Times (seconds, monotonic clock) and counts of one completion, or in a `RequestOutput` of all completions together."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache, or at a sibling that uses it, when it started
    num_preemptions: int = 0
    num_sequence_steps: int = 0  # target steps that emitted tokens for this request
    proposed_per_depth: list[int] = field(default_factory=list)  # draft tokens, entry d-1 for depth d
    accepted_per_depth: list[int] = field(default_factory=list)
    num_emitted_tokens: int = 0  # final tokens included

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens proposed."""
        return sum(self.proposed_per_depth)

    @property
    def num_accepted_tokens(self) -> int:
        """Number of draft tokens accepted; final (recovered or bonus) tokens are not counted."""
        return sum(self.accepted_per_depth)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per target step, final token included."""
        return self.num_emitted_tokens / self.num_sequence_steps if self.num_sequence_steps else 0.0


def merge_metrics(parts: Sequence[RequestMetrics]) -> RequestMetrics:
    """Merge the metrics of a request's completions, at least one: counts are summed, times span all of them."""
    if len(parts) == 1:  # a stream asks for each output
        [part] = parts
        return replace(part, proposed_per_depth=[*part.proposed_per_depth], accepted_per_depth=[*part.accepted_per_depth])

    def first(times: Iterable[float | None]) -> float | None:
        return min((time for time in times if time is not None), default=None)

    def total(counts: Iterable[list[int]]) -> list[int]:
        return [sum(depth) for depth in zip_longest(*counts, fillvalue=0)]

    finished_times = [part.finished_time for part in parts if part.finished_time is not None]
    return RequestMetrics(
        arrival_time=min(part.arrival_time for part in parts),
        first_scheduled_time=first(part.first_scheduled_time for part in parts),
        first_token_time=first(part.first_token_time for part in parts),
        finished_time=max(finished_times) if len(finished_times) == len(parts) else None,
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
        num_preemptions=sum(part.num_preemptions for part in parts),
        num_sequence_steps=sum(part.num_sequence_steps for part in parts),
        proposed_per_depth=total(part.proposed_per_depth for part in parts),
        accepted_per_depth=total(part.accepted_per_depth for part in parts),
        num_emitted_tokens=sum(part.num_emitted_tokens for part in parts),
    )


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token under the model itself, before any sampling option is applied.

    ``rank`` 1 is the most likely token; ``decoded_token`` is the token's text, ``None`` without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence, the ``index``-th of its request.

    ``logprobs`` has, if requested, an entry per token: by token id, first the token itself, then the most likely ones.
    ``cumulative_logprob`` is the sum over the tokens themselves. The outputs of a stream share these entries.
    ``finish_reason`` is "stop", "length", "abort" (it was asked for, or took too long) or "error" once finished; ``stop_reason`` is
    the stop token id or stop string that ended it, ``None`` for end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of one request, ``n`` completions of one prompt; ``error`` says why one of them was aborted or failed.

    The outputs of a stream share ``prompt_token_ids``. ``prompt_logprobs`` has, if requested, an entry per prompt token, like those
    of ``CompletionOutput.logprobs``; the first is ``None``, for nothing predicts it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache, those of all completions together."""
        return self.metrics.num_cached_tokens
