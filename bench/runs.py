"""What one run of a workload shows, whichever engine ran it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One finished request; times in seconds since the start of the run, when all requests arrived."""

    token_ids: list[int]  # generated
    first_token_seconds: float | None
    finished_seconds: float

    @property
    def between_tokens_seconds(self) -> float | None:
        """Mean time between two tokens after the first; ``None`` for a single token or where the first is not known."""
        if self.first_token_seconds is None or len(self.token_ids) < 2:
            return None
        return (self.finished_seconds - self.first_token_seconds) / (len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What Titan's steps of a run add up to; means are over the steps."""

    num_steps: int
    step_seconds: float  # mean, what happens between two steps included
    mean_batch_size: float  # requests that emitted tokens, per step
    mean_kv_usage: float  # share of the KV blocks in use
    peak_kv_usage: float
    proposed_per_depth: list[int]  # draft tokens, entry d-1 for depth d
    accepted_per_depth: list[int]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload; ``None`` is what the engine does not tell."""

    requests: list[RequestRun]  # in the order of the workload
    seconds: float
    cpu_seconds: float | None  # of all threads
    mean_acceptance_length: float | None  # tokens per request and step of the target
    gpu_use: float | None = None  # mean over samples, 0 to 1
    steps: StepCounts | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of some seconds, interpolated between the two nearest."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Sum up values; ``None`` if there are none."""
        return cls(*np.percentile(values, [50, 90, 99]).tolist()) if values else None


def count_equal(run: Run, reference: Run) -> int:
    """Count the requests whose tokens equal those of the same place in ``reference``, one by one."""
    pairs = zip(run.requests, reference.requests, strict=True)
    return sum(mine.token_ids == theirs.token_ids for mine, theirs in pairs)
