"""Drafts that take turns in one engine, on the same requests: what `titan bench drafts` and `titan bench trees` share.

Samples of drafts add up to speed-ups, and to the depths that accepted paths reach.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, repeat
from operator import itemgetter
from statistics import geometric_mean

from titan import LLM, SamplingParams
from titan.bench.depths import DepthCounts, wilson_share
from titan.bench.draft_recipes import DraftRecipe, Models
from titan.bench.engine_run import make_idle, run_workload
from titan.bench.loading import engine_options
from titan.bench.options import add_draft_weight_bits, add_rounds, add_target, bench_parser, model_options, positive
from titan.bench.prompts import prompt_stream
from titan.bench.report import Report, count, figure_table, format_label, in_one_round
from titan.bench.runs import Run, with_equal_outputs
from titan.bench.samples import NO_DRAFT, Label, Row, Sample, Spread, group_samples, make_rows, rotated, sum_details, with_ratio
from titan.bench.turns import Turns, error_line
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.dtypes import RUN_DTYPES
from titan.draft.base import Drafter

QUICK = {"output_len": 48, "rounds": 1}
COLUMNS = {
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
NUM_DEPTHS = 6
"""Columns of the table of depths; the JSON file has all."""
DEPTHS = {"trees": ".0f"} | {f"depth {depth}": "[.2f" for depth in range(1, 1 + NUM_DEPTHS)}
NOTES = (
    "x no draft: median over the rounds of the ratio within a round, ± half the range; over workloads the geometric mean. tokens/s "
    "count the wall time of a run, prefill included; times of steps and passes are those without prompts.",
    "verify/decode: a target pass with draft tokens over one without. tokens/step: mean acceptance length, final token included. "
    "depth d: of the trees that reach depth d, the share that had a node so deep accepted, and its 95 % interval (Wilson 1927), as "
    f"if trees were independent; those below {NUM_DEPTHS} are only in the JSON file; titan generate counts nodes, not trees.",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """Drafts are compared within one."""

    labels: Mapping[str, Label]  # of its samples, the "temperature" of the requests among them
    workloads: Sequence[Workload]  # one per round
    recipes: Sequence[DraftRecipe]


class DraftBench:
    """One engine whose draft is swapped from run to run; ``samples`` and ``problems`` grow as it goes.

    Args:
        args: options of `draft_parser`.
        title: of the report.
        kind: the label that names drafts.
        settings: in each, no draft and the drafts of its recipes take turns; a draft that cannot be loaded is left out.

    Raises:
        ValueError: the target cannot be used, or none of the drafts; or outputs are so short that there is no step to time.
    """

    def __init__(self, args: argparse.Namespace, title: str, kind: str, settings: Sequence[Setting]) -> None:
        if args.output_len < 2:
            raise ValueError("--output-len 1 is not allowed: it must be at least 2, as nothing is drafted for the first token")
        self.args = args
        self.title = title
        self.kind = kind
        self.settings = settings
        self.samples: list[Sample] = []
        for setting in settings:
            SamplingParams(temperature=float(setting.labels["temperature"]))  # refuses what is none before work is done
        recipes = {recipe.name: recipe for setting in settings for recipe in setting.recipes}
        options = {"speculation": "fixed", "max_draft_tokens": max(recipe.num_tokens for recipe in recipes.values())}
        max_model_len = args.prompt_len.high + args.output_len
        self.engine = LLM(args.model, **engine_options(args, args.concurrency, max_model_len, **options)).engine
        self.drafters: dict[str, Drafter | None] = {NO_DRAFT: None}
        models: Models = {}
        failures: dict[str, list[str]] = {}  # names by error
        for recipe in recipes.values():
            try:
                self.drafters[recipe.name] = recipe.make_drafter(self.engine, models)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one draft, the others are measured
                failures.setdefault(error_line(error), []).append(recipe.name)
        self.problems = [f"left out: {'; '.join(names)}: {error}" for error, names in failures.items()]
        if len(self.drafters) == 1:
            raise ValueError("; ".join(self.problems))

    def run(self) -> Iterator[None]:
        """Measure in rounds; what fails is left out from then on."""
        settings = [
            (setting, [draft for draft in (NO_DRAFT, *(each.name for each in setting.recipes)) if draft in self.drafters])
            for setting in self.settings
        ]
        num_turns = self.args.rounds * sum(len(drafts) for _, drafts in settings)
        with Turns(num_turns, self.problems, lambda _: make_idle(self.engine)) as turns:
            for round_id, (setting, drafts) in product(range(self.args.rounds), settings):
                place = ", ".join(f"{name} {format_label(value)}" for name, value in setting.labels.items())
                runs: dict[str, Run] = {}
                for draft in rotated(drafts, round_id):
                    run = turns.take(draft, f"({place})", partial(self._run, setting, draft, round_id))
                    if run is not None:
                        runs[draft] = run
                        labels = {**setting.labels, self.kind: draft}
                        self.samples.append(Sample(labels, round_id, {**run.rates, **run.figures}, run.details))
                    yield
                if NO_DRAFT in runs and setting.labels["temperature"] == 0:
                    self.samples[-len(runs) :] = with_equal_outputs(self.samples[-len(runs) :], runs.values(), runs[NO_DRAFT])

    def _run(self, setting: Setting, draft: str, round_id: int) -> Run:
        """Swap, warm up, and run: what runs a draft model is new after a swap, and captures its first passes on a GPU."""
        self.engine.swap_draft(self.drafters[draft])
        workload = setting.workloads[round_id]
        temperature = float(setting.labels["temperature"])
        work = partial(run_workload, self.engine, concurrency=self.args.concurrency, temperature=temperature)
        work(workload.warm_up(self.args.concurrency))
        counts = DepthCounts()
        self.engine.observers[:] = [counts.observe]
        run = work(workload)
        return replace(run, details=counts.details)

    def report(self, *notes: str) -> Report:
        """Lay out what was measured so far."""
        args, kind, samples = self.args, self.kind, compare(self.samples, self.kind)
        rows, depths = make_rows(samples), find_depths(samples)
        fastest = find_fastest(rows, kind)
        places = [f"at temperature {t:g} {draft} ({gain:.2f} x no draft)" for t, (draft, gain) in sorted(fastest.items())]
        answer = f"Fastest {kind} by tokens/s{in_one_round(rows)}: {'; '.join(places)}."
        about = (
            f"{args.model}, {args.dtype}; {count(args.concurrency, 'request')} at once, {count(args.waves, 'request')} per slot, "
            f"prompts of {args.prompt_len} tokens, {args.output_len} generated; {count(args.rounds, 'interleaved round')}."
        )
        labels = list(rows[0].labels) if rows else []
        return Report(
            self.title,
            answer if places else f"No {kind} could be compared with no draft.",
            {"rows": rows, "depths": depths, "samples": samples},
            [
                figure_table("Speed and costs", rows, labels, COLUMNS),
                figure_table("Depths of accepted paths", depths, labels, DEPTHS),
            ],
            [about, *notes, *NOTES],
            self.problems,
        )


def compare(samples: Sequence[Sample], kind: str) -> list[Sample]:
    """Add the speed-up, and the ratio of the target's passes, to no draft in the same rounds.

    Args:
        samples: of `DraftBench`.
        kind: the label that names drafts.
    """
    samples = with_ratio(samples, "x no draft", "tokens/s", **{kind: NO_DRAFT})
    return with_ratio(samples, "verify/decode", "ms/target pass", **{kind: NO_DRAFT})


def find_depths(samples: Sequence[Sample]) -> list[Row]:
    """Per draft, of the "trees" that reach "depth 1", "depth 2" and so on, the share of which a node so deep was accepted."""
    found = []
    for group in group_samples(samples):
        trees, accepted = sum_details(group, "trees per depth"), sum_details(group, "accepted per depth")
        if trees:
            counts = enumerate(zip(accepted, trees, strict=True), 1)
            shares = {f"depth {depth}": wilson_share(*each) for depth, each in counts}
            found.append(Row(group[0].labels, {"trees": Spread.of(trees[:1]), **shares}))
    return found


def find_fastest(rows: Sequence[Row], kind: str) -> dict[float, tuple[str, float]]:
    """The fastest draft of each temperature, and its speed-up, a geometric mean over workloads."""
    speed_ups: dict[float, dict[str, list[float]]] = {}
    for row in rows:
        if (speed_up := row.median("x no draft")) is not None:
            drafts = speed_ups.setdefault(float(row.labels["temperature"]), {})
            drafts.setdefault(str(row.labels[kind]), []).append(speed_up)
    means = {t: {draft: geometric_mean(each) for draft, each in drafts.items()} for t, drafts in speed_ups.items()}
    return {t: max(drafts.items(), key=itemgetter(1)) for t, drafts in means.items()}


def take_workloads(args: argparse.Namespace, source: str) -> list[Workload]:
    """Take the requests of the rounds of a setting.

    Raises:
        ValueError: the source of prompts cannot be used.
    """
    prompts = prompt_stream(args.model, source, args.prompt_len, args.seed, **model_options(args))
    return [take_workload(prompts, args.concurrency * args.waves, repeat(args.output_len)) for _ in range(args.rounds)]


def draft_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of both subcommands; ``--quick`` means `QUICK`."""
    parser = bench_parser(name, description)
    parser.add_argument("--quick", action="store_true", help="a first look: {output_len} tokens, {rounds} round".format(**QUICK))
    add_target(parser)
    add_draft_weight_bits(parser)
    parser.add_argument("--dtype", choices=list(RUN_DTYPES), default="bfloat16")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="of the requests (default: %(default)s)")
    parser.add_argument("--concurrency", type=positive, default=1, help="requests at once (default: %(default)s)")
    parser.add_argument("--waves", type=positive, default=1, help="requests per slot (default: %(default)s)")
    parser.add_argument("--prompt-len", type=Lengths.parse, default="64", help="tokens, or a mix such as 16-256 (default: 64)")
    parser.add_argument("--output-len", type=positive, default=128, help="tokens (default: %(default)s)")
    add_rounds(parser, 3)
    return parser
