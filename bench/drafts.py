"""Which draft, and which shape of draft trees, suits a target: they take turns in one engine, on the same prompts.

    titan bench drafts --quick                                               a first look, in less than a minute
    titan bench drafts                                                       five drafts of the demo target
    titan bench drafts --draft demo --draft ngram --draft truncated:1 --draft demo,tree=dynamic,tokens=8
    titan bench drafts --model DIR/target --draft DIR/draft --draft truncated:2 --prompts synthetic

A draft is a name and options: demo, a folder, a hub id, ngram, or truncated:N (the target's first N layers as a draft, with their
weights as they are), then tree=chain|dynamic|auto or the parent of each node (tree=-1,-1,0), tokens=MOST PER STEP, and
sampling=greedy|sampled|auto.

The drafts take turns, with no draft among them, in rounds of new prompts that are the same for all. The end of sequence is
ignored, and request i has the same random numbers in all. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product, repeat
from operator import itemgetter
from statistics import geometric_mean
from typing import Any

from titan import LLM, SamplingParams
from titan.bench.draft_recipes import DraftRecipe, Models
from titan.bench.engine_run import NUM_DEPTHS, make_idle, run_workload
from titan.bench.loading import engine_options, threads_on
from titan.bench.options import add_draft_weight_bits, add_dtype, add_target, bench_parser, model_options, parse, positive
from titan.bench.prompts import SOURCES, SYNTHETIC, prompt_stream
from titan.bench.report import Report, count, figure_table, in_one_round, measure_and_publish
from titan.bench.runs import Run, with_equal_outputs
from titan.bench.samples import NO_DRAFT, Label, Row, Sample, make_rows, rotated, with_ratio
from titan.bench.turns import Turns, error_line
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.draft.base import Drafter
from titan.kernels.backend import choose_device
from titan.models.files import DEMO, ModelFiles, resolve_model
from titan.models.tokenizer import load_tokenizer

DEMO_DRAFTS = ["demo", "demo,tokens=2", "demo,tree=dynamic,tokens=8", "truncated:1", "ngram"]
OTHER_DRAFTS = ["truncated:1", "truncated:2", "ngram"]
QUICK = {"output_len": 48, "rounds": 1}
LABELS = ("prompts", "temperature", "draft")
SPEED = {
    "tokens/s": "±.0f",
    "x no draft": "±.2f",
    "tokens/step": ".2f",
    "draft passes": ".1f",
    "ms/draft pass": ".2f",
    "ms/target pass": ".2f",
    "verify/decode": ".2f",
    "ms/decode step": ".2f",
    "host": ".1%",
    "trees, batch, acceptance": ".1%",
    "equal outputs": ".0%",
}
ACCEPTANCE = {"nodes/step": ".2f", "tokens/step": "±.2f"} | {f"depth {depth}": ".2f" for depth in range(1, 1 + NUM_DEPTHS)}
NOTES = (
    "x no draft: median over the rounds of the ratio within a round, ± half the range; over prompts the geometric mean. tokens/s "
    "count the wall time of a run, prefill included; times of steps and passes are those without prompts.",
    "verify/decode: a target pass with draft tokens over one without. tokens/step: mean acceptance length, final token included. "
    "depth d: share of the requests' steps that accepted d or more draft tokens; all of them add up to tokens/step without final "
    "tokens.",
)


class DraftBench:
    """One engine whose draft is swapped from run to run; ``samples`` and ``problems`` grow as it goes.

    Args:
        args: from `parse_arguments`; a draft that cannot be loaded, and prompts that there are not, are left out.

    Raises:
        ValueError: an option is not allowed, the target cannot be used, or no draft or no prompts are left.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.output_len < 2:
            raise ValueError("--output-len 1 is not allowed: it must be at least 2, as nothing is drafted for the first token")
        self._cuts: dict[str, Any] = {"top_k": args.top_k, "top_p": args.top_p}
        for temperature in args.temperature:
            SamplingParams(temperature=temperature, **self._cuts)  # refuses what is none before work is done
        self.args = args
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.recipes = [DraftRecipe.parse(text, args.max_draft_tokens) for text in args.draft]
        self.workloads = self._take_workloads()
        most = max(recipe.num_tokens for recipe in self.recipes)
        options = {"speculation": "fixed", "max_draft_tokens": most, "num_threads": threads_on(choose_device("auto"))}
        max_model_len = args.prompt_len.high + args.output_len
        self.engine = LLM(args.model, **engine_options(args, args.concurrency, max_model_len, **options)).engine
        self.drafters = self._make_drafters()

    def _take_workloads(self) -> dict[str, list[Workload]]:
        """The requests of each round, by the source of their prompts."""
        args = self.args
        found: dict[str, list[Workload]] = {}
        for source in args.prompts:
            try:
                prompts = prompt_stream(args.model, source, args.prompt_len, args.seed, **model_options(args))
                num_requests = args.concurrency * args.waves
                found[source] = [take_workload(prompts, num_requests, repeat(args.output_len)) for _ in range(args.rounds)]
            except ValueError as error:
                self.problems.append(f"left out: prompts {source}: {error}")
        if not found:
            raise ValueError("; ".join(self.problems))
        return found

    def _make_drafters(self) -> dict[str, Drafter | None]:
        drafters: dict[str, Drafter | None] = {NO_DRAFT: None}
        models: Models = {}
        failures: dict[str, list[str]] = {}  # names by error
        for recipe in self.recipes:
            try:
                drafters[recipe.name] = recipe.make_drafter(self.engine, models)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one draft, the others are measured
                failures.setdefault(error_line(error), []).append(recipe.name)
        self.problems += [f"left out: {'; '.join(names)}: {error}" for error, names in failures.items()]
        if len(drafters) == 1:
            raise ValueError("; ".join(self.problems))
        return drafters

    def run(self) -> Iterator[None]:
        """Measure in rounds; what fails is left out from then on."""
        places = list(product(range(self.args.rounds), self.workloads, self.args.temperature))
        with Turns(len(places) * len(self.drafters), self.problems, lambda _: make_idle(self.engine)) as turns:
            for round_id, source, temperature in places:
                runs: dict[str, Run] = {}
                for draft in rotated(self.drafters, round_id):
                    work = partial(self._run, draft, self.workloads[source][round_id], temperature)
                    run = turns.take(draft, f"(prompts {source}, temperature {temperature:g})", work)
                    if run is not None:
                        runs[draft] = run
                        labels: dict[str, Label] = {"prompts": source, "temperature": temperature, "draft": draft}
                        self.samples.append(Sample(labels, round_id, {**run.rates, **run.figures}))
                    yield
                if NO_DRAFT in runs and temperature == 0:
                    self.samples[-len(runs) :] = with_equal_outputs(self.samples[-len(runs) :], runs.values(), runs[NO_DRAFT])

    def _run(self, draft: str, workload: Workload, temperature: float) -> Run:
        """Swap, warm up, and run: what runs a draft model is new after a swap, and captures its first passes on a GPU."""
        self.engine.swap_draft(self.drafters[draft])
        concurrency = self.args.concurrency

        def work(part: Workload) -> Run:
            return run_workload(self.engine, part, concurrency=concurrency, temperature=temperature, **self._cuts)

        work(workload.warm_up(concurrency))
        return work(workload)

    def report(self) -> Report:
        """Lay out what was measured so far."""
        args, samples = self.args, compare(self.samples)
        rows = make_rows(samples)
        places = [
            f"at temperature {t:g} {draft} ({gain:.2f} x no draft)" for t, (draft, gain) in sorted(find_fastest(rows).items())
        ]
        answer = f"Fastest draft by tokens/s{in_one_round(rows)}: {'; '.join(places)}."
        about = (
            f"{args.model}, {args.dtype}; {count(args.concurrency, 'request')} at once, {count(args.waves, 'request')} per slot, "
            f"prompts of {args.prompt_len} tokens, {args.output_len} generated; {count(args.rounds, 'interleaved round')}; above "
            f"temperature 0, top-k {args.top_k} and top-p {args.top_p:g}."
        )
        return Report(
            "Drafts",
            answer if places else "No draft could be compared with no draft.",
            {"rows": rows, "samples": samples},
            [
                figure_table("Speed and costs", rows, LABELS, SPEED),
                figure_table("Acceptance", [row for row in rows if row.median("nodes/step")], LABELS, ACCEPTANCE),
            ],
            [about, *NOTES],
            self.problems,
            {"kernels": self.engine.backend.facts()["kernels"]},
        )


def compare(samples: Sequence[Sample]) -> list[Sample]:
    """Add the speed-up, and the ratio of the target's passes, to no draft in the same rounds."""
    samples = with_ratio(samples, "x no draft", "tokens/s", draft=NO_DRAFT)
    return with_ratio(samples, "verify/decode", "ms/target pass", draft=NO_DRAFT)


def find_fastest(rows: Sequence[Row]) -> dict[float, tuple[str, float]]:
    """The fastest draft of each temperature, and its speed-up, a geometric mean over prompts."""
    speed_ups: dict[float, dict[str, list[float]]] = {}
    for row in rows:
        if (speed_up := row.median("x no draft")) is not None:
            drafts = speed_ups.setdefault(float(row.labels["temperature"]), {})
            drafts.setdefault(str(row.labels["draft"]), []).append(speed_up)
    means = {t: {draft: geometric_mean(each) for draft, each in drafts.items()} for t, drafts in speed_ups.items()}
    return {t: max(drafts.items(), key=itemgetter(1)) for t, drafts in means.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or nothing is left to measure.
    """
    args = parse_arguments(argv)
    bench = DraftBench(args)
    drafts = {f"draft {recipe.model}": recipe.model for recipe in bench.recipes}
    measure_and_publish(args, bench.run, bench.report, {"target": args.model, **drafts})


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; drafts and prompts that are not given are filled in."""
    parser = bench_parser("drafts", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: {output_len} tokens, {rounds} round".format(**QUICK))
    add_target(parser)
    add_draft_weight_bits(parser)
    draft_help = f"may be given again (default: {' '.join(DEMO_DRAFTS)}; with another target {' '.join(OTHER_DRAFTS)})"
    add("--draft", action="append", metavar="NAME[,OPTION=VALUE...]", help=draft_help)
    add("--max-draft-tokens", type=positive, default=4, help="of drafts that do not say it (default: %(default)s)")
    add_dtype(parser)
    add("--temperature", nargs="+", type=float, default=[0.0], help="of the requests (default: %(default)s)")
    add("--top-k", type=int, default=0, help="above temperature 0; 0: all (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="above temperature 0 (default: %(default)s)")
    add("--concurrency", type=positive, default=1, help="requests at once (default: %(default)s)")
    add("--waves", type=positive, default=1, help="requests per slot (default: %(default)s)")
    add("--prompts", nargs="+", help=f"{', '.join(SOURCES)}, {SYNTHETIC} (default: all but this; synthetic without a tokenizer)")
    add("--prompt-len", type=Lengths.parse, default="64", help="tokens, or a mix such as 16-256 (default: 64)")
    add("--output-len", type=positive, default=128, help="tokens (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="default: %(default)s")
    args = parse(parser, argv, QUICK)
    args.draft = args.draft or (DEMO_DRAFTS if args.model == DEMO else OTHER_DRAFTS)
    if args.prompts is None:
        files = ModelFiles(resolve_model(args.model, "target"))
        has_text = load_tokenizer(files, trust_remote_code=args.trust_remote_code) is not None
        args.prompts = list(SOURCES) if has_text else [SYNTHETIC]
    return args
