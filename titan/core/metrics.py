"""Totals of an engine, counted during its steps and reported as `EngineMetrics`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started."""

    num_steps: int = 0
    num_sequence_steps: int = 0  # verifications and decodes: rows that emitted tokens
    num_emitted_tokens: int = 0  # final tokens included
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # tokens found in the prefix cache at admission
    num_admitted_tokens: int = 0  # tokens of the requests at admission
    num_finished_requests: int = 0
    num_swapped_out: int = 0  # preemptions by swap
    num_swapped_in: int = 0  # requests that went on from there
    proposed_per_depth: list[int] = field(default_factory=list)  # entry d-1 for depth d
    accepted_per_depth: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """What adaptive speculation knows, and decided in the last step in which a request might have drafted.

    Times are seconds, rates are tokens per second of all requests.
    """

    choice: str  # "on", "probe" (a few requests draft one token, to see whether it would pay), or "off"
    mean_draft_tokens: float  # per request that emitted tokens, since the start
    off_rate: float  # predicted without drafts
    on_rate: float  # predicted with the best number of drafts; 0: not compared yet
    acceptance: float  # expected probability that the first draft token of a request is accepted
    agreement: float  # accepted draft tokens as a multiple of those that the draft's own probabilities promise
    target_pass: dict[int, float]  # of a pass of the target by its rows, without context, as now expected
    target_context_token: float  # more for each token of context
    draft_pass: dict[int, float]  # the same of the draft; empty: no model drafts
    draft_context_token: float


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot of an engine."""

    num_running: int
    num_waiting: int
    num_finished_requests: int
    num_steps: int
    num_emitted_tokens: int
    mean_batch_size: float  # requests that emitted tokens, per step
    mean_acceptance_length: float  # tokens per request and target step, final token included
    proposed_per_depth: list[int]
    accepted_per_depth: list[int]
    acceptance_rate: float  # accepted / proposed draft tokens
    num_preemptions: int
    num_swapped: int  # waiting requests whose KV is in the swap space
    num_swapped_out: int  # preemptions by swap
    num_swapped_in: int  # requests that went on from the swap space
    prefix_cache_hit_rate: float  # tokens found cached / tokens admitted
    num_admitted_tokens: int  # of requests that looked for a prefix: at their start, and after each preemption by recompute
    num_cached_tokens: int  # of these, those found in the prefix cache
    num_swap_cached_tokens: int  # of these, those found in its second tier, the swap space
    num_evicted_blocks: int  # cached blocks that the KV cache had no more room for
    kv_usage: float  # share of blocks in use
    num_kv_blocks: int
    num_swap_blocks: int  # of the swap space
    num_used_swap_blocks: int  # with KV of swapped requests
    num_used_swap_bytes: int
    draft_coverage: float | None  # share of the running requests' committed tokens with valid draft KV; None: none running
    draft: str  # name of the drafter
    graph_hit_rate: float | None  # share of target and draft passes replayed as CUDA graphs; None: no such device
    speculation: SpeculationMetrics | None  # None: speculation is not adaptive, or nothing drafts


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, or 0 if ``whole`` is 0."""
    return part / whole if whole else 0.0
