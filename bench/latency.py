"""Latency under load: requests arrive at their own times, at one rate after another, with and without a draft.

    titan bench latency --quick                                          a first look, in less than a minute
    titan bench latency                                                  the demo pair, rates around what it can bear
    titan bench latency --rate 2 4 8 --slo-ttft 0.5
    titan bench latency --model DIR/target --draft-model DIR/draft

Arrivals are a Poisson process, an open loop: the next request does not wait for an answer. All rates use the same draws, stretched,
and both engines the same requests, in turns. Temperature 0, and the end of sequence is ignored. Ctrl-C ends the measurement and
reports what there is.

Latencies count from a request's arrival. The time between tokens is a request's mean after its first token, because speculation
emits several at once. An engine is saturated if, while the second half of the requests arrives, its queue grows by more than a
tenth of them and two standard deviations of the queue's own noise; a stream of few requests shows only large overloads. For that,
the numbers in flight at two moments are taken as Poisson distributed, with one more than those at the first moment as their mean
(one more, so that an engine idle just then has some noise as well).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product, takewhile

from titan import LLM
from titan.bench.engine_run import make_idle, run_workload
from titan.bench.loading import engine_options
from titan.bench.options import above_zero, add_draft, add_rounds, add_target, bench_parser, model_options, parse, positive
from titan.bench.prompts import prompt_stream
from titan.bench.report import Report, count, figure_table, measure_and_publish
from titan.bench.runs import RequestRun, Run, latency_figures
from titan.bench.samples import NO_DRAFT, Row, Sample, Spread, make_rows, rotated, with_ratio
from titan.bench.turns import Turns
from titan.bench.workloads import Lengths, Workload, draw_arrivals, take_workload
from titan.core.dtypes import RUN_DTYPES

RATE = "rate, requests/s"
"""The label of the rate at which requests arrive."""
ATTAINED = 0.9
"""Share of requests within the service-level target from which a rate counts as served well."""
UNKNOWN = Spread.of([math.nan])
"""Spread of a stream that is too short to say: neither followed nor saturated."""
SERVED = f"{ATTAINED:.0%} within target up to"
LIMITS = dict.fromkeys(("follows up to", "saturated from", SERVED, "most finished"), ".2f")
LOADS = {
    "requests/s": "±.2f",
    "tokens/s": "±.0f",
    "goodput/s": "±.2f",
    "within target": "±.0%",
    "followed": ".0%",
    "excess": "+.1f",
}
LATENCIES = {
    **{f"latency P{percent}, ms": "±.0f" for percent in (50, 90, 99)},
    **{f"P{percent} / no draft": "±.2f" for percent in (50, 99)},
    "tokens/step": ".2f",
}
TOKEN_TIMES = {
    **{f"first token P{percent}, ms": "±.0f" for percent in (50, 90, 99)},
    **{f"between tokens P{percent}, ms": "±.1f" for percent in (50, 90, 99)},
}
CAPACITY_SHARES = (0.3, 0.6, 0.8, 1.0, 1.3, 2.0)
"""Rates of a sweep that names none, over what the engine finishes per second without a draft if all requests come at once."""
QUICK = {"num_requests": 32, "rounds": 1, "capacity_shares": (0.6, 1.3)}


class LatencyBench:
    """One model under streams of requests; ``samples`` and ``problems`` grow as it goes.

    Args:
        args: from `parse_arguments`.

    Raises:
        ValueError: an option is not allowed, or the target cannot be used.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self._rates: list[float] = sorted(args.rate)
        prompts = prompt_stream(args.model, args.prompts, args.prompt_len, args.seed, **model_options(args))
        output_lens = args.output_len.stream(f"{args.seed}/outputs")
        self.workloads = [  # of each round, one request per second
            replace(
                take_workload(prompts, args.num_requests, output_lens),
                arrivals=draw_arrivals(args.num_requests, args.seed + round_id),
            )
            for round_id in range(args.rounds)
        ]
        longest = max(workload.max_len for workload in self.workloads)
        options = {"speculation": "fixed", "max_draft_tokens": args.max_draft_tokens, "num_kv_blocks": None}  # as there is room
        options["max_waiting_requests"] = max(map(len, self.workloads))
        self.llm = LLM(args.model, **engine_options(args, args.max_batch_size, longest, **options))
        self._engines = [NO_DRAFT] if args.draft_model is None else [NO_DRAFT, f"draft {args.draft_model}"]

    def run(self) -> Iterator[None]:
        """Warm up, find the rates if none are given, and measure all of them in rounds; an engine that fails is left out."""
        num_rates = len(self._rates) or len(self.args.capacity_shares)
        num_turns = len(self._engines) * (1 + num_rates * self.args.rounds) + (not self._rates)
        with Turns(num_turns, self.problems, lambda _: make_idle(self.llm.engine)) as turns:
            for engine in self._engines:
                turns.take(engine, "while it warmed up", partial(self._warm_up, engine))
            for round_id, rate in product(range(self.args.rounds), self._rates or self._find_rates(turns)):
                for engine in rotated(self._engines, round_id):
                    sample = turns.take(engine, f"at {rate:g} requests/s", partial(self._measure, engine, rate, round_id))
                    if sample is not None:
                        self.samples.append(sample)
                    yield

    def _warm_up(self, engine: str) -> Run:
        if engine != NO_DRAFT:
            self.llm.swap_draft(self.args.draft_model)
        warm_up = self.workloads[0].warm_up(self.args.max_batch_size)
        return run_workload(self.llm.engine, warm_up, use_speculative=engine != NO_DRAFT)

    def _find_rates(self, turns: Turns) -> list[float]:
        at_once = replace(self.workloads[0], arrivals=())
        for engine in self._engines:
            run = turns.take(engine, "with all requests at once", partial(self._serve, engine, at_once))
            if run is not None:
                return [float(f"{share * run.rates['requests/s']:.2g}") for share in self.args.capacity_shares]
        return []

    def _measure(self, engine: str, rate: float, round_id: int) -> Sample:
        workload = self.workloads[round_id]
        run = self._serve(engine, replace(workload, arrivals=[seconds / rate for seconds in workload.arrivals]))
        figures = {
            **run.rates,
            "tokens/step": run.figures["tokens/step"],
            **load_figures(run.requests, self.args.slo_ttft, self.args.slo_tbt),
            **latency_figures(run.requests),
        }
        details: dict[str, list[float]] = {
            "arrival, s": [request.arrival for request in run.requests],
            "first token, s": [request.to_first_token or 0.0 for request in run.requests],
            "latency, s": [request.latency for request in run.requests],
            "tokens": [len(request.token_ids) for request in run.requests],
        }
        return Sample({"engine": engine, RATE: rate}, round_id, figures, details)

    def _serve(self, engine: str, workload: Workload) -> Run:
        work = partial(run_workload, self.llm.engine, use_speculative=engine != NO_DRAFT)
        work(workload.warm_up(self.args.max_batch_size))
        return work(workload)

    def report(self) -> Report:
        """Lay out what was measured so far."""
        args, samples = self.args, self.samples
        for percent in (50, 99):
            samples = with_ratio(samples, f"P{percent} / no draft", f"latency P{percent}, ms", engine=NO_DRAFT)
        rows = make_rows(samples)
        limits, labels = find_limits(rows), ["engine", RATE]
        tables = [
            figure_table("Saturation, requests/s", limits, ["engine"], LIMITS),
            figure_table("Load", rows, labels, LOADS),
            figure_table("Latency", rows, labels, LATENCIES),
            figure_table("Time to the first token, and between tokens", rows, labels, TOKEN_TIMES),
        ]
        notes = [
            f"{args.model}, {args.dtype}; {count(args.num_requests, 'request')} per run, prompts of {args.prompt_len} tokens, "
            f"outputs of {args.output_len}; at most {args.max_batch_size} at once; "
            f"{count(args.rounds, 'interleaved round')}.",
            f"within target: first token after at most {args.slo_ttft:g} s, then at most {args.slo_tbt:g} s between tokens on "
            "average; goodput: requests within the target per second; requests/s: finished.",
            "followed: requests finished while the second half arrives, over that half; excess: requests by which the queue grows "
            "in it beyond a tenth of it and two standard deviations of its noise, above 0 the engine is saturated; -: the stream "
            "is too short to say. Latencies count from the arrival; P99 of few requests is close to the slowest one.",
        ]
        results: dict[str, Sequence[Row | Sample]] = {"rows": rows, "limits": limits, "samples": samples}
        return Report("Latency under load", latency_answer(limits), results, tables, notes, self.problems)


def load_figures(requests: Sequence[RequestRun], to_first_token: float, between_tokens: float) -> dict[str, float]:
    """Say how an engine bore a stream.

    Args:
        requests: in the order of their arrivals, at least one.
        to_first_token: most seconds within the service-level target.
        between_tokens: also, on average over a request.

    Returns:
        "goodput/s": requests within the target per second from the first arrival to the last token (Zhong et al., "DistServe",
        2024); "within target": their share; "followed": finished over arrived, while the second half arrives; "excess": requests
        by which the queue grows in that time, beyond a tenth of them and two standard deviations. The last two are missing where a
        stream is too short to say, for "excess" because its first request is still there when the second half begins, so that the
        queue would grow in any engine.
    """
    num_late = len(requests) // 2
    first, middle, last = requests[0].arrival, requests[-num_late - 1].arrival, requests[-1].arrival
    num_good = sum(
        (each.to_first_token or 0.0) <= to_first_token and (each.between_tokens or 0.0) <= between_tokens for each in requests
    )
    figures = {"goodput/s": num_good / (max(each.finished for each in requests) - first), "within target": num_good / len(requests)}
    if num_late:
        figures["followed"] = sum(middle < each.finished <= last for each in requests) / num_late
    if requests[0].finished <= middle:
        before, after = (sum(each.arrival <= moment < each.finished for each in requests) for moment in (middle, last))
        figures["excess"] = after - before - 0.1 * num_late - 2 * math.sqrt(2 * (before + 1))
    return figures


def find_limits(rows: Sequence[Row]) -> list[Row]:
    """Find where engines stop following, in requests per second.

    Args:
        rows: in ascending rates, with the figures of `load_figures` and "requests/s".

    Returns:
        A row per engine. "follows up to": rates up to here were all followed; "saturated from": the first rate whose excess is
        above 0; `SERVED`: rates up to here had `ATTAINED` of the requests within the target; "most finished": at any rate. What
        no rate was is missing.
    """
    found = []
    for engine in dict.fromkeys(row.labels["engine"] for row in rows):
        mine = [row for row in rows if row.labels["engine"] == engine]
        followed = list(takewhile(lambda row: row.figures.get("excess", UNKNOWN).median <= 0, mine))
        saturated = [row for row in mine if row.figures.get("excess", UNKNOWN).median > 0]
        served = list(takewhile(lambda row: row.figures["within target"].median >= ATTAINED, mine))
        limits = {"follows up to": followed[-1:], "saturated from": saturated[:1], SERVED: served[-1:]}
        figures = {name: float(row.labels[RATE]) for name, limit in limits.items() for row in limit}
        figures["most finished"] = max(row.figures["requests/s"].median for row in mine)
        found.append(Sample({"engine": engine}, 0, figures))
    return make_rows(found)


def latency_answer(limits: Sequence[Row]) -> str:
    """Up to which rate each engine serves its requests within the target."""
    served = {row.labels["engine"]: row.median(SERVED) for row in limits}
    found = [f"{f'up to {rate:g} requests/s' if rate else 'at no rate tried'} with {engine}" for engine, rate in served.items()]
    return f"At least {ATTAINED:.0%} of the requests are within the target {', '.join(found)}."


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or the target cannot be used.
    """
    args = parse_arguments(argv)
    bench = LatencyBench(args)
    measure_and_publish(args, bench.run, bench.report)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = bench_parser("latency", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: two rates, 32 requests, one round")
    add_target(parser)
    add_draft(parser)
    add("--dtype", choices=list(RUN_DTYPES), default="bfloat16")
    add("--max-draft-tokens", type=positive, default=4, help="per request and step (default: %(default)s)")
    add("--max-batch-size", type=positive, default=32, help="most requests that run at once (default: %(default)s)")
    add("--rate", nargs="+", type=above_zero, default=(), help="requests/s (default: around what the engine bears)")
    # 128 are enough for the queue of twice the bearable rate to stand out from its noise
    add("--num-requests", type=positive, default=128, help="per run (default: %(default)s)")
    add("--prompts", default="auto", help="auto, code, prose, chat, json or synthetic (default: auto)")
    mix_help = "tokens, or a mix (default: %(default)s)"
    add("--prompt-len", type=Lengths.parse, default="16-256", help=mix_help)
    add("--output-len", type=Lengths.parse, default="16-128", help=mix_help)
    add("--slo-ttft", type=above_zero, default=0.5, help="target: most seconds to the first token (default: %(default)s)")
    add("--slo-tbt", type=above_zero, default=0.05, help="target: most seconds between tokens (default: %(default)s)")
    add_rounds(parser, 2)
    parser.set_defaults(capacity_shares=CAPACITY_SHARES)
    return parse(parser, argv, QUICK)
