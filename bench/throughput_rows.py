"""Samples of a throughput run, and what they sum up to: a row per dtype, concurrency and mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

import numpy as np
from titan.bench.noise import Spread, ratio_spread
from titan.bench.profiling import Shares

from titan.bench.runners import DESCRIPTIONS, STATIC_MODES, TITAN
from titan.bench.runs import Percentiles, Run, StepCounts

Key = tuple[str, int, str]
"""Dtype, concurrency, mode."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one mode in one round; lists are per request, in the order of the workload."""

    dtype: str
    concurrency: int
    mode: str
    round_id: int
    tokens_per_second: float
    requests_per_second: float
    latencies: list[float]  # seconds from the start of the run, when all requests arrive, to the last token
    first_tokens: list[float]  # seconds to the first token
    between_tokens: list[float]  # mean seconds between two tokens; empty where a request ends with its batch
    mean_acceptance_length: float | None
    cpu_use: float | None  # of the threads that it may use, 0 to 1
    gpu_use: float | None
    steps: StepCounts | None  # of Titan
    num_equal: int | None  # outputs equal to those of Titan without a draft; None: that mode did not run
    load_average: float  # over the last minute, before the run


@dataclass(frozen=True, slots=True)
class ShareSample:
    """One profile of Titan; ``context_len`` is the mean over the profiled tokens of the tokens before them."""

    dtype: str
    concurrency: int
    mode: str
    context_len: float
    shares: Shares
    load_average: float


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one dtype and concurrency; percentiles are over all requests of all rounds, other means over the rounds."""

    dtype: str
    mode: str
    concurrency: int
    num_rounds: int
    tokens_per_second: Spread
    requests_per_second: float
    ratios: dict[str, Spread]  # of tokens per second, by the mode that it is compared with
    latency: Percentiles
    latency_ratios: dict[str, Spread]  # over continuous batching without a draft, by percentile: p50, p90, p99
    first_token: Percentiles | None
    between_tokens: Percentiles | None
    mean_acceptance_length: float | None
    acceptance_per_depth: list[float]
    mean_batch_size: float | None
    step_seconds: float | None  # median over the rounds
    step_ratio: Spread | None  # of step_seconds, over continuous batching without a draft
    cpu_use: float | None
    gpu_use: float | None
    mean_kv_usage: float | None
    peak_kv_usage: float | None
    host_share: float | None
    attention_share: float | None
    num_equal: int | None
    num_outputs: int
    load_average: float  # largest before a run


def make_sample(key: Key, round_id: int, run: Run, *, num_threads: int, num_equal: int | None, load_average: float) -> Sample:
    """Keep what the report needs of a run."""
    dtype, concurrency, mode = key
    requests = run.requests
    return Sample(
        dtype=dtype,
        concurrency=concurrency,
        mode=mode,
        round_id=round_id,
        tokens_per_second=run.tokens_per_second,
        requests_per_second=len(requests) / run.seconds,
        latencies=[request.finished_seconds for request in requests],
        first_tokens=[request.first_token_seconds for request in requests if request.first_token_seconds is not None],
        between_tokens=[
            request.between_tokens_seconds
            for request in requests
            if request.between_tokens_seconds is not None and mode not in STATIC_MODES
        ],
        mean_acceptance_length=run.mean_acceptance_length,
        cpu_use=None if run.cpu_seconds is None else run.cpu_seconds / run.seconds / num_threads,
        gpu_use=run.gpu_use,
        steps=run.steps,
        num_equal=num_equal,
        load_average=load_average,
    )


def make_rows(samples: Sequence[Sample], shares: Sequence[ShareSample]) -> list[Row]:
    """Sum up samples: dtypes and concurrencies in the order of measurement, modes in that of `DESCRIPTIONS`."""
    groups: dict[Key, list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.dtype, sample.concurrency, sample.mode), []).append(sample)
    places = list(dict.fromkeys(key[:2] for key in groups))
    order, names = list(DESCRIPTIONS), {(share.dtype, share.concurrency, share.mode): share.shares for share in shares}
    keys = sorted(groups, key=lambda key: (places.index(key[:2]), order.index(key[2])))
    return [_make_row(key, groups, names.get(key)) for key in keys]


def _make_row(key: Key, groups: Mapping[Key, Sequence[Sample]], shares: Shares | None) -> Row:
    dtype, concurrency, mode = key
    samples = groups[key]
    rates = _by_round(samples)
    ratios = {}
    for other_key, others in groups.items():
        spread = ratio_spread(rates, _by_round(others)) if other_key[:2] == key[:2] and other_key != key else None
        if spread is not None:
            ratios[other_key[2]] = spread
    baseline = groups.get((dtype, concurrency, TITAN), [])
    latency = Percentiles.of([seconds for sample in samples for seconds in sample.latencies])
    assert latency is not None, "a run has requests"
    steps = [sample.steps for sample in samples if sample.steps is not None]
    equal = [sample.num_equal for sample in samples if sample.num_equal is not None]
    return Row(
        dtype=dtype,
        mode=mode,
        concurrency=concurrency,
        num_rounds=len(samples),
        tokens_per_second=Spread.of(list(rates.values())),
        requests_per_second=_mean([sample.requests_per_second for sample in samples]) or 0.0,
        ratios=ratios,
        latency=latency,
        latency_ratios=_latency_ratios(samples, baseline if mode != TITAN else []),
        first_token=Percentiles.of([seconds for sample in samples for seconds in sample.first_tokens]),
        between_tokens=Percentiles.of([seconds for sample in samples for seconds in sample.between_tokens]),
        mean_acceptance_length=_mean([sample.mean_acceptance_length for sample in samples]),
        acceptance_per_depth=_acceptance_per_depth(steps),
        mean_batch_size=_mean([each.mean_batch_size for each in steps]),
        step_seconds=median(each.step_seconds for each in steps) if steps else None,
        step_ratio=None if mode == TITAN else ratio_spread(_step_seconds(samples), _step_seconds(baseline)),
        cpu_use=_mean([sample.cpu_use for sample in samples]),
        gpu_use=_mean([sample.gpu_use for sample in samples]),
        mean_kv_usage=_mean([each.mean_kv_usage for each in steps]),
        peak_kv_usage=max((each.peak_kv_usage for each in steps), default=None),
        host_share=None if shares is None else shares.host,
        attention_share=None if shares is None else shares.attention,
        num_equal=sum(equal) if equal else None,
        num_outputs=sum(len(sample.latencies) for sample in samples if sample.num_equal is not None),
        load_average=max(sample.load_average for sample in samples),
    )


def _by_round(samples: Sequence[Sample]) -> dict[int, float]:
    return {sample.round_id: sample.tokens_per_second for sample in samples}


def _step_seconds(samples: Sequence[Sample]) -> dict[int, float]:
    return {sample.round_id: sample.steps.step_seconds for sample in samples if sample.steps is not None}


def _latency_ratios(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Spread]:
    """Latency percentiles over those of the baseline, within the rounds."""
    ratios = {}
    for percent in (50, 90, 99):
        mine, others = (
            {sample.round_id: float(np.percentile(sample.latencies, percent)) for sample in each} for each in (samples, baseline)
        )
        spread = ratio_spread(mine, others)
        if spread is not None:
            ratios[f"p{percent}"] = spread
    return ratios


def _acceptance_per_depth(steps: Sequence[StepCounts]) -> list[float]:
    """Accepted share of the draft tokens proposed at depth 1, 2, ..."""
    proposed, accepted = (
        [sum(depth) for depth in zip_longest(*counts, fillvalue=0)]
        for counts in ([each.proposed_per_depth for each in steps], [each.accepted_per_depth for each in steps])
    )
    return [part / whole for part, whole in zip_longest(accepted, proposed, fillvalue=0) if whole]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
