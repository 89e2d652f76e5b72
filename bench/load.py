"""A server's load: policies, long prompts, prefix cache and quantised KV, each against an engine without it.

    titan bench load --quick                                          a first look
    titan bench load --scenario priority fair --seconds 30
    titan bench load --model DIR/target --draft-model DIR/draft

Each scenario serves the same requests with engines that differ in some options and share the weights; they take turns.
long-prompts: Poisson arrivals at 80 % of what the first engine finishes if all come at once, with one prompt of half the model's
length, at most 4,096 tokens, per 20 short ones. priority: 150 % for a fixed time, a tenth critical. fair: two users, one of whom
sends ten times as much. prefix: a system prompt of 512 tokens. int8: steps of 32 requests with 512 tokens of context. int8-memory:
how many requests run in the same memory. load: 90 %, adaptive speculation with the policy "priority" against none.
`titan bench kernels --select swap` measures swaps.

Temperature 0, and the end of sequence is ignored. Latencies count from a request's arrival. A ratio is the median over the rounds
of the ratio to the first setting within a round. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from titan.bench.engine_run import make_idle, run_workload
from titan.bench.load_scenarios import FIRST_SETTING, Goal, Scenario, make_scenarios
from titan.bench.loading import engine_options, load_target
from titan.bench.options import above_zero, add_draft, add_rounds, add_target, bench_parser, parse, positive
from titan.bench.report import Report, Table, count, figure_table, measure_and_publish
from titan.bench.samples import Row, Sample, Spread, make_rows, rotated, with_ratio
from titan.bench.turns import Turns
from titan.bench.workloads import Lengths, Workload, draw_arrivals
from titan.core.dtypes import RUN_DTYPES
from titan.core.options import EngineConfig
from titan.engine import Engine
from titan.kernels.backend import choose_backend, choose_device

NAMES = ("long-prompts", "priority", "fair", "prefix", "int8", "int8-memory", "load")
QUICK = {"num_requests": 22, "seconds": 5.0, "rounds": 1, "output_len": Lengths(8, 16), "max_batch_size": 8}
RATE = "requests/s"
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
        self._backend = choose_backend(choose_device("auto"))
        self._target, self._tokenizer = load_target(args, self._backend)
        args.max_len = self._target.config.max_position_embeddings
        self.scenarios = {name: each for name, each in make_scenarios(args).items() if name in args.scenario}

    def run(self) -> Iterator[None]:
        """Measure the scenarios in rounds; a setting that fails is left out."""
        num_turns = sum(len(each.settings) * self.args.rounds + (each.share > 0) for each in self.scenarios.values())
        engines: dict[str, Engine] = {}
        with Turns(num_turns, self.problems, lambda variant: make_idle(engines[variant])) as turns:
            for name, scenario in self.scenarios.items():
                at_once = scenario.draw(self.args, self.args.num_requests, 0)  # the requests that find the rate
                longest = self._longest(scenario)
                engines = {f"{name}: {each}": self._make_engine(scenario, each, longest) for each in scenario.settings}
                warm_up = at_once.warm_up(self.args.max_batch_size)
                rate, first = inf, next(iter(engines))
                if scenario.share:
                    work = partial(_serve, engines[first], warm_up, run_workload, at_once)
                    run = turns.take(first, "with all requests at once", work)
                    if run is None:
                        continue
                    rate = scenario.share * run.rates[RATE]
                workloads = [self._arrive(scenario, rate, each) for each in range(1, self.args.rounds + 1)]
                for round_id, workload in enumerate(workloads):
                    for variant, setting in rotated(zip(engines, scenario.settings, strict=True), round_id):
                        measure = partial(_serve, engines[variant], warm_up, scenario.measure, workload)
                        figures = turns.take(variant, f"in round {round_id}", measure)
                        if figures is not None:
                            arrival = {RATE: rate} if scenario.share else {}
                            self.samples.append(Sample({"scenario": name, "setting": setting}, round_id, {**arrival, **figures}))
                yield

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
        """Lay out what was measured so far: the goals, and a table per scenario."""
        args = self.args
        samples: list[Sample] = []
        for name, scenario in self.scenarios.items():
            mine = [each for each in self.samples if each.labels["scenario"] == name]
            for ratio in scenario.ratios:
                mine = with_ratio(mine, ratio + FIRST_SETTING, ratio, setting=next(iter(scenario.settings)))
            samples += mine
        rows = make_rows(samples)
        found = {(row.labels["scenario"], row.labels["setting"]): row for row in rows}
        goals = [
            [name, goal.setting, goal.figure, f"{goal.direction} {goal.bound:g}", *_outcome(goal, row.figures.get(goal.figure))]
            for name, scenario in self.scenarios.items()
            for goal in scenario.goals
            if (row := found.get((name, goal.setting))) is not None
        ]
        tables = [Table("Goals", ["scenario", "setting", "figure", "goal", "reached", "met"], goals, num_text_columns=4)]
        for name in self.scenarios:
            mine_rows = [row for row in rows if row.labels["scenario"] == name]
            columns = dict.fromkeys((figure for row in mine_rows for figure in row.figures), "±.4g")
            tables.append(figure_table(name, mine_rows, ["setting"], columns))
        notes = [
            f"{args.model}, draft {args.draft_model}, {args.dtype}; prompts of {args.prompt_len} tokens, outputs of "
            f"{args.output_len}; {count(args.num_requests, 'request')}, in priority those of {args.seconds:g} s; at most "
            f"{args.max_batch_size} at once; {count(args.rounds, 'interleaved round')}.",
            f"{FIRST_SETTING.strip()}: ratio to the setting named first, median and range over the rounds; requests/s: arrivals.",
        ]
        num_met = sum(goal[-1] == "yes" for goal in goals)
        results: dict[str, Sequence[Row | Sample]] = {"rows": rows, "samples": samples}
        answer = f"{num_met} of {count(len(goals), 'goal')} reached."
        return Report("A server's load", answer, results, tables, notes=notes, warnings=self.problems)


def _serve(engine: Engine, warm_up: Workload, measure: Callable[[Engine, Workload], Result], workload: Workload) -> Result:
    """Measure after a warm-up with requests of its own: where prompts are to be cached, these are the same in all rounds."""
    run_workload(engine, warm_up)
    return measure(engine, workload)


def _outcome(goal: Goal, reached: Spread | None) -> tuple[str, str]:
    """Return what was reached of a goal, and whether this meets it, as cells; too few requests may not tell."""
    return ("not measured", "-") if reached is None else (f"{reached:[.3g}", "yes" if goal.is_met(reached.median) else "no")


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
        ValueError: there is no draft for the scenario "load".
    """
    parser = bench_parser("load", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: 22 short requests, 8 at once, 5 s, one round")
    add_target(parser)
    add_draft(parser)
    add("--dtype", choices=list(RUN_DTYPES), default="bfloat16")
    add("--scenario", nargs="+", choices=NAMES, default=list(NAMES), help="default: all")
    add("--num-requests", type=positive, default=105, help="of a run (default: %(default)s)")
    add("--seconds", type=above_zero, default=60.0, help="of a run of priority (default: %(default)s)")
    add("--prompt-len", type=Lengths.parse, default="16-128", help="tokens, or a mix (default: %(default)s)")
    add("--output-len", type=Lengths.parse, default="16-64", help="tokens, or a mix (default: %(default)s)")
    add("--max-batch-size", type=positive, default=32, help="most requests that run at once (default: %(default)s)")
    add("--inter-token-ms", nargs="+", type=above_zero, default=[50.0, 100.0], help="max_inter_token_s (default: 50 100)")
    add("--kv-memory", type=positive, default=256, help="MiB, of int8-memory (default: %(default)s)")
    add_rounds(parser, 2)
    args = parse(parser, argv, QUICK)
    if args.draft_model is None and "load" in args.scenario:
        raise ValueError(f"--scenario load of --model {args.model} needs a draft: give --draft-model")
    return args
