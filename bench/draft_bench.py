"""Drafts that take turns in one engine, on the same requests: what `titan bench drafts` and `titan bench trees` share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat

from titan import LLM, SamplingParams
from titan.bench.draft_recipes import DraftRecipe, Models
from titan.bench.engine_run import BLOCK_SIZE, make_idle, num_blocks_for, profile_workload
from titan.bench.options import add_target, bench_parser, model_options, positive
from titan.bench.predict import DepthCounts
from titan.bench.prompts import prompt_stream
from titan.bench.report import format_label
from titan.bench.runs import Run, share_equal
from titan.bench.samples import NO_DRAFT, Label, Sample
from titan.bench.turns import Turns, error_line, in_rounds
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.dtypes import RUN_DTYPES
from titan.draft.base import Drafter

QUICK = {"output_len": 48, "repeats": 1}


@dataclass(frozen=True, slots=True)
class Setting:
    """Drafts are compared within one."""

    labels: Mapping[str, Label]  # of its samples, the "temperature" of the requests among them
    workloads: Sequence[Workload]  # one to warm up with, then one per round
    recipes: Sequence[DraftRecipe]


class DraftBench:
    """One engine whose draft is swapped from run to run; ``samples`` and ``problems`` grow as it goes.

    Args:
        args: options of `draft_parser`.
        kind: the label that names drafts.
        settings: in each, no draft and the drafts of its recipes take turns; a draft that cannot be loaded is left out.

    Raises:
        ValueError: the target cannot be used, or none of the drafts.
    """

    def __init__(self, args: argparse.Namespace, kind: str, settings: Sequence[Setting]) -> None:
        self.args = args
        self.kind = kind
        self.settings = settings
        self.samples: list[Sample] = []
        for setting in settings:
            SamplingParams(temperature=float(setting.labels["temperature"]))  # refuses what is none before work is done
        recipes = {recipe.name: recipe for setting in settings for recipe in setting.recipes}
        max_model_len = args.prompt_len.high + args.output_len
        self.engine = LLM(
            args.model,
            dtype=args.dtype,
            **model_options(args),
            speculation="fixed",
            draft_weight_bits=None,  # recipes say what they round
            max_draft_tokens=max(recipe.num_tokens for recipe in recipes.values()),
            max_batch_size=args.concurrency,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_blocks_for(args.concurrency, max_model_len),
            enable_prefix_caching=False,
        ).engine
        self.drafters: dict[str, Drafter | None] = {NO_DRAFT: None}
        models: Models = {}
        failures: dict[str, list[str]] = {}  # names by error
        for recipe in recipes.values():
            try:
                self.drafters[recipe.name] = recipe.make_drafter(self.engine, args.model, models)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one draft, the others are measured
                failures.setdefault(error_line(error), []).append(recipe.name)
        self.problems = [f"left out: {'; '.join(names)}: {error}" for error, names in failures.items()]
        if len(self.drafters) == 1:
            raise ValueError("; ".join(self.problems))

    def measure(self) -> None:
        """Measure in rounds; what fails is left out from then on."""
        drafts = [(setting, draft) for setting in self.settings for draft in (NO_DRAFT, *(each.name for each in setting.recipes))]
        runs = [(setting, draft) for setting, draft in drafts if draft in self.drafters]
        reference: Run | None = None
        with Turns(len(runs) * self.args.repeats, self.problems, lambda _: make_idle(self.engine)) as turns:
            for round_id, (setting, draft) in in_rounds(runs, self.args.repeats):
                place = ", ".join(f"{name} {format_label(value)}" for name, value in setting.labels.items())
                run = turns.take(draft, f"({place})", partial(self._run, setting, draft, round_id))
                if draft == NO_DRAFT:
                    reference = run
                if run is not None:
                    figures = {**run.rates, **run.figures}
                    if draft != NO_DRAFT and reference is not None and setting.labels["temperature"] == 0:
                        figures["equal outputs"] = share_equal(run, reference)
                    self.samples.append(Sample({**setting.labels, self.kind: draft}, round_id, figures, run.details))

    def _run(self, setting: Setting, draft: str, round_id: int) -> Run:
        """Swap, warm up, and run: what runs a draft model is new after a swap, and captures its first passes on a GPU."""
        self.engine.swap_draft(self.drafters[draft])
        warm_up, *workloads = setting.workloads
        temperature = float(setting.labels["temperature"])
        profile = partial(profile_workload, self.engine, concurrency=self.args.concurrency, temperature=temperature)
        profile(warm_up)
        counts = DepthCounts()
        self.engine.observers[:] = [counts.observe]
        run = profile(workloads[round_id])
        return replace(run, figures={**run.figures, **counts.figures}, details=counts.details)


def take_workloads(args: argparse.Namespace, source: str) -> list[Workload]:
    """Take the requests of a setting: those of the warm-up, which are short, then those of the rounds.

    Raises:
        ValueError: the source of prompts cannot be used.
    """
    prompts = prompt_stream(args.model, source, args.prompt_len, args.seed, **model_options(args))
    output_lens = [min(16, args.output_len), *[args.output_len] * args.repeats]
    return [take_workload(prompts, args.concurrency * args.waves, repeat(output_len)) for output_len in output_lens]


def draft_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of both subcommands; ``--quick`` means `QUICK`."""
    parser = bench_parser(name, description)
    parser.add_argument("--quick", action="store_true", help="a first look: {output_len} tokens, {repeats} round".format(**QUICK))
    add_target(parser)
    parser.add_argument("--dtype", choices=list(RUN_DTYPES), default="bfloat16")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="of the requests (default: %(default)s)")
    parser.add_argument("--concurrency", type=positive, default=1, help="requests at once (default: %(default)s)")
    parser.add_argument("--waves", type=positive, default=1, help="requests per slot (default: %(default)s)")
    parser.add_argument("--prompt-len", type=Lengths.parse, default="64", help="tokens, or a mix such as 16-256 (default: 64)")
    parser.add_argument("--output-len", type=positive, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="rounds (default: %(default)s)")
    return parser
