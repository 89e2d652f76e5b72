"""Which draft suits a target: any number of them in one process, swapped between runs on the same prompts.

    titan bench drafts --quick                                               a first look, in less than a minute
    titan bench drafts                                                       six drafts of the demo target
    titan bench drafts --draft demo --draft ngram --draft truncated:1 --draft demo,tree=dynamic,tokens=8
    titan bench drafts --model DIR/target --draft DIR/draft --draft DIR/draft,bits=8 --workload synthetic

A draft is a name and options: demo, a folder, a hub id, ngram, or truncated:N (the target's first N layers as a draft), then
tree=chain|dynamic|auto or the parent of each node (tree=-1/-1/0), tokens=MOST PER STEP, sampling=greedy|sampled|auto, and
bits=2..8, which rounds the weights of its linear layers to integers and back: that measures what the rounding costs in acceptance,
not the speed of integer arithmetic, because the rounded weights run in the model's own dtype.

The drafts take turns, with no draft among them, in rounds of new prompts that are the same for all. The end of sequence is
ignored, and request i has seed i. Tokens per second count the wall time of the run, prefill included; the costs of passes and the
step are those after the prefill. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from titan.bench.noise import in_rounds
from titan.bench.profiling import timed, timed_passes
from titan.bench.progress import Progress
from titan.bench.survivors import Survivors, error_line

from titan import LLM, SamplingParams
from titan.bench.acceptance import AcceptanceCounts
from titan.bench.draft_recipes import DraftRecipe
from titan.bench.draft_report import NOTES, depth_table, draft_charts, draft_table, ranking_tables
from titan.bench.draft_rows import NO_DRAFT, PassTimes, Sample, Setting, make_ranking, make_rows
from titan.bench.prompts import SOURCES, SYNTHETIC, find_tokenizer, prompt_stream
from titan.bench.provenance import Provenance, collect_provenance, describe_model
from titan.bench.report import (
    Report,
    add_report_options,
    count,
    fastest_answer,
    measure_and_publish,
    parse_with_preset,
    positive,
    use_threads,
)
from titan.bench.workloads import Lengths
from titan.core.limits import MAX_NODES
from titan.core.metrics import ratio
from titan.draft.base import Drafter
from titan.draft.draft_model import DraftModelDrafter
from titan.models.loader import DEMO, DTYPES, resolve_model

DEMO_DRAFTS = ("demo", "demo,tokens=2", "demo,tree=dynamic,tokens=8", "demo,bits=4", "truncated:1", "ngram")
OTHER_DRAFTS = ("truncated:1", "truncated:2", "ngram")
QUICK = {"output_len": 48, "repeats": 1}
NUM_WARM_UP_TOKENS = 16
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class DraftRun:
    """One run of one draft."""

    token_ids: list[list[int]]  # generated, by prompt
    seconds: float
    counts: AcceptanceCounts
    times: PassTimes | None


class DraftBench:
    """One engine whose draft is swapped from run to run; ``samples``, ``counts`` and ``problems`` grow as it goes.

    Args:
        args: from `parse_arguments`.

    Raises:
        ValueError: the target cannot be used, or there is no draft or no workload that can.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples: list[Sample] = []
        self.counts: dict[tuple[Setting, str], AcceptanceCounts] = {}
        self.problems: list[str] = []
        for temperature in args.temperature:
            self._params(Setting("any", temperature), 0, args.output_len)  # refuses what is no temperature before work is done
        recipes = self._parse_recipes()
        self.prompts = self._take_prompts()
        longest = max(len(prompt) for prompts in self.prompts.values() for prompt in prompts)
        max_model_len = longest + args.output_len
        self.llm = LLM(
            args.model,
            dtype=args.dtype,
            max_draft_tokens=max(recipe.num_tokens for recipe in recipes),
            max_batch_size=args.concurrency,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_kv_blocks=args.concurrency * -(-(max_model_len + MAX_NODES) // BLOCK_SIZE),  # room for the widest search
            enable_prefix_caching=False,
        )
        self.drafters: dict[str, Drafter | None] = {NO_DRAFT: None}
        self.recipes: list[DraftRecipe] = []  # those that can be used
        for recipe in recipes:
            try:
                self.drafters[recipe.text] = recipe.make_drafter(self.llm.engine, args.model)
                self.recipes.append(recipe)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one draft, the others are measured
                self.problems.append(f"draft {recipe.text} was left out: {error_line(error)}")
        if not self.recipes:
            raise ValueError("; ".join(self.problems))

    def _parse_recipes(self) -> list[DraftRecipe]:
        args = self.args
        recipes: dict[str, DraftRecipe] = {}
        for text in args.draft or (DEMO_DRAFTS if args.model == DEMO else OTHER_DRAFTS):
            try:
                recipes[text] = DraftRecipe.parse(text, args.max_draft_tokens)
            except ValueError as error:
                self.problems.append(str(error))
        if not recipes:
            raise ValueError("; ".join(self.problems))
        return list(recipes.values())

    def _take_prompts(self) -> dict[str, list[list[int]]]:
        """Prompts of all rounds by workload, those of the warm-up first; workloads that cannot be had are noted."""
        args = self.args
        prompts = {}
        lengths = Lengths.parse(args.prompt_len)
        has_text = find_tokenizer(resolve_model(args.model, "target")) is not None
        for workload in args.workload or (SOURCES if has_text else [SYNTHETIC]):
            try:
                stream = prompt_stream(args.model, workload, lengths, args.seed)
                prompts[workload] = list(islice(stream, args.concurrency * (args.repeats + 1)))
            except ValueError as error:
                self.problems.append(f"workload {workload} was left out: {error}")
        if not prompts:
            raise ValueError("; ".join(self.problems))
        return prompts

    def run(self) -> None:
        """Warm every draft up at every temperature, then measure all of them in all settings, in rounds.

        A draft that fails is left out from then on.
        """
        args = self.args
        settings = [Setting(workload, temperature) for workload in self.prompts for temperature in args.temperature]
        runs = [(setting, draft) for setting in settings for draft in self.drafters]
        survivors = Survivors(self.llm.engine, self.problems)
        reference: list[list[int]] | None = None  # None: no draft failed
        with Progress(len(runs) * args.repeats) as progress:
            for draft in self.drafters:
                for setting in settings[: len(args.temperature)]:  # one workload at every temperature
                    progress.note(f"warming up {draft}, {setting}")
                    work = partial(self._run, setting, draft, 0, min(NUM_WARM_UP_TOKENS, args.output_len))
                    survivors.attempt(draft, f"while it warmed up on {setting}", work)
            for round_id, (setting, draft) in in_rounds(runs, args.repeats):
                run = survivors.attempt(draft, f"on {setting}", partial(self._run, setting, draft, round_id + 1, args.output_len))
                if draft == NO_DRAFT:
                    reference = None if run is None else run.token_ids
                if run is None:
                    progress.leave_out(1)
                    continue
                self.samples.append(_make_sample(setting, draft, round_id, run, reference))
                self.counts.setdefault((setting, draft), AcceptanceCounts()).add(run.counts)
                progress.advance(f"{setting}, {draft}: {self.samples[-1].tokens_per_second:.0f} tokens/s")

    def _run(self, setting: Setting, draft: str, block: int, output_len: int) -> DraftRun:
        """Generate for one block of prompts with one draft."""
        concurrency = self.args.concurrency
        prompts = self.prompts[setting.workload][block * concurrency : (block + 1) * concurrency]
        drafter = self.drafters[draft]
        self.llm.swap_draft(drafter)
        engine = self.llm.engine
        counts = AcceptanceCounts()
        engine.observers.append(counts.observe)
        try:
            start = time.perf_counter()
            requests = [
                self.llm.frontend.make_request(prompt, self._params(setting, i, output_len)) for i, prompt in enumerate(prompts)
            ]
            for request in requests:
                engine.scheduler.add(request)
            while not all(request.num_output_tokens or request.is_finished for request in requests):
                engine.step()
            with ExitStack() as stack:
                target = stack.enter_context(timed_passes(engine.runner))
                proposals = stack.enter_context(timed(engine.drafter, "propose"))
                passes = proposals
                if isinstance(drafter, DraftModelDrafter):
                    passes = stack.enter_context(timed_passes(drafter.runner))
                step = stack.enter_context(timed(engine, "step"))
                while engine.scheduler.has_unfinished:
                    engine.step()
            seconds = time.perf_counter() - start
        finally:
            engine.observers.remove(counts.observe)
        for request in requests:
            if request.error is not None:
                raise RuntimeError(f"request {request.request_id} ended early: {request.error}")
        times = None
        if step.num_calls and engine.backend.device.type == "cpu":  # elsewhere a pass returns before its work is done
            num_passes = 0 if drafter is None else passes.num_calls
            times = PassTimes(
                step.seconds / step.num_calls,
                target.seconds / target.num_calls,
                ratio(proposals.seconds, num_passes),
                ratio(num_passes, step.num_calls),
            )
        return DraftRun([request.output_token_ids for request in requests], seconds, counts, times)

    def _params(self, setting: Setting, seed: int, output_len: int) -> SamplingParams:
        return SamplingParams(temperature=setting.temperature, seed=seed, max_tokens=output_len, ignore_eos=True)


def _are_equal(output: Sequence[int], reference: Sequence[int]) -> bool:
    return list(output) == list(reference)


def _make_sample(setting: Setting, draft: str, round_id: int, run: DraftRun, reference: Sequence[Sequence[int]] | None) -> Sample:
    num_equal = None
    if setting.temperature == 0 and reference is not None:
        num_equal = sum(map(_are_equal, run.token_ids, reference))
    return Sample(
        setting.workload,
        setting.temperature,
        draft,
        round_id,
        tokens_per_second=sum(map(len, run.token_ids)) / run.seconds,
        num_outputs=len(run.token_ids),
        num_equal=num_equal,
        times=run.times,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or nothing is left to measure.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    use_threads(args)
    bench = DraftBench(args)
    provenance = collect_provenance("drafts", argv, models={"target": args.model}, seed=args.seed)
    drafts = {recipe.text: describe_model(recipe.model, "draft") for recipe in bench.recipes}
    provenance = replace(provenance, models=provenance.models | drafts)
    measure_and_publish(bench.run, lambda is_complete: _report(bench, provenance, is_complete=is_complete), args)


def _report(bench: DraftBench, provenance: Provenance, *, is_complete: bool) -> Report:
    args = bench.args
    rows = make_rows(bench.samples, bench.counts)
    rankings = make_ranking(rows)
    about = (
        f"{args.model}, {args.dtype}; {count(args.concurrency, 'request')} at once, prompts of {args.prompt_len} tokens, "
        f"{args.output_len} generated; {count(args.repeats, 'interleaved round')}."
    )
    best = {temperature: (places[0].name, f"{places[0].speed_up:.2f}") for temperature, places in rankings.items() if places}
    return Report(
        "Drafts",
        fastest_answer("draft over all workloads", best),
        provenance,
        vars(args),
        {"rows": rows, "ranking": [place for places in rankings.values() for place in places], "samples": bench.samples},
        [draft_table(rows), depth_table(rows), *ranking_tables(rankings)],
        charts=draft_charts(rows),
        notes=[about, *NOTES],
        warnings=bench.problems,
        is_complete=is_complete,
    )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="titan bench drafts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a first look: 48 tokens, one round")
    parser.add_argument("--model", default=DEMO, help="folder or hub id of the target (default: the demo)")
    parser.add_argument(
        "--draft",
        action="append",
        metavar="NAME[,OPTION=VALUE...]",
        help=f"may be given again (default: {' '.join(DEMO_DRAFTS)}; with another target {' '.join(OTHER_DRAFTS)})",
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        help=f"{', '.join(SOURCES)}, {SYNTHETIC}, or files of prompts (default: the first four; synthetic without a tokenizer)",
    )
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0], help="of the requests (default: 0)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--concurrency", type=positive, default=1, help="requests at once (default: %(default)s)")
    parser.add_argument("--max-draft-tokens", type=positive, default=4, help="of drafts that do not say it (default: %(default)s)")
    parser.add_argument("--prompt-len", default="64", help="tokens, or a mix such as 16-256 (default: %(default)s)")
    parser.add_argument("--output-len", type=positive, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="rounds (default: %(default)s)")
    add_report_options(parser)
    return parse_with_preset(parser, argv, QUICK)


if __name__ == "__main__":
    main()
