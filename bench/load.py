"""A server's load: rates of arrivals, policies, long prompts, prefix cache and quantised KV, each against an engine without it.

    titan bench load --quick                                          a first look
    titan bench load --scenario rates --rate 2 4 8 --slo-ttft 0.5
    titan bench load --scenario priority fair --seconds 30
    titan bench load --model DIR/target --draft-model DIR/draft

Each scenario serves the same requests with engines that differ in some options and share the weights; they take turns.

rates: adaptive speculation against none at 30, 60, 90 and 120 % of capacity. long-prompts: at 80 %, with one prompt of half the
model's length, at most 4,096 tokens, per 20 short ones. priority: at 150 % for a fixed time, a tenth of the requests critical.
fair: two users, one of whom sends ten times as much; at most as many run at once as the other sends. prefix: a system prompt of 512
tokens. int8: steps of 32 requests with 512 tokens of context. int8-memory: how many requests run at once in the memory of 64.
`titan bench parts --select swap` measures swaps.

Capacity is what the first engine finishes per second if all requests come at once; --rate names rates in place of its shares.
Arrivals are a Poisson process, an open loop: the next request does not wait for an answer. All rates use the same draws, stretched.
Latencies count from a request's arrival. The time between tokens is a request's mean after its first token, because speculation
emits several at once; between steps are the times from one step with tokens of a request to its next. Temperature 0, and the end
of sequence is ignored. A ratio is the median over the rounds of the ratio to the first setting within a round. Ctrl-C ends the
measurement and reports what there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from typing import Any, TypeVar

from titan.bench.engine_run import make_idle, run_workload
from titan.bench.load_scenarios import Scenario, make_scenarios
from titan.bench.loading import engine_options, load_target, open_backend
from titan.bench.options import above_zero, add_draft, add_dtype, add_target, bench_parser, parse, positive
from titan.bench.report import Report, count, figure_table, measure_and_publish
from titan.bench.runs import Run
from titan.bench.samples import Label, Row, Sample, make_rows, rotated, with_ratio
from titan.bench.turns import Turns
from titan.bench.workloads import Lengths, Workload, draw_arrivals
from titan.core.options import EngineConfig
from titan.engine import Engine

NAMES = ("rates", "long-prompts", "priority", "fair", "prefix", "int8", "int8-memory")
QUICK = {"num_requests": 22, "seconds": 5.0, "rounds": 1, "output_len": Lengths(8, 16), "max_batch_size": 8}
RATE = "arrivals/s"
"""Label of the rate at which requests arrive."""
OVER_FIRST = " / first"
"""Ends the names of ratios to the first setting in the same round."""
Result = TypeVar("Result")


class LoadBench:
    """Scenarios, one after the other; ``samples`` and ``problems`` grow as it goes.

    Args:
        args: from `parse_arguments`.

    Raises:
        ValueError: a model cannot be used.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self._backend = open_backend()
        self._target, self._tokenizer = load_target(args, self._backend)
        args.max_len = self._target.config.max_position_embeddings
        args.bytes_per_token = self._target.kv_layout.bytes_per_token
        self.scenarios = {name: each for name, each in make_scenarios(args).items() if name in args.scenario}

    def run(self) -> Iterator[None]:
        """Measure the scenarios in rounds; a setting that fails is left out."""
        args = self.args
        engines: dict[str, Engine] = {}
        num_turns = sum(map(self._num_turns, self.scenarios.values()))
        with Turns(num_turns, self.problems, lambda variant: make_idle(engines[variant])) as turns:
            for name, scenario in self.scenarios.items():
                at_once = scenario.draw(args, args.num_requests, 0)  # the requests that find the capacity
                warm_up, longest = at_once.warm_up(args.max_batch_size), self._longest(scenario)
                engines = {f"{name}: {each}": self._make_engine(scenario, each, longest) for each in scenario.settings}
                reference, variants = next(iter(engines)), list(zip(engines, scenario.settings, strict=True))
                work = partial(_serve, engines[reference], warm_up, run_workload, at_once)
                rates = self._find_rates(scenario, partial(turns.take, reference, "with all requests at once", work))
                for round_id, rate in product(range(args.rounds), rates):
                    workload = self._arrive(scenario, rate, 1 + round_id)
                    place = f"in round {round_id}" + (f" at {rate:g}/s" if scenario.shares else "")
                    for variant, setting in rotated(variants, round_id):
                        measure = partial(_serve, engines[variant], warm_up, scenario.measure, workload)
                        figures = turns.take(variant, place, measure)
                        if figures is not None:
                            labels: dict[str, Label] = {"scenario": name, "setting": setting}
                            if scenario.shares:
                                labels[RATE] = rate
                            self.samples.append(Sample(labels, round_id, figures))
                    yield

    def _num_turns(self, scenario: Scenario) -> int:
        args = self.args
        num_rates = len(args.rate or scenario.shares) if scenario.shares else 1
        num_runs: int = len(scenario.settings) * args.rounds * num_rates
        return num_runs + int(bool(scenario.shares) and not args.rate)

    def _find_rates(self, scenario: Scenario, run_at_once: Callable[[], Run | None]) -> list[float]:
        """Requests per second, infinite where they come at once; none if the engine that tells the capacity failed."""
        if not scenario.shares:
            return [inf]
        if self.args.rate:
            return sorted(self.args.rate)
        run = run_at_once()
        return [] if run is None else [float(f"{share * run.rates['requests/s']:.3g}") for share in scenario.shares]

    def _arrive(self, scenario: Scenario, rate: float, round_id: int) -> Workload:
        """The requests of a round, in a Poisson process of so many per second, or all at once."""
        num_requests = self.args.num_requests
        if scenario.is_timed:
            num_requests = max(1, round(rate * self.args.seconds))
        workload = scenario.draw(self.args, num_requests, round_id)
        times = draw_arrivals(len(workload), self.args.seed + round_id)
        return replace(workload, arrivals=[each / rate for each in times])

    def _make_engine(self, scenario: Scenario, setting: str, max_model_len: int) -> Engine:
        options: dict[str, Any] = {"speculation": "off", "max_batch_size": self.args.max_batch_size}
        options |= {"max_waiting_requests": 100_000, **scenario.options, **scenario.settings[setting]}
        draft = None if options["speculation"] == "off" else self.args.draft_model
        config = EngineConfig.of(**engine_options(self.args, max_model_len=max_model_len, **options))
        return Engine(config, self._target, draft, self._tokenizer, self._backend)

    def _longest(self, scenario: Scenario) -> int:
        """Tokens of the longest request of any round; where the rate says how many there are, they are short ones."""
        args = self.args
        drawn = [scenario.draw(args, args.num_requests, round_id).max_len for round_id in range(1 + args.rounds)]
        short: int = args.prompt_len.high + args.output_len.high
        return max(short, *drawn)

    def report(self) -> Report:
        """Lay out what was measured so far: a table per scenario."""
        args = self.args
        rows: list[Row] = []
        samples: list[Sample] = []
        answers, tables = [], []
        for name, scenario in self.scenarios.items():
            mine = [each for each in self.samples if each.labels["scenario"] == name]
            first, *_, last = scenario.settings
            for figure in scenario.ratios:
                mine = with_ratio(mine, figure + OVER_FIRST, figure, setting=first)
            found, ratio = make_rows(mine), scenario.ratios[0] + OVER_FIRST
            places = [
                f"{row.figures[ratio].median:.3g}" + (f" at {row.labels[RATE]:.3g}/s" if RATE in row.labels else "")
                for row in found
                if row.labels["setting"] == last and ratio in row.figures
            ]
            if places:
                answers.append(f"{name}: {scenario.ratios[0]} of {last!r} over {first!r}: {', '.join(places)}")
            figures = [figure for row in found for figure in row.figures if " P90" not in figure]
            columns = {figure: "±.1f" if ", ms" in figure and OVER_FIRST not in figure else "±.4g" for figure in figures}
            tables.append(figure_table(name, found, [*([RATE] if scenario.shares else []), "setting"], columns))
            rows, samples = [*rows, *found], [*samples, *mine]
        notes = [
            f"{args.model}, draft {args.draft_model}, {args.dtype}; prompts of {args.prompt_len} tokens, outputs of "
            f"{args.output_len}; {count(args.num_requests, 'request')}, in priority those of {args.seconds:g} s; at most "
            f"{args.max_batch_size} at once, in fair as the other user sends; {count(args.rounds, 'interleaved round')}.",
            f"{OVER_FIRST.strip()}: ratio to the setting named first, median of the rounds and half their range. requests/s: "
            "finished, from the first arrival to the last token. within target: share of requests whose first token comes after "
            f"at most {args.slo_ttft:g} s, and then a token per {args.slo_tpot:g} s on average. P99 of few requests is close to "
            "the slowest one; P90 is in the JSON file.",
        ]
        results: dict[str, Sequence[Row | Sample]] = {"rows": rows, "samples": samples}
        answer = f"{'; '.join(answers)}." if answers else "No setting could be compared with the first."
        versions = {"kernels": self._backend.facts()["kernels"]}
        return Report("A server's load", answer, results, tables, notes, self.problems, versions)


def _serve(engine: Engine, warm_up: Workload, measure: Callable[[Engine, Workload], Result], workload: Workload) -> Result:
    """Measure after a warm-up with requests of its own: where prompts are to be cached, these are the same in all rounds."""
    run_workload(engine, warm_up)
    return measure(engine, workload)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or a model cannot be used.
    """
    args = parse_arguments(argv)
    bench = LoadBench(args)
    measure_and_publish(args, bench.run, bench.report)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: there is no draft for the scenario "rates", or only one request for "prefix".
    """
    parser = bench_parser("load", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: 22 short requests, 8 at once, 5 s, one round")
    add_target(parser)
    add_draft(parser)
    add_dtype(parser)
    add("--scenario", nargs="+", choices=NAMES, default=list(NAMES), help="default: all")
    add("--rate", nargs="+", type=above_zero, default=(), help="requests per second (default: shares of capacity)")
    add("--num-requests", type=positive, default=105, help="of a run (default: %(default)s)")
    add("--seconds", type=above_zero, default=60.0, help="of a run of priority (default: %(default)s)")
    add("--prompt-len", type=Lengths.parse, default="16-128", help="tokens, or a mix (default: %(default)s)")
    add("--output-len", type=Lengths.parse, default="16-64", help="tokens, or a mix (default: %(default)s)")
    add("--max-batch-size", type=positive, default=32, help="most requests that run at once (default: %(default)s)")
    add("--inter-token-ms", nargs="+", type=above_zero, default=[50.0, 100.0], help="max_inter_token_s (default: 50 100)")
    add("--slo-ttft", type=above_zero, default=0.5, help="target: most seconds to the first token (default: %(default)s)")
    add("--slo-tpot", type=above_zero, default=0.05, help="target: most seconds per token after it (default: %(default)s)")
    add("--rounds", type=positive, default=2, help="default: %(default)s")
    args = parse(parser, argv, QUICK)
    if args.draft_model is None and "rates" in args.scenario:
        raise ValueError(f"--scenario rates of --model {args.model} needs a draft: give --draft-model")
    if args.num_requests == 1 and "prefix" in args.scenario:
        raise ValueError("--num-requests 1 is not allowed with --scenario prefix: the first request finds nothing in the cache")
    return args
