"""What streams of requests add up to, a row per rate and engine, where the engines saturate, and how that is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from titan.bench.noise import Spread, ratio_spread

from titan.bench.charts import LineChart, Series, cumulative_points
from titan.bench.draft_rows import NO_DRAFT
from titan.bench.open_loop import ATTAINED, Limits, Load, RequestTimes, find_limits
from titan.bench.report import Table, format_figure
from titan.bench.runs import Percentiles


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


def latency_answer(limits: Sequence[EngineLimits]) -> str:
    """Up to which rate each engine serves its requests within the target."""
    rates = {each.engine: each.limits.well_served_up_to for each in limits}
    found = [f"{f'up to {rate:g} requests/s' if rate else 'at no rate tried'} with {engine}" for engine, rate in rates.items()]
    return (
        f"At least {ATTAINED:.0%} of the requests are within the target {', '.join(found)}." if found else "Nothing was measured."
    )


def latency_table(rows: Sequence[Row]) -> Table:
    """Lay the latencies out; milliseconds where not said otherwise."""
    header = ["engine", "requests/s", "first token P50", "P90", "P99", "between tokens P50", "P90", "P99"]
    header += ["latency P50", "P90", "P99", "P50 x no draft", "P99 x no draft", "tokens/step"]
    cells = []
    for row in rows:
        percentiles = (row.to_first_token, row.between_tokens, row.latency)
        cells.append(
            [
                row.engine,
                f"{row.rate:g}",
                *(cell for each, digits in zip(percentiles, (0, 1, 0), strict=True) for cell in _cells(each, digits)),
                *("-" if each is None else each.format(2) for each in (row.p50_ratio, row.p99_ratio)),
                f"{row.mean_acceptance_length:.2f}",
            ]
        )
    return Table("Latency, ms", header, cells)


def _cells(percentiles: Percentiles | None, digits: int) -> list[str]:
    return [
        format_figure(None if percentiles is None else getattr(percentiles, name), digits, scale=1e3)
        for name in ("p50", "p90", "p99")
    ]


def load_table(rows: Sequence[Row]) -> Table:
    """Lay out how the rates were borne."""
    header = ["engine", "requests/s", "finished/s", "tokens/s", "goodput/s", "within target", "followed", "left at the end"]
    cells = [
        [
            row.engine,
            f"{row.rate:g}",
            row.requests_per_second.format(2),
            row.tokens_per_second.format(0),
            row.goodput.format(2),
            f"{row.attainment:.0%}",
            format_figure(row.following, 0, suffix="%", scale=100),
            f"{row.num_left:.1f}",
            "-" if row.excess is None else "yes" if row.excess > 0 else "no",
        ]
        for row in rows
    ]
    return Table("Load", [*header, "saturated"], cells)


def limits_table(limits: Sequence[EngineLimits]) -> Table:
    """Lay out where the engines saturate, in requests per second."""
    header = ["engine", "follows up to", "saturated from", f"{ATTAINED:.0%} within target up to", "most finished/s"]
    cells = [
        [
            each.engine,
            *(format_figure(rate, 2) for rate in (each.limits.followed_up_to, each.limits.saturated_from)),
            format_figure(each.limits.well_served_up_to, 2),
            f"{each.peak_requests_per_second:.2f}",
        ]
        for each in limits
    ]
    return Table("Saturation, requests/s", header, cells)


def latency_charts(rows: Sequence[Row], samples: Sequence[Sample]) -> list[LineChart]:
    """Goodput, latencies and throughput over the rate, and the distribution of the latency at each rate."""
    engines = dict.fromkeys(row.engine for row in rows)

    def over_rate(value: Callable[[Row], float | None], suffix: str = "") -> list[Series]:
        return [
            Series(f"{engine}{suffix}", [(row.rate, y) for row in rows if row.engine == engine and (y := value(row)) is not None])
            for engine in engines
        ]

    rate = "requests/s"
    tails = [*over_rate(lambda row: row.latency.p50, ", P50"), *over_rate(lambda row: row.latency.p99, ", P99")]
    charts = [
        LineChart("Goodput over load", rate, "requests within the target/s", over_rate(lambda row: row.goodput.median)),
        LineChart("Latency over load", rate, "seconds", tails),
        LineChart("Time to first token over load, P99", rate, "seconds", over_rate(lambda row: row.to_first_token.p99)),
        LineChart("Requests finished over load", rate, "finished/s", over_rate(lambda row: row.requests_per_second.median)),
    ]
    for each in dict.fromkeys(row.rate for row in rows):
        latencies: dict[str, list[float]] = {engine: [] for engine in engines}
        for sample in samples:
            if sample.rate == each:
                latencies[sample.engine] += [times.latency for times in sample.times]
        series = [Series(engine, cumulative_points(values)) for engine, values in latencies.items() if values]
        charts.append(LineChart(f"Latency at {each:g} requests/s", "seconds", "share of requests", series, style="steps"))
    return charts
