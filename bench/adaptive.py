"""Adaptive speculation against none and against fixed numbers of draft tokens, over the number of requests at once.

    titan bench adaptive --quick                                             the demo pair, a first look
    titan bench adaptive --model DIR/target --draft-model DIR/draft --dtype float32
    titan bench adaptive --hopeless                                          a draft with shuffled weights, of the same cost
    titan bench adaptive --mixed                                             a draft that is wrong for every second request
    titan bench adaptive --first-steps 100                                   new engines, without a warm-up: none against adaptive

Each setting has an engine of its own, with the options of its name and defaults else. They share the weights, and run the same
requests side by side: one goes on for a fifth of a second, then each other until it is as far: at as many tokens, or first steps.
Requests change from round to round. On a CPU, each run has its KV cache in another place of the memory, which makes a difference of
some 3 % between engines that are the same. All requests of a run arrive together. Temperature 0, and the end of sequence is
ignored. Tokens per second count the wall time of a run, prefill included. Ratios are medians over the rounds of the ratio within a
round, with 95 % intervals from six rounds on. Nothing else should run on the machine.
Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from statistics import geometric_mean
from typing import Any

import numpy as np

from titan.bench.draft_recipes import DraftRecipe, LoadedDraft, Models
from titan.bench.engine_run import first_steps, make_idle, run_workload, workload_steps
from titan.bench.hopeless_drafts import HalfHopelessDrafter, load_shuffled
from titan.bench.loading import engine_options, load_target, open_backend
from titan.bench.options import add_draft, add_dtype, add_target, bench_parser, model_options, output_file, parse, positive
from titan.bench.plot import check_plot, plot_rows
from titan.bench.prompts import prompt_stream
from titan.bench.report import Report, count, figure_table, in_one_round, measure_and_publish
from titan.bench.samples import Row, Sample, Spread, group_samples, make_rows, with_ratio
from titan.bench.side_by_side import OwnTime, Steps, run_side_by_side
from titan.bench.turns import Turns, log
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.options import EngineConfig, SpeculationOptions, draft_tree_of
from titan.draft.base import Drafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.ngram import NgramDrafter
from titan.draft.registry import open_drafter
from titan.engine import Engine

OFF, FIXED, ADAPTIVE = "off", "fixed", "adaptive"
"""Settings; the second is followed by a number of draft tokens, and perhaps by a shape of the draft tree."""
ALL = "all"
"""Label of the geometric mean over all numbers of requests at once, setting by setting."""
GAIN, SHARE = "x off", "x best fixed"
COLUMNS = {
    "tokens/s": "±.1f",
    GAIN: "[.2f",
    SHARE: "[.2f",
    "nodes/step": ".2f",
    "tokens/step": ".2f",
    "ms/step": "±.2f",
    "adapt": ".1%",
}
NUM_RESAMPLES = 10_000
MIN_ROUNDS = 6
"""From which there are intervals: the range of five values holds their median with less than 95 %."""
FIXED_HELP = "fixed numbers of draft tokens, perhaps with a draft tree, such as 6,tree=dynamic (default: 1 2 4 6)"
QUICK = {"concurrency": [1, 8], "fixed": ["2", "6"], "output_len": 48, "rounds": 3}


class AdaptiveBench:
    """Engines of all settings, by name, which take turns; ``samples`` and ``problems`` grow as it goes.

    Args:
        args: from `parse_arguments`.

    Raises:
        ValueError: a model cannot be used, or there are no such prompts.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.settings: dict[str, dict[str, Any]] = {OFF: {"speculation": "off"}}
        if not args.first_steps:
            self.settings |= {f"{FIXED} {each}": fixed_options(each) for each in args.fixed}
        self.settings[ADAPTIVE] = {}
        longest_step = 1 + EngineConfig().speculation.max_draft_tokens
        self._output_len = args.first_steps * longest_step + 1 if args.first_steps else args.output_len
        self._prompts = prompt_stream(args.model, args.prompts, args.prompt_len, args.seed, **model_options(args))
        self._backend = open_backend(args.device)
        self._target, self._tokenizer = load_target(args, self._backend)
        self._drafts: Models = {}
        self._engines: dict[str, Engine] = {}
        self._profile_s = 0.0  # that measuring passes took at most
        if not args.first_steps:
            self._engines = {setting: self._make_engine(setting) for setting in self.settings}

    def run(self) -> Iterator[None]:
        """Let the settings take turns, with one number of requests at once after the other; one that fails is left out."""
        args = self.args
        num_turns = len(args.concurrency) * args.rounds * len(self.settings)
        with Turns(num_turns, self.problems, self._recover) as turns:
            for at_once in args.concurrency:
                num_requests = at_once * (1 if args.first_steps else args.waves)
                workloads = [take_workload(self._prompts, num_requests, repeat(self._output_len)) for _ in range(args.rounds)]
                place = f"at {count(at_once, 'request')} at once"
                for round_id, workload in enumerate(workloads):
                    starts = {setting: partial(self._start, setting, workload, at_once) for setting in self.settings}
                    for setting, run in run_side_by_side(turns, place, starts, round_id).items():
                        labels = {"at once": at_once, "setting": setting}
                        self.samples.append(Sample(labels, round_id, {**run.rates, **run.figures}))
                yield

    def _start(self, setting: str, workload: Workload, at_once: int, own_time: OwnTime) -> Steps:
        """Begin a run, after a warm-up, since the system may have put an engine's memory aside; the first steps have none."""
        if self.args.first_steps:
            return first_steps(self._make_engine(setting), workload, self.args.first_steps, own_time)
        engine = self._engines[setting]
        if engine.backend.is_host:  # a new cache, elsewhere in the memory
            engine.resize_kv_cache(engine.kv.num_blocks + 1)
        run_workload(engine, workload.warm_up(at_once), at_once)
        return workload_steps(engine, workload, own_time, at_once)

    def _recover(self, setting: str) -> None:
        if setting in self._engines:
            make_idle(self._engines[setting])

    def _make_engine(self, setting: str) -> Engine:
        args, max_model_len = self.args, self.args.prompt_len.high + self._output_len
        options = engine_options(args, max(args.concurrency), max_model_len, **self.settings[setting])
        engine = Engine(EngineConfig.of(**options), self._target, tokenizer=self._tokenizer, backend=self._backend)
        if setting != OFF:
            engine.swap_draft(self._make_drafter(engine))
        self._profile_s = max(self._profile_s, engine.metrics().profile_s)
        return engine

    def _make_drafter(self, engine: Engine) -> Drafter:
        args, draft = self.args, self.args.draft_model
        if args.hopeless and not self._drafts:
            if plain_drafter(open_drafter(draft, engine.draft_context())(), "hopeless", draft).vocabulary is not None:
                raise ValueError(f"--hopeless needs a draft with the target's tokens: those of --draft-model {draft} are others")
            shuffled = load_shuffled(draft, args.dtype, args.draft_weight_bits, self._backend, args.seed)
            self._drafts[draft] = LoadedDraft(shuffled)
        options = engine.config.speculation
        recipe = DraftRecipe(draft, draft, tree=options.draft_tree, num_tokens=options.max_draft_tokens)
        drafter = recipe.make_drafter(engine, self._drafts)
        if not args.mixed:
            return drafter
        plain = plain_drafter(drafter, "mixed", draft)
        return HalfHopelessDrafter(draft, plain.model, engine.draft_context(), plain.vocabulary)

    def report(self) -> Report:
        """Lay out what was measured so far."""
        args, samples = self.args, compare([*self.samples, *mean_samples(self.samples)])
        rows = interval_rows(samples)
        kind = " with shuffled weights" if args.hopeless else ", wrong for every second request" if args.mixed else ""
        what = f"the first {args.first_steps} steps of new engines" if args.first_steps else f"{args.output_len} generated"
        notes = [
            f"{args.model}, draft {args.draft_model}{kind}, {args.dtype}; prompts of {args.prompt_len} tokens, {what}; "
            f"{count(args.rounds, 'interleaved round')}.",
            f"{GAIN}, {SHARE}: median over the rounds of the ratio within a round, and its 95 % bootstrap interval, of fewer than "
            f"{MIN_ROUNDS} rounds their range; the best fixed setting is the one with the most tokens/s there. {ALL}: geometric "
            f"mean over the requests at once, so that {SHARE} is that of the best single one. nodes/step: draft tokens verified "
            "per request and step; tokens/step: emitted. adapt: share of decode steps that deciding and learning take. Measuring "
            f"the costs of passes took an engine at most {self._profile_s:.1f} s.",
        ]
        results: dict[str, Sequence[Row | Sample]] = {"rows": rows, "samples": samples}
        tables = [figure_table("Tokens/s", rows, ["at once", "setting"], COLUMNS)]
        versions = {"kernels": self._backend.facts()["kernels"]}
        return Report("Adaptive speculation", adaptive_answer(rows), results, tables, notes, self.problems, versions)


def plain_drafter(drafter: Drafter, option: str, name: str) -> DraftModelDrafter:
    """Return a drafter that is nothing but a draft model: a subclass may propose otherwise.

    Raises:
        ValueError: it is another, for which ``option`` has no meaning.
    """
    if type(drafter) is not DraftModelDrafter:
        raise ValueError(f"--{option} needs a draft model: --draft-model {name} is a {type(drafter).__name__}")
    return drafter


def mean_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Geometric mean of tokens/s over the requests at once, per setting and round that has all of them; none of a single one."""
    places = {each.labels["at once"] for each in samples}
    groups: dict[tuple[str, int], list[float]] = {}
    for each in samples:
        groups.setdefault((str(each.labels["setting"]), each.round_id), []).append(each.figures["tokens/s"])
    return [
        Sample({"at once": ALL, "setting": setting}, round_id, {"tokens/s": geometric_mean(rates)})
        for (setting, round_id), rates in groups.items()
        if len(rates) == len(places) > 1
    ]


def compare(samples: Sequence[Sample]) -> list[Sample]:
    """Add the ratios of tokens/s to those of `OFF`, and of the fixed setting whose median is the highest at as many at once."""
    found: list[Sample] = []
    for at_once in dict.fromkeys(each.labels["at once"] for each in samples):
        mine = with_ratio([each for each in samples if each.labels["at once"] == at_once], GAIN, "tokens/s", setting=OFF)
        fixed = [row for row in make_rows(mine) if str(row.labels["setting"]).startswith(FIXED)]
        if fixed:
            best = max(fixed, key=lambda row: row.figures["tokens/s"].median)
            mine = with_ratio(mine, SHARE, "tokens/s", setting=best.labels["setting"])
        found += mine
    return found


def interval_rows(samples: Sequence[Sample]) -> list[Row]:
    """Rows whose ratios have intervals in place of ranges, from `MIN_ROUNDS` on."""
    rows = []
    for row, group in zip(make_rows(samples), group_samples(samples), strict=True):
        values = {name: [each.figures[name] for each in group if name in each.figures] for name in (GAIN, SHARE)}
        intervals = {name: bootstrap_median(mine) for name, mine in values.items() if len(mine) >= MIN_ROUNDS}
        rows.append(replace(row, figures={**row.figures, **intervals}))
    return rows


def bootstrap_median(values: Sequence[float]) -> Spread:
    """The median with its 95 % percentile interval; always the same for the same values.

    Efron, "Bootstrap methods: another look at the jackknife", 1979.
    """
    resamples = np.random.default_rng(0).choice(values, (NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resamples, axis=1), [2.5, 97.5])
    return Spread(float(np.median(values)), float(low), float(high), len(values))


def adaptive_answer(rows: Sequence[Row]) -> str:
    """What adaptive speculation gains over none and over fixed numbers of draft tokens."""
    mine = [row for row in rows if row.labels["setting"] == ADAPTIVE]
    texts = []
    for figure, other in {GAIN: "no speculation", SHARE: "the best fixed number"}.items():
        found = [f"{row.figures[figure].median:.2f}x at {row.labels['at once']}" for row in mine if figure in row.figures]
        texts += [f"{', '.join(found)} over {other}"] if found else []
    if not texts:
        return "Adaptive speculation could not be compared."
    return f"Tokens/s of adaptive speculation{in_one_round(mine)}: {'; '.join(texts)}."


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or the models cannot be used.
    """
    args = parse_arguments(argv)
    bench = AdaptiveBench(args)
    measure_and_publish(args, bench.run, bench.report)
    if args.plot is not None:
        plot_rows(make_rows(bench.samples), args.plot)
        log(f"written: {args.plot}")


def fixed_options(setting: str) -> dict[str, Any]:
    """Return the engine's options of a number of draft tokens, which may have a shape behind it."""
    number, _, tree = setting.partition(",tree=")
    return {"speculation": FIXED, "max_draft_tokens": positive(number), "draft_tree": draft_tree_of(tree or "auto")}


def fixed_setting(text: str) -> str:
    """Check a number of draft tokens, which may have a shape behind it, by the engine's own rules, as a type of `argparse`."""
    try:
        SpeculationOptions(**fixed_options(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: there is no draft, an option was given that has no effect on first steps, or no such plot can be drawn.
    """
    parser = bench_parser("adaptive", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: 1 and 8 at once, two fixed numbers, outputs of 48 tokens, 3 rounds")
    add_target(parser)
    add_draft(parser)
    add_dtype(parser)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: %(default)s)")
    add("--concurrency", nargs="+", type=positive, default=[1, 8, 32], help="requests at once (default: 1 8 32)")
    add("--fixed", nargs="+", type=fixed_setting, default=["1", "2", "4", "6"], help=FIXED_HELP)
    add("--prompts", default="auto", help="auto, code, prose, chat, json or synthetic (default: %(default)s)")
    add("--prompt-len", type=Lengths.parse, default=Lengths(64, 64), help="tokens, or 16-512 for a mix (default: %(default)s)")
    add("--output-len", type=positive, default=128, help="tokens (default: %(default)s)")
    add("--waves", type=positive, help="requests per slot (default: 1, with --mixed 2, so that there are both kinds)")
    add("--rounds", type=positive, default=10, help="default: %(default)s")
    add("--first-steps", type=positive, metavar="N", help="time only the first N steps of new engines, off and adaptive")
    add("--plot", type=output_file, metavar="FILE", help="draw tokens/s and nodes/step over the requests at once: .svg, .png, ...")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--hopeless", action="store_true", help="shuffle the draft's weights: nothing that it proposes is right")
    drafts.add_argument("--mixed", action="store_true", help="change the proposals for every second request: they are wrong")
    args = parse(parser, argv, QUICK)
    if args.first_steps:
        names = "fixed", "waves", "output_len"
        given = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names)))  # without defaults
        for name in names:
            if getattr(given, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is not allowed with --first-steps: it would have no effect")
    if args.plot is not None:
        check_plot(args.plot)
    args.waves = args.waves or (2 if args.mixed else 1)
    if args.draft_model is None:
        raise ValueError(f"--model {args.model} needs a draft: give --draft-model")
    if args.draft_model == NgramDrafter.name and (args.hopeless or args.mixed):
        raise ValueError(f"--{'mixed' if args.mixed else 'hopeless'} needs a draft model: --draft-model {args.draft_model} is none")
    return args
