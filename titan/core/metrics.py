"""Totals of an engine, counted during its steps and reported as `EngineMetrics`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import ceil


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started."""

    num_steps: int = 0
    num_sequence_steps: int = 0  # verifications and decodes: rows that emitted tokens
    num_drafted_steps: int = 0  # of these, verifications: rows that had drafts
    num_emitted_tokens: int = 0  # final tokens included
    num_rows: int = 0  # tokens that the target's passes computed, drafts included
    num_context_tokens: int = 0  # tokens before these, of all requests, summed over passes
    num_preemptions: int = 0
    num_admitted_tokens: int = 0  # tokens of the requests at admission
    num_cached_tokens: int = 0  # of these, those found in the prefix cache, or at a sibling that uses it
    num_finished_requests: int = 0
    num_swapped_out: int = 0  # preemptions by swap
    num_swapped_in: int = 0  # requests that went on from the swap space
    proposed_per_depth: list[int] = field(default_factory=list)  # entry d-1 for depth d
    accepted_per_depth: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftMetrics:
    """Totals of drafting."""

    num_sequence_steps: int  # rows of steps that emitted tokens
    num_drafted_steps: int  # of these, those that had drafts
    proposed_per_depth: list[int]  # entry d-1 for depth d
    accepted_per_depth: list[int]
    num_proposed_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float  # tokens per request and target step, final token included
    mean_drafted_length: float  # the same over the steps in which a request had drafts; 0: there were none


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """The estimates of adaptive speculation, and its choice in the last step in which a request might have drafted.

    Times are seconds, rates are tokens per second of all requests; with ``speculation_target="latency"`` the tokens that drafts
    bring are weighted by request in them, with weights of mean 1.
    """

    choice: str  # "on" (also in steps without drafts that show what these cost), "probe" (a look at whether it pays), or "off"
    mean_draft_tokens: float  # per request and step, since the start
    off_rate: float  # predicted without drafts; 0: not compared yet
    on_rate: float  # predicted with the best number of drafts; 0: the same
    acceptance: float  # expected probability that the first draft token of a request is accepted
    agreement: float  # accepted draft tokens as a multiple of those that the draft's own probabilities promise
    target_pass: dict[int, float]  # rows of a pass of the target between drafts -> expected time, without context
    target_context_token: float  # time that each token of context adds to it
    draft_pass: dict[int, float]  # likewise of the draft; empty: no model drafts
    draft_context_token: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of some numbers, by nearest rank: ``p90`` is the least of them that at least 90 % do not exceed."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, numbers: Collection[float]) -> Percentiles | None:
        """Return the percentiles of numbers; ``None`` if there are none."""
        if not numbers:
            return None
        ordered = sorted(numbers)
        return cls(*(ordered[ceil(percent * len(ordered) / 100) - 1] for percent in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Shares of the time of steps; on a device that works asynchronously, ``draft`` and ``target`` are by the times there."""

    schedule: float
    draft: float
    target: float
    verify: float
    rest: float


@dataclass(frozen=True, slots=True)
class Shortages:
    """Shares of steps in which requests had to wait or to give way, by what was lacking."""

    requests: float  # max_batch_size requests were running
    tokens: float  # the step had no prompt tokens left
    blocks: float  # of the KV cache


@dataclass(frozen=True, slots=True)
class RecentMetrics:
    """Metrics of the last steps, at most 1,024, since the last ``swap_draft``."""

    num_steps: int
    tokens_per_s: float  # emitted in the last 10 s, or since the first of these steps if that is less
    busy_share: float  # share spent in steps of the time from the start of the first to the end of the last
    mean_acceptance_length: float  # tokens per request and target step, final token included
    mean_rows: float  # tokens in a pass of the target, of all requests, drafts included
    mean_context_tokens: float  # tokens before them, of all requests
    row_cost: float | None  # how much longer a pass takes with twice these rows: 0 = no longer, 1 = twice; None: not measured
    step_s: Percentiles | None  # seconds of a step; None: there was none
    split: StepSplit
    shortages: Shortages


@dataclass(frozen=True, slots=True)
class TierMetrics:
    """Blocks of the KV cache, or of the swap space, for target and draft together; cached prefixes do not count as used."""

    num_blocks: int
    num_used_blocks: int
    num_bytes: int
    num_used_bytes: int


@dataclass(frozen=True, slots=True)
class UserMetrics:
    """Tokens that a user was given."""

    num_prompt_tokens: int  # of requests that have started, without those that were found cached then
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot of an engine; totals are since its start, over all drafts, unless stated otherwise."""

    model_impl: str  # the implementation of the target's layers: "native", "transformers" or "gathered"; see docs/models.md
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
    num_cached_tokens: int  # of these, those found in the prefix cache, or at a sibling that uses it
    num_swap_cached_tokens: int  # of these, those found in the second tier of the prefix cache, the swap space
    num_evicted_blocks: int  # cached blocks that left the KV cache to make room
    kv_usage: float  # share of blocks in use
    num_kv_blocks: int
    kv_cache: TierMetrics  # on the device
    swap_space: TierMetrics  # in the host's memory
    users: dict[str | None, UserMetrics]  # the last 1,000 who were served, and those with requests in flight
    queue_s: Percentiles | None  # seconds from arrival to start, of the last 1,024 requests that started; None: none has
    utilization: float | None  # share of time for which the device was lately busy; None: it does not report it
    recent: RecentMetrics
    draft_coverage: float | None  # share of tokens with valid draft KV, of running requests that may draft; None: none, or no KV
    draft: str  # name of the drafter
    current_draft: DraftMetrics  # since the start or the last swap_draft
    num_draft_failures: int  # of the same time: failures of the drafter, each with a warning and without drafts
    draft_vocabulary: float | None  # share of the target's tokens that the draft model can propose; None: no model, or not compared
    draft_weight_bits: int | None  # 8: the draft model's matrices were rounded; None: they were not, or no model drafts
    graph_hit_rate: float | None  # share of target and draft passes replayed as CUDA graphs; None: no such device
    profile_s: float  # that the last measurement of passes took, at the start or a swap; 0: there was none yet
    speculation: SpeculationMetrics | None  # None: it is not adaptive, nothing drafts, or a policy of one's own has none


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, or 0 if ``whole`` is 0."""
    return part / whole if whole else 0.0
