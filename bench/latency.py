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
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

from titan.bench.noise import in_rounds
from titan.bench.progress import Progress
from titan.bench.survivors import Survivors, error_line

from titan import LLM
from titan.bench.arrivals import POISSON, ArrivalProcess, mean_rate, read_trace, stretch
from titan.bench.draft_rows import NO_DRAFT
from titan.bench.latency_report import (
    Sample,
    latency_answer,
    latency_charts,
    latency_table,
    limits_table,
    load_table,
    make_limits,
    make_rows,
)
from titan.bench.open_loop import Clock, RequestTimes, Target, TimedRequest, WallClock, measure_load, round_rate, serve
from titan.bench.prompts import prompt_stream
from titan.bench.provenance import Provenance, collect_provenance
from titan.bench.report import Report, add_report_options, count, measure_and_publish, parse_with_preset, positive, use_threads
from titan.bench.workloads import Lengths
from titan.core.metrics import ratio
from titan.models.loader import DEMO, DTYPES

CAPACITY_SHARES = (0.3, 0.6, 0.8, 1.0, 1.3, 2.0)
"""Rates of a sweep that names none, over what the engine finishes per second without a draft if all requests come at once."""
QUICK_SHARES = (0.6, 1.3)
QUICK = {"num_requests": 32, "repeats": 1}
NUM_REQUESTS = 128
"""Per run, of arrivals that are drawn: enough for the queue of twice the bearable rate to stand out from its noise."""
NUM_WARM_UP_REQUESTS = 4
NUM_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Body:
    """A request without its time."""

    prompt: list[int]
    output_len: int


class LatencyBench:
    """One model under streams of requests; ``samples`` and ``problems`` grow as it goes.

    Args:
        args: from `parse_arguments`.
        clock: of arrivals and latencies.

    Raises:
        ValueError: an option is not allowed, or the target cannot be used.
    """

    def __init__(self, args: argparse.Namespace, clock: Clock) -> None:
        self.args = args
        self.clock = clock
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.target = Target(args.slo_ttft, args.slo_tbt)
        self.trace = read_trace(Path(args.arrivals))[: args.num_requests] if Path(args.arrivals).is_file() else None
        self.num_requests = args.num_requests or NUM_REQUESTS
        self.process = ArrivalProcess.parse(POISSON if self.trace is not None else args.arrivals)
        self.rates: list[float] = sorted(set(args.rate or ()))
        if self.trace is not None and not self.rates:
            self.rates = [mean_rate([entry.time for entry in self.trace])]
        for rate in self.rates:
            self._times(rate, 0)  # refuses what is no rate before work is done
        self.bodies = self._take_bodies()
        self.llm = LLM(
            args.model,
            dtype=args.dtype,
            max_draft_tokens=args.max_draft_tokens,
            max_batch_size=args.max_batch_size,
            max_model_len=max(len(body.prompt) + body.output_len for bodies in self.bodies for body in bodies),
            max_waiting_requests=max(map(len, self.bodies)),
            enable_prefix_caching=False,
        )
        self.draft = args.draft_model or (DEMO if args.model == DEMO else None)
        if self.draft is not None:
            try:
                self.llm.swap_draft(self.draft)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with the draft, no draft is measured
                self.problems.append(f"draft {self.draft} was left out: {error_line(error)}")
                self.draft = None
        self.engines = [NO_DRAFT] if self.draft is None else [NO_DRAFT, f"draft {self.draft}"]

    def run(self) -> None:
        """Warm up, find the rates if none are given, and measure all of them in rounds; an engine that fails is left out."""
        survivors = Survivors(self.llm.engine, self.problems)
        warm_up = [Body(body.prompt, min(body.output_len, NUM_WARM_UP_TOKENS)) for body in self.bodies[0][:NUM_WARM_UP_REQUESTS]]
        for engine in self.engines:
            survivors.attempt(engine, "while it warmed up", partial(self._serve, warm_up, [0.0] * len(warm_up), engine))
        for engine in self.engines:
            if not self.rates:
                self.rates = survivors.attempt(engine, "with all requests at once", partial(self._choose_rates, engine)) or []
        runs = [(rate, engine) for rate in self.rates for engine in self.engines]
        with Progress(len(runs) * self.args.repeats) as progress:
            for round_id, (rate, engine) in in_rounds(runs, self.args.repeats):
                progress.note(f"{rate:g} requests/s, {engine}")
                sample = survivors.attempt(engine, f"at {rate:g} requests/s", partial(self._measure, rate, engine, round_id))
                if sample is None:
                    progress.leave_out(1)
                    continue
                self.samples.append(sample)
                latency = median(each.latency for each in sample.times)
                progress.advance(f"{rate:g} requests/s, {engine}: median latency {latency:.2f} s")

    def _choose_rates(self, engine: str) -> list[float]:
        times = self._serve(self.bodies[0], [0.0] * len(self.bodies[0]), engine)
        capacity = len(times) / max(each.finished for each in times)
        return sorted({round_rate(capacity * share) for share in (QUICK_SHARES if self.args.quick else CAPACITY_SHARES)})

    def _measure(self, rate: float, engine: str, round_id: int) -> Sample:
        counters = self.llm.engine.counters
        num_tokens, num_rows = counters.num_emitted_tokens, counters.num_sequence_steps
        times = self._serve(self.bodies[round_id], self._times(rate, round_id), engine)
        length = ratio(counters.num_emitted_tokens - num_tokens, counters.num_sequence_steps - num_rows)
        return Sample(rate, engine, round_id, measure_load(times, self.target), times, length)

    def _serve(self, bodies: Sequence[Body], times: Sequence[float], engine: str) -> list[RequestTimes]:
        arrivals = [TimedRequest(time, body.prompt, body.output_len) for time, body in zip(times, bodies, strict=True)]
        return serve(self.llm.frontend, arrivals, use_speculative=engine != NO_DRAFT, clock=self.clock)

    def _times(self, rate: float, round_id: int) -> list[float]:
        """Arrival times of a round; a trace has the same in all."""
        if self.trace is not None:
            return [entry.time for entry in stretch(self.trace, rate)]
        return list(islice(self.process.times(rate, self.args.seed + round_id), self.num_requests))

    def _take_bodies(self) -> list[list[Body]]:
        """The requests of each round."""
        args = self.args
        if self.trace is not None:
            longest = max(entry.prompt_len for entry in self.trace)
            stream = prompt_stream(args.model, args.prompts, Lengths(longest, longest), args.seed)
            bodies = [
                [Body(next(stream)[: entry.prompt_len], entry.output_len) for entry in self.trace] for _ in range(args.repeats)
            ]
            num_short = sum(
                len(body.prompt) < entry.prompt_len for each in bodies for body, entry in zip(each, self.trace, strict=True)
            )
            if num_short:
                num_prompts = args.repeats * len(self.trace)
                self.problems.append(
                    f"{num_short} of {num_prompts} prompts are shorter than the trace asks, for lack of longer ones"
                )
            return bodies
        stream = prompt_stream(args.model, args.prompts, Lengths.parse(args.prompt_len), args.seed)
        output_lens = Lengths.parse(args.output_len).stream(f"{args.seed}/outputs")
        return [[Body(next(stream), next(output_lens)) for _ in range(self.num_requests)] for _ in range(args.repeats)]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or the target cannot be used.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    use_threads(args)
    bench = LatencyBench(args, WallClock())
    models = {"target": args.model, "draft": bench.draft}
    provenance = collect_provenance("latency", argv, models=models, seed=args.seed)
    measure_and_publish(bench.run, lambda is_complete: _report(bench, provenance, is_complete=is_complete), args)


def _report(bench: LatencyBench, provenance: Provenance, *, is_complete: bool) -> Report:
    rows = make_rows(bench.samples)
    limits = make_limits(rows)
    return Report(
        "Latency under load",
        latency_answer(limits),
        provenance,
        vars(bench.args),
        {"rows": rows, "limits": limits, "samples": bench.samples},
        [latency_table(rows), load_table(rows), limits_table(limits)],
        charts=latency_charts(rows, bench.samples),
        notes=_notes(bench.args, bench),
        warnings=bench.problems,
        is_complete=is_complete,
    )


def _notes(args: argparse.Namespace, bench: LatencyBench) -> list[str]:
    prompt_lens, output_lens = zip(*((len(body.prompt), body.output_len) for body in bench.bodies[0]), strict=True)
    return [
        f"{args.model}, {args.dtype}; arrivals: {args.arrivals}, {count(len(prompt_lens), 'request')} per run, prompts of "
        f"{min(prompt_lens)} to {max(prompt_lens)} tokens, outputs of {min(output_lens)} to {max(output_lens)}; "
        f"at most {args.max_batch_size} at once; {count(args.repeats, 'interleaved round')}.",
        f"within target: first token after at most {args.slo_ttft:g} s, then at most {args.slo_tbt:g} s between tokens on "
        "average; goodput: requests within the target per second.",
        "followed: requests finished while the second half arrives, over that half; saturated: the queue grew in it by more than a "
        "tenth of it and two standard deviations of its noise; -: the stream is too short to say. Latencies "
        "count from the arrival; P99 of few requests is close to the slowest one.",
    ]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="titan bench latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a first look: two rates, 32 requests, one round")
    parser.add_argument("--model", default=DEMO, help="folder or hub id of the target (default: the demo pair)")
    parser.add_argument("--draft-model", help="folder or hub id of the draft, or ngram (default: the demo's, or none)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--max-draft-tokens", type=positive, default=4, help="per request and step (default: %(default)s)")
    parser.add_argument("--max-batch-size", type=positive, default=32, help="most requests that run at once (default: %(default)s)")
    parser.add_argument(
        "--arrivals", default=POISSON, help="poisson, bursty, bursty:VARIATION or a trace's file (default: poisson)"
    )
    parser.add_argument(
        "--rate",
        nargs="+",
        type=float,
        help="requests per second (default: the trace's, or shares of what the engine bears: "
        f"{', '.join(f'{share:g}' for share in CAPACITY_SHARES)})",
    )
    parser.add_argument(
        "--num-requests", type=positive, help=f"per run; of a trace, at most (default: {NUM_REQUESTS}, or the whole trace)"
    )
    parser.add_argument("--prompts", default="auto", help="code, prose, chat, json, synthetic or a file (default: auto)")
    parser.add_argument("--prompt-len", default="16-256", help="tokens, or a mix; not of a trace (default: %(default)s)")
    parser.add_argument("--output-len", default="16-128", help="tokens, or a mix; not of a trace (default: %(default)s)")
    parser.add_argument(
        "--slo-ttft", type=float, default=0.5, help="target: most seconds to the first token (default: %(default)s)"
    )
    parser.add_argument("--slo-tbt", type=float, default=0.05, help="target: most seconds between tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=2, help="rounds (default: %(default)s)")
    add_report_options(parser)
    return parse_with_preset(parser, argv, QUICK)


if __name__ == "__main__":
    main()
