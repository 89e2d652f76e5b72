"""What streams of requests add up to: a row per rate and engine, and where the engines saturate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from titan.bench.noise import Spread, ratio_spread
from titan.bench.open_loop import Limits, Load, RequestTimes, find_limits
from titan.bench.runs import Percentiles

NO_DRAFT = "no draft"


@dataclass(frozen=True, slots=True)
class Sample:
    """One stream of requests through one engine."""

    rate: float  # that was asked for, requests per second
    engine: str
    round_id: int
    load: Load
    times: list[RequestTimes]
    mean_acceptance_length: float


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one rate; percentiles are over the requests of all rounds, in seconds."""

    rate: float
    engine: str
    num_rounds: int
    requests_per_second: Spread
    tokens_per_second: Spread
    goodput: Spread
    attainment: float  # mean over the rounds
    following: float | None  # mean over the rounds
    num_left: float  # mean over the rounds
    excess: float | None  # mean over the rounds
    to_first_token: Percentiles
    between_tokens: Percentiles | None  # None: no request has two tokens
    latency: Percentiles
    p50_ratio: Spread | None  # of the latency, to no draft within the rounds; None: that failed
    p99_ratio: Spread | None
    mean_acceptance_length: float


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the sweep found of one engine."""

    engine: str
    limits: Limits
    peak_requests_per_second: float


def make_rows(samples: Sequence[Sample]) -> list[Row]:
    """Sum the rounds up: a row per rate and engine, in ascending rates."""
    groups: dict[tuple[float, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.rate, sample.engine), []).append(sample)
    rows = []
    for (rate, engine), mine in sorted(groups.items(), key=lambda group: group[0][0]):
        base = groups.get((rate, NO_DRAFT), [])  # none if that engine failed
        times = [each for sample in mine for each in sample.times]
        excess = [sample.load.excess for sample in mine if sample.load.excess is not None]
        following = [sample.load.following for sample in mine if sample.load.following is not None]
        rows.append(
            Row(
                rate,
                engine,
                len(mine),
                requests_per_second=Spread.of([sample.load.requests_per_second for sample in mine]),
                tokens_per_second=Spread.of([sample.load.tokens_per_second for sample in mine]),
                goodput=Spread.of([sample.load.goodput for sample in mine]),
                attainment=mean(sample.load.attainment for sample in mine),
                following=mean(following) if following else None,
                num_left=mean(sample.load.num_left for sample in mine),
                excess=mean(excess) if excess else None,
                to_first_token=_percentiles([each.to_first_token for each in times]),
                between_tokens=Percentiles.of([each.between_tokens for each in times if each.between_tokens is not None]),
                latency=_percentiles([each.latency for each in times]),
                p50_ratio=ratio_spread(*(_latencies(group, "p50") for group in (mine, base))),
                p99_ratio=ratio_spread(*(_latencies(group, "p99") for group in (mine, base))),
                mean_acceptance_length=mean(sample.mean_acceptance_length for sample in mine),
            )
        )
    return rows


def _percentiles(values: Sequence[float]) -> Percentiles:
    """Of at least one value."""
    found = Percentiles.of(values)
    assert found is not None
    return found


def _latencies(samples: Sequence[Sample], percentile: str) -> dict[int, float]:
    """A percentile of the latency by round."""
    return {sample.round_id: getattr(_percentiles([each.latency for each in sample.times]), percentile) for sample in samples}


def make_limits(rows: Sequence[Row]) -> list[EngineLimits]:
    """What the sweep found, by engine."""
    return [
        EngineLimits(
            engine,
            find_limits((row.rate, row.excess, row.attainment) for row in rows if row.engine == engine),
            max(row.requests_per_second.median for row in rows if row.engine == engine),
        )
        for engine in dict.fromkeys(row.engine for row in rows)
    ]
