"""Tables and plots of a throughput run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan.bench.noise import Spread

from titan.bench.charts import LineChart, Series, StackedBars, cumulative_points
from titan.bench.report import Table, format_figure
from titan.bench.runners import TITAN, TITAN_DRAFT, TITAN_SINGLE
from titan.bench.runs import Percentiles
from titan.bench.throughput_rows import Row, Sample, ShareSample

HEADLINE = {
    "tokens/s over no batching": 9.3,
    "tokens/s over continuous batching": 1.5,
    "P50 latency over continuous batching": 0.53,
    "P99 latency over continuous batching": 0.39,
}
"""Of the Titan design, on large models and GPUs."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure of the Titan design's headline, and what this run has in its place."""

    name: str
    headline: float
    measured: Spread | None
    bound: str  # what makes it so on this machine
    dtype: str
    concurrency: int


def throughput_answer(rows: Sequence[Row], shares: Sequence[ShareSample]) -> str:
    """What speculation gains at each concurrency; of a run without it, the fastest mode, or how much of a step the host takes."""
    drafts = [(row, row.ratios[TITAN]) for row in rows if row.mode == TITAN_DRAFT and TITAN in row.ratios]
    if drafts:
        found = [f"{ratio.format(2)} at {row.concurrency} at once in {row.dtype}" for row, ratio in drafts]
        return f"Tokens/s with speculation over none: {', '.join(found)}."
    if rows:
        best = max(rows, key=lambda row: row.tokens_per_second.median)
        rate = best.tokens_per_second.format(1)
        return f"Fastest: {best.mode}, {rate} tokens/s at {best.concurrency} at once in {best.dtype}."
    hosts = [each.shares.host for each in shares]
    return f"The host takes {min(hosts):.0%} to {max(hosts):.0%} of a step." if hosts else "Nothing was measured."


def throughput_table(rows: Sequence[Row]) -> Table:
    """Speed, and whether the outputs are the same."""
    header = ["dtype", "mode", "at once", "tokens/s", f"x {TITAN}", "requests/s", "tokens/step", "equal outputs", "load"]
    cells = [
        [
            *_names(row),
            row.tokens_per_second.format(1),
            format_ratio(row.ratios.get(TITAN)),
            f"{row.requests_per_second:.2f}",
            format_figure(row.mean_acceptance_length, 2),
            "-" if row.num_equal is None else f"{row.num_equal}/{row.num_outputs}",
            f"{row.load_average:.2f}",
        ]
        for row in rows
    ]
    return Table("Throughput", header, cells, num_text_columns=2)


def ratio_table(rows: Sequence[Row]) -> Table:
    """Tokens per second of Titan, without and with the draft, over every other mode."""
    others = list(dict.fromkeys(row.mode for row in rows))
    mine = [row for row in rows if row.mode in (TITAN, TITAN_DRAFT)]
    used = [other for other in others if any(other in row.ratios for row in mine)]
    header = ["dtype", "mode", "at once", *(f"x {other}" for other in used)]
    cells = [[*_names(row), *(format_ratio(row.ratios.get(other)) for other in used)] for row in mine]
    return Table("Titan over the others, tokens/s", header, cells, num_text_columns=2)


def latency_table(rows: Sequence[Row]) -> Table:
    """Milliseconds per request, to the first token, and between tokens."""
    header = ["dtype", "mode", "at once", "P50 ms", "P90", "P99", f"P50 x {TITAN}", f"P99 x {TITAN}"]
    header += ["first token P50", "P99", "between tokens P50", "P99"]
    cells = [
        [
            *_names(row),
            *_milliseconds(row.latency, "p50", "p90", "p99"),
            *(format_ratio(row.latency_ratios.get(name)) for name in ("p50", "p99")),
            *_milliseconds(row.first_token, "p50", "p99"),
            *_milliseconds(row.between_tokens, "p50", "p99"),
        ]
        for row in rows
    ]
    return Table("Latency", header, cells, num_text_columns=2)


def machine_table(rows: Sequence[Row]) -> Table:
    """How busy processor and KV blocks are, and where a step's time goes."""
    header = ["dtype", "mode", "at once", "CPU", "GPU", "batch", "KV mean", "KV peak", "ms/step", "host", "attention"]
    cells = [
        [
            *_names(row),
            _percent(row.cpu_use),
            _percent(row.gpu_use),
            format_figure(row.mean_batch_size, 1),
            _percent(row.mean_kv_usage),
            _percent(row.peak_kv_usage),
            format_figure(row.step_seconds, 2, scale=1e3),
            _percent(row.host_share),
            _percent(row.attention_share),
        ]
        for row in rows
    ]
    return Table("Machine", header, cells, num_text_columns=2)


def profile_table(samples: Sequence[ShareSample]) -> Table:
    """Profiles, one line per repetition."""
    header = ["dtype", "mode", "at once", "context", "steps", "ms/step", "host", "draft", "attention", "load"]
    cells = [
        [
            sample.dtype,
            sample.mode,
            str(sample.concurrency),
            f"{sample.context_len:.0f}",
            str(sample.shares.num_steps),
            f"{sample.shares.step_seconds * 1e3:.2f}",
            _percent(sample.shares.host),
            _percent(sample.shares.draft),
            _percent(sample.shares.attention),
            f"{sample.load_average:.2f}",
        ]
        for sample in samples
    ]
    return Table("Parts of a step", header, cells, num_text_columns=2)


def make_claims(rows: Sequence[Row]) -> list[Claim]:
    """The headline of the Titan design against the row of the draft with the most requests at once, per dtype."""
    claims = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        drafts = [row for row in rows if row.dtype == dtype and row.mode == TITAN_DRAFT]
        if not drafts:
            continue
        row = max(drafts, key=lambda each: each.concurrency)
        others = {each.mode: each for each in rows if (each.dtype, each.concurrency) == (dtype, row.concurrency)}
        batching, drafting = _bound_of_batching(others.get(TITAN), others.get(TITAN_SINGLE)), _bound_of_drafts(row)
        spreads = [row.ratios.get(TITAN_SINGLE), row.ratios.get(TITAN), *(row.latency_ratios.get(name) for name in ("p50", "p99"))]
        latency = "1 over the gain in tokens/s, as all requests are there from the start"
        bounds = [
            f"{batching}, times the gain of drafts",
            drafting,
            latency,
            "the same, for outputs whose drafts are accepted least",
        ]
        claims += [
            Claim(name, headline, measured, bound, dtype, row.concurrency)
            for (name, headline), measured, bound in zip(HEADLINE.items(), spreads, bounds, strict=True)
        ]
    return claims


def _bound_of_batching(batched: Row | None, single: Row | None) -> str:
    if batched is None or single is None or single.step_ratio is None or batched.mean_batch_size is None:
        return "batching"
    size, stretch = batched.mean_batch_size, 1 / single.step_ratio.median
    return f"batching: {size:.1f} requests per step of {stretch:.2f}x the time of one request's = {size / stretch:.2f}x"


def _bound_of_drafts(row: Row) -> str:
    if row.step_ratio is None or not row.mean_acceptance_length:
        return "drafts"
    length, stretch = row.mean_acceptance_length, row.step_ratio.median
    return f"drafts: {length:.2f} tokens per step of {stretch:.2f}x the time of one without = {length / stretch:.2f}x"


def claim_table(claims: Sequence[Claim]) -> Table:
    """The headline beside what was measured."""
    header = ["dtype", "figure", "what bounds it here", "at once", "headline", "measured"]
    cells = [
        [claim.dtype, claim.name, claim.bound, str(claim.concurrency), f"{claim.headline:g}", format_ratio(claim.measured)]
        for claim in claims
    ]
    return Table("The Titan design's headline and this machine", header, cells, num_text_columns=3)


def bound_table(rows: Sequence[Row], shares: Sequence[ShareSample]) -> Table:
    """What bounds the gain of drafts: tokens per step over the time of a step with drafts, in steps without, and its parts.

    That is the formula of Leviathan et al. 2023 (arXiv 2211.17192, theorem 3.8) with measured steps in place of its cost ratio:
    the median over the rounds of the ratio within a round, as for the measured gain beside it.
    """
    header = ["dtype", "at once", "tokens/step", "step x no draft", "draft passes", "target pass", "host"]
    header += ["tokens/step over step", "measured"]
    parts = {(each.dtype, each.concurrency): each.shares for each in shares if each.mode == TITAN_DRAFT}
    cells = []
    for row in rows:
        if row.mode != TITAN_DRAFT or row.step_ratio is None or not row.mean_acceptance_length:
            continue
        stretch, part = row.step_ratio.median, parts.get((row.dtype, row.concurrency))
        cells.append(
            [
                row.dtype,
                str(row.concurrency),
                f"{row.mean_acceptance_length:.2f}",
                row.step_ratio.format(2),
                *(
                    format_figure(None if part is None else getattr(part, name), 2, scale=stretch)
                    for name in ("draft", "target", "host")
                ),
                f"{row.mean_acceptance_length / stretch:.2f}",
                format_ratio(row.ratios.get(TITAN)),
            ]
        )
    return Table("What bounds the gain of drafts, in steps without drafts", header, cells)


def bound_notes(rows: Sequence[Row]) -> list[str]:
    """How to read `bound_table`, if there is one."""
    if not any(row.mode == TITAN_DRAFT for row in rows):
        return []
    return [
        "The headline counts on passes that take as long for a few more tokens, as on a GPU that waits for its weights. What they "
        'take here stands in the last table: "target pass" is the verification of all drafts over a whole step without drafts.'
    ]


def make_charts(rows: Sequence[Row], samples: Sequence[Sample], shares: Sequence[ShareSample]) -> list[LineChart | StackedBars]:
    """All plots that the samples allow."""
    charts: list[LineChart | StackedBars] = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        mine = [row for row in rows if row.dtype == dtype]
        charts += [_throughput_chart(dtype, mine), _latency_chart(dtype, mine, samples)]
    drafts = [row for row in rows if row.acceptance_per_depth]
    if drafts:
        depths = [
            Series(f"{row.dtype}, {row.concurrency} at once", [(i + 1, rate) for i, rate in enumerate(row.acceptance_per_depth)])
            for row in drafts
        ]
        charts.append(LineChart("Acceptance per depth", "depth of the draft token", "accepted / proposed", depths))
        charts.append(_speed_up_chart(samples))
    for dtype in dict.fromkeys(share.dtype for share in shares):
        charts.append(_split_chart(dtype, [share for share in shares if share.dtype == dtype]))
    return charts


def format_ratio(spread: Spread | None) -> str:
    """Write a ratio with its spread."""
    return "-" if spread is None else spread.format(2)


def _throughput_chart(dtype: str, rows: Sequence[Row]) -> LineChart:
    series = []
    for mode in dict.fromkeys(row.mode for row in rows):
        mine = sorted((row for row in rows if row.mode == mode), key=lambda row: row.concurrency)
        rates = [row.tokens_per_second for row in mine]
        points = [(row.concurrency, rate.median) for row, rate in zip(mine, rates, strict=True)]
        series.append(Series(mode, points, [(rate.minimum, rate.maximum) for rate in rates]))
    return LineChart(f"Throughput, {dtype}", "requests at once", "tokens/s", series, is_log_x=True)


def _latency_chart(dtype: str, rows: Sequence[Row], samples: Sequence[Sample]) -> LineChart:
    most = max(row.concurrency for row in rows)
    series = []
    for row in rows:
        if row.concurrency == most:
            mine = [sample for sample in samples if (sample.dtype, sample.concurrency, sample.mode) == (dtype, most, row.mode)]
            series.append(Series(row.mode, cumulative_points([seconds for sample in mine for seconds in sample.latencies])))
    title = f"Latency of requests, {dtype}, {most} at once"
    return LineChart(title, "seconds", "share of the requests", series, style="steps")


def _speed_up_chart(samples: Sequence[Sample]) -> LineChart:
    base = {(each.dtype, each.concurrency, each.round_id): each.tokens_per_second for each in samples if each.mode == TITAN}
    points: dict[str, list[tuple[float, float]]] = {}
    for each in samples:
        rate = base.get((each.dtype, each.concurrency, each.round_id))
        if each.mode == TITAN_DRAFT and rate and each.mean_acceptance_length:
            name = f"{each.dtype}, {each.concurrency} at once"
            points.setdefault(name, []).append((each.mean_acceptance_length, each.tokens_per_second / rate))
    series = [Series(name, mine) for name, mine in points.items()]
    return LineChart("Speed-up over acceptance", "mean acceptance length, tokens", "tokens/s over no draft", series, style="points")


def _split_chart(dtype: str, samples: Sequence[ShareSample]) -> StackedBars:
    milliseconds = [sample.shares.step_seconds * 1e3 for sample in samples]
    parts = {
        "host": [sample.shares.host * whole for sample, whole in zip(samples, milliseconds, strict=True)],
        "draft passes": [sample.shares.draft * whole for sample, whole in zip(samples, milliseconds, strict=True)],
        "target pass": [sample.shares.target * whole for sample, whole in zip(samples, milliseconds, strict=True)],
    }
    bars = [f"{sample.mode}\n{sample.concurrency} at once" for sample in samples]
    return StackedBars(f"Where a step's time goes, {dtype}", "ms per step", bars, parts)


def _names(row: Row) -> list[str]:
    return [row.dtype, row.mode, str(row.concurrency)]


def _milliseconds(percentiles: Percentiles | None, *names: str) -> list[str]:
    return [format_figure(None if percentiles is None else getattr(percentiles, name), 1, scale=1e3) for name in names]


def _percent(share: float | None) -> str:
    return format_figure(share, 0, suffix=" %", scale=100)
