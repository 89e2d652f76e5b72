"""What one run of a workload shows, whichever engine ran it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from titan.bench.samples import Sample


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One finished request; times in seconds since the start of the run."""

    token_ids: list[int]  # generated
    finished: float
    first_token: float | None  # None: not known
    arrival: float = 0.0

    @property
    def latency(self) -> float:
        return self.finished - self.arrival

    @property
    def to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def between_tokens(self) -> float | None:
        """Mean time between two tokens after the first; ``None`` for a single token or where the first is not known."""
        if self.first_token is None or len(self.token_ids) < 2:
            return None
        return (self.finished - self.first_token) / (len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload; ``figures`` are those of a `Sample` that the engine tells."""

    requests: list[RequestRun]  # in the order of the workload
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def rates(self) -> dict[str, float]:
        """Tokens and requests per second."""
        return {"tokens/s": self.num_tokens / self.seconds, "requests/s": len(self.requests) / self.seconds}


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds, interpolated between the two nearest, as "NAME P50, ms" and so on."""
    return {f"{name} P{percent}, ms": 1e3 * float(np.percentile(seconds, percent)) for percent in (50, 90, 99)}


def latency_figures(requests: Sequence[RequestRun]) -> dict[str, float]:
    """Percentiles over the requests of "latency", and of "first token" and "between tokens" as far as these are known."""
    kinds: dict[str, list[float | None]] = {
        "latency": [request.latency for request in requests],
        "first token": [request.to_first_token for request in requests],
        "between tokens": [request.between_tokens for request in requests],
    }
    known = {kind: [value for value in values if value is not None] for kind, values in kinds.items()}
    return {name: figure for kind, values in known.items() if values for name, figure in percentiles(kind, values).items()}


def share_equal(run: Run, reference: Run) -> float:
    """Share of the requests whose tokens equal those of the same place in ``reference``, one by one."""
    pairs = zip(run.requests, reference.requests, strict=True)
    return sum(mine.token_ids == theirs.token_ids for mine, theirs in pairs) / len(run.requests)


def with_equal_outputs(samples: Sequence[Sample], runs: Iterable[Run], reference: Run) -> list[Sample]:
    """Add "equal outputs" to the samples of runs on one workload: the share that equals those of ``reference``."""
    pairs = zip(samples, runs, strict=True)
    return [replace(each, figures={**each.figures, "equal outputs": share_equal(run, reference)}) for each, run in pairs]
