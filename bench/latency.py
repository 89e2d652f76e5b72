"""Latency under load: requests arrive at their own times, at one rate after another, with and without a draft.

    titan bench latency --quick                                          a first look, in less than a minute
    titan bench latency                                                  the demo pair, rates around what it can bear
    titan bench latency --rate 2 4 8 --arrivals bursty:4 --slo-ttft 0.5
    titan bench latency --model DIR/target --draft-model DIR/draft --arrivals trace.csv

Arrivals are an open loop: the next request does not wait for an answer. "poisson" and "bursty:V" (gamma distributed gaps with a
coefficient of variation of V) draw them; a trace's file has lines of time in seconds, prompt tokens, output tokens, and is replayed
as it is, or stretched to each --rate. All rates use the same draws, stretched, and both engines the same requests, in turns.
Temperature 0, and the end of sequence is ignored. Ctrl-C ends the measurement and reports what there is.

Latencies count from a request's arrival. The time between tokens is a request's mean after its first token, because speculation
emits several at once. An engine is saturated if, while the second half of the requests arrives, its queue grows by more than a
tenth of them and two standard deviations of the queue's own noise; a stream of few requests shows only large overloads.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from titan import LLM
from titan.bench.arrivals import TraceEntry, draw_arrivals, read_trace, read_variation
from titan.bench.engine_run import make_idle, run_workload
from titan.bench.latency_report import RATE, latency_report, load_figures
from titan.bench.options import add_draft, add_target, bench_parser, model_options, parse, positive
from titan.bench.prompts import prompt_stream
from titan.bench.report import measure_and_publish
from titan.bench.runs import Run, latency_figures
from titan.bench.samples import NO_DRAFT, Sample
from titan.bench.turns import Turns, in_rounds
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.dtypes import RUN_DTYPES

CAPACITY_SHARES = (0.3, 0.6, 0.8, 1.0, 1.3, 2.0)
"""Rates of a sweep that names none, over what the engine finishes per second without a draft if all requests come at once."""
NUM_REQUESTS = 128
"""Per run, of arrivals that are drawn: enough for the queue of twice the bearable rate to stand out from its noise."""
QUICK = {"num_requests": 32, "repeats": 1, "capacity_shares": (0.6, 1.3)}


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
        self._rates: list[float] = sorted(set(args.rate))
        if Path(args.arrivals).is_file():
            trace = read_trace(Path(args.arrivals))[: args.num_requests]
            if trace[-1].time == 0:
                raise ValueError(f"trace {args.arrivals!r} has no rate, as all requests come at once: their times must differ")
            rate = (len(trace) - 1) / trace[-1].time
            self._rates = self._rates or [rate]
            self.workloads = self._replay(trace, rate)
        else:
            self.workloads = self._draw(read_variation(args.arrivals))
        self.llm = LLM(
            args.model,
            dtype=args.dtype,
            **model_options(args),
            speculation="fixed",
            draft_weight_bits=args.draft_weight_bits,
            max_draft_tokens=args.max_draft_tokens,
            max_batch_size=args.max_batch_size,
            max_model_len=max(workload.max_len for workload in self.workloads),
            max_waiting_requests=max(map(len, self.workloads)),
            enable_prefix_caching=False,
        )
        self._engines = [NO_DRAFT] if args.draft_model is None else [NO_DRAFT, f"draft {args.draft_model}"]

    def run(self) -> None:
        """Warm up, find the rates if none are given, and measure all of them in rounds; an engine that fails is left out."""
        num_rates = len(self._rates) or len(self.args.capacity_shares)
        num_turns = len(self._engines) * (1 + num_rates * self.args.repeats) + (not self._rates)
        with Turns(num_turns, self.problems, lambda _: make_idle(self.llm.engine)) as turns:
            for engine in self._engines:
                turns.take(engine, "while it warmed up", partial(self._warm_up, engine))
            runs = [(rate, engine) for rate in self._rates or self._find_rates(turns) for engine in self._engines]
            for round_id, (rate, engine) in in_rounds(runs, self.args.repeats):
                sample = turns.take(engine, f"at {rate:g} requests/s", partial(self._measure, engine, rate, round_id))
                if sample is not None:
                    self.samples.append(sample)

    def _warm_up(self, engine: str) -> Run:
        if engine != NO_DRAFT:
            self.llm.swap_draft(self.args.draft_model)
        prompts, output_lens = self.workloads[0].prompts, self.workloads[0].output_lens
        return self._serve(engine, Workload(prompts[:4], output_lens[:4]))

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
        return run_workload(self.llm.engine, workload, use_speculative=engine != NO_DRAFT)

    def _draw(self, variation: float) -> list[Workload]:
        """The requests of each round, one per second."""
        args = self.args
        num_requests = args.num_requests or NUM_REQUESTS
        prompts = prompt_stream(args.model, args.prompts, args.prompt_len, args.seed, **model_options(args))
        output_lens = args.output_len.stream(f"{args.seed}/outputs")
        arrivals = [draw_arrivals(variation, num_requests, args.seed + round_id) for round_id in range(args.repeats)]
        return [replace(take_workload(prompts, num_requests, output_lens), arrivals=each) for each in arrivals]

    def _replay(self, trace: Sequence[TraceEntry], rate: float) -> list[Workload]:
        """The requests of each round, one per second on average, at the same times in all."""
        args, longest = self.args, max(entry.prompt_len for entry in trace)
        stream = prompt_stream(args.model, args.prompts, Lengths(longest, longest), args.seed, **model_options(args))
        rounds = [[next(stream)[: entry.prompt_len] for entry in trace] for _ in range(args.repeats)]
        output_lens, arrivals = [entry.output_len for entry in trace], [entry.time * rate for entry in trace]
        return [Workload(prompts, output_lens, arrivals) for prompts in rounds]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or the target cannot be used.
    """
    args = parse_arguments(argv)
    bench = LatencyBench(args)
    models = {"target": args.model, "draft": args.draft_model}
    measure_and_publish(args, bench.run, lambda: latency_report(args, bench.samples, bench.problems), models)


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
    add("--arrivals", default="poisson", help="poisson, bursty, bursty:VARIATION or a trace's file (default: poisson)")
    add("--rate", nargs="+", type=above_zero, default=(), help="requests/s (default: the trace's, or around what the engine bears)")
    add("--num-requests", type=positive, help=f"per run; of a trace, at most (default: {NUM_REQUESTS}, or the whole trace)")
    add("--prompts", default="auto", help="code, prose, chat, json, synthetic or a file (default: auto)")
    mix_help = "tokens, or a mix; not of a trace (default: %(default)s)"
    add("--prompt-len", type=Lengths.parse, default="16-256", help=mix_help)
    add("--output-len", type=Lengths.parse, default="16-128", help=mix_help)
    add("--slo-ttft", type=above_zero, default=0.5, help="target: most seconds to the first token (default: %(default)s)")
    add("--slo-tbt", type=above_zero, default=0.05, help="target: most seconds between tokens (default: %(default)s)")
    add("--repeats", type=positive, default=2, help="rounds (default: %(default)s)")
    parser.set_defaults(capacity_shares=CAPACITY_SHARES)
    return parse(parser, argv, QUICK)


def above_zero(text: str) -> float:
    """Read a number, as a type of `argparse`."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be a number above 0")
    return float(text)
