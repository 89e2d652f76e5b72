"""Shapes of draft trees on the same prompts: tokens per step, speed, and what the host does for them.

    titan bench trees                                                  the demo pair
    titan bench trees --model DIR/target --draft-model DIR/draft

One engine; the variants take turns in rounds, on prompts that are new in each round and the same for all variants. The end of
sequence is ignored, and request i has seed i. Ratios are medians over the rounds of the ratio within a round. Nothing else should
run on the machine. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import repeat

from titan.bench.noise import Spread, ratio_spread
from titan.bench.profiling import timed, timed_passes
from titan.bench.progress import Progress
from titan.bench.survivors import Survivors

import titan.engine
from titan import LLM, SamplingParams
from titan.bench.draft_rows import NO_DRAFT
from titan.bench.prompts import prompt_stream
from titan.bench.provenance import Provenance, collect_provenance
from titan.bench.report import (
    Report,
    Table,
    add_report_options,
    count,
    fastest_answer,
    format_figure,
    measure_and_publish,
    positive,
    use_threads,
)
from titan.bench.workloads import Lengths, take_workload
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.policy import DraftPolicy
from titan.models.loader import DEMO, DTYPES

BASE_NODES = 6
"""Nodes of the chains that the other shapes are compared with."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to draft; without nodes nothing is drafted."""

    name: str
    draft_tree: str = "auto"
    draft_sampling: str = "auto"
    num_nodes: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one variant in one round."""

    temperature: float
    variant: str
    round_id: int
    tokens_per_second: float
    tokens_per_step: float  # per request, final token included
    step_seconds: float  # mean
    host_share: float  # of the step: all but the forward passes of target and draft
    speculation_share: float  # of the step: building trees, the target's batch and acceptance, but for forward passes


@dataclass(frozen=True, slots=True)
class Row:
    """One variant at one temperature."""

    temperature: float
    variant: str
    tokens_per_step: float  # mean over the rounds
    tokens_per_second: Spread
    speed_up: Spread | None  # over no draft, within the rounds; None: that failed
    step_seconds: float
    host_share: float
    speculation_share: float


def make_variants(temperature: float, num_nodes: Sequence[int]) -> list[Variant]:
    """The variants of a temperature; at 0 a sampled proposal is a greedy one."""
    variants = [Variant(NO_DRAFT), Variant(f"chain, greedy, {BASE_NODES}", "chain", "greedy", BASE_NODES)]
    if temperature > 0:
        variants.append(Variant(f"chain, sampled, {BASE_NODES}", "chain", "sampled", BASE_NODES))
    return variants + [Variant(f"{tree}, {count}", tree, "auto", count) for count in num_nodes for tree in ("dynamic", "auto")]


class TreeBench:
    """One engine whose draft policy is changed from run to run; ``samples`` and ``problems`` grow as it goes.

    Args:
        args: from `parse_arguments`.

    Raises:
        ValueError: an option is not allowed, or the models cannot be used.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.llm = LLM(
            args.model,
            args.draft_model,
            dtype=args.dtype,
            max_draft_tokens=max(args.nodes),
            max_batch_size=args.concurrency,
            max_model_len=args.prompt_len + args.output_len,
            enable_prefix_caching=False,
        )
        drafter = self.llm.engine.drafter
        if not isinstance(drafter, DraftModelDrafter):
            raise ValueError(f"--draft-model {args.draft_model} is not a draft model: only those have shapes to compare")
        self.drafter = drafter
        self.samples: list[Sample] = []
        self.problems: list[str] = []

    def run(self) -> None:
        """Measure all variants at all temperatures, in rounds; the first round warms up and does not count.

        A variant that fails is left out from then on.
        """
        args = self.args
        length = Lengths(args.prompt_len, args.prompt_len)
        prompts = prompt_stream(args.model, "auto", length, args.seed)
        num_runs = sum(len(make_variants(temperature, args.nodes)) for temperature in args.temperature) * (args.repeats + 1)
        survivors = Survivors(self.llm.engine, self.problems)
        with Progress(num_runs) as progress:
            for round_id in range(-1, args.repeats):
                for temperature in args.temperature:
                    workload = take_workload(prompts, args.concurrency * args.waves, repeat(args.output_len))
                    for variant in make_variants(temperature, args.nodes):
                        work = partial(self._run, variant, workload.prompts, temperature, round_id)
                        sample = survivors.attempt(variant.name, f"at temperature {temperature:g}", work)
                        if sample is None:
                            progress.leave_out(1)
                            continue
                        progress.advance(f"T={temperature} {variant.name}: {sample.tokens_per_second:.0f} tokens/s")
                        if round_id >= 0:
                            self.samples.append(sample)

    def _run(self, variant: Variant, prompts: list[list[int]], temperature: float, round_id: int) -> Sample:
        if variant.num_nodes:
            self.drafter.policy = DraftPolicy(variant.draft_tree, variant.draft_sampling, variant.num_nodes)
        params = [
            SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=self.args.output_len,
                ignore_eos=True,
                use_speculative=variant.num_nodes > 0,
                max_draft_tokens=variant.num_nodes or None,
            )
            for i in range(len(prompts))
        ]
        engine = self.llm.engine
        with (
            timed_passes(engine.runner) as target,
            timed_passes(self.drafter.runner) as draft,
            timed(engine, "step") as step,
            ExitStack() as stack,
        ):
            host_parts = [
                stack.enter_context(timed(owner, name))
                for owner, name in (
                    (engine, "_propose"),
                    (titan.engine, "target_batch"),
                    (titan.engine, "launch"),
                    (titan.engine, "collect"),
                )
            ]
            start = time.perf_counter()
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} ended early: {output.error}")
        num_tokens = sum(output.metrics.num_emitted_tokens for output in outputs)
        num_rows = sum(output.metrics.num_sequence_steps for output in outputs)
        return Sample(
            temperature,
            variant.name,
            round_id,
            tokens_per_second=num_tokens / seconds,
            tokens_per_step=num_tokens / num_rows,
            step_seconds=step.seconds / step.num_calls,
            host_share=1 - (target.seconds + draft.seconds) / step.seconds,
            speculation_share=(sum(part.seconds for part in host_parts) - draft.seconds) / step.seconds,
        )


def make_rows(samples: Sequence[Sample]) -> list[Row]:
    """Sum the rounds up, in the order of the samples."""
    keys = dict.fromkeys((sample.temperature, sample.variant) for sample in samples)
    rows = []
    for temperature, variant in sorted(keys, key=lambda key: key[0]):
        mine, base = (
            [sample for sample in samples if (sample.temperature, sample.variant) == (temperature, name)]
            for name in (variant, NO_DRAFT)
        )
        rows.append(
            Row(
                temperature,
                variant,
                tokens_per_step=sum(sample.tokens_per_step for sample in mine) / len(mine),
                tokens_per_second=Spread.of([sample.tokens_per_second for sample in mine]),
                speed_up=ratio_spread(_by_round(mine), _by_round(base)),
                step_seconds=Spread.of([sample.step_seconds for sample in mine]).median,
                host_share=Spread.of([sample.host_share for sample in mine]).median,
                speculation_share=Spread.of([sample.speculation_share for sample in mine]).median,
            )
        )
    return rows


def _by_round(samples: Sequence[Sample]) -> dict[int, float]:
    return {sample.round_id: sample.tokens_per_second for sample in samples}


def tree_table(rows: Sequence[Row]) -> Table:
    """Lay the rows out."""
    header = ["temperature", "tree", "tokens/step", "tokens/s", "x no draft", "ms/step", "host", "trees, batch, acceptance"]
    cells = [
        [
            f"{row.temperature:g}",
            row.variant,
            f"{row.tokens_per_step:.2f}",
            row.tokens_per_second.format(1),
            "-" if row.speed_up is None else row.speed_up.format(2),
            f"{row.step_seconds * 1e3:.2f}",
            format_figure(row.host_share, 1, suffix=" %", scale=100),
            format_figure(row.speculation_share, 1, suffix=" %", scale=100),
        ]
        for row in rows
    ]
    return Table("Shapes", header, cells, num_text_columns=2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    use_threads(args)
    models = {"target": args.model, "draft": args.draft_model}
    provenance = collect_provenance("trees", argv, models=models, seed=args.seed)
    bench = TreeBench(args)
    measure_and_publish(bench.run, lambda is_complete: _report(bench, provenance, is_complete=is_complete), args)


def _report(bench: TreeBench, provenance: Provenance, *, is_complete: bool) -> Report:
    args = bench.args
    rows = make_rows(bench.samples)
    workload = (
        f"{args.model}, draft {args.draft_model}, {args.dtype}; {count(args.concurrency, 'request')} at once, prompts of "
        f"{args.prompt_len} tokens, {args.output_len} generated, {count(args.waves, 'request')} per slot, end of sequence ignored; "
        f"{count(args.repeats, 'interleaved round')}; x {NO_DRAFT}: within the rounds, ± is half the range."
    )
    shapes = [(row.speed_up, row) for row in rows if row.speed_up is not None and row.variant != NO_DRAFT]
    ordered = sorted(shapes, key=lambda each: each[0].median)
    best = {row.temperature: (row.variant, speed_up.format(2)) for speed_up, row in ordered}  # the last of a temperature stays
    return Report(
        "Draft trees",
        fastest_answer("shape", best),
        provenance,
        vars(args),
        {"rows": rows, "samples": bench.samples},
        [tree_table(rows)],
        notes=[workload],
        warnings=bench.problems,
        is_complete=is_complete,
    )


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="titan bench trees", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEMO, help="folder or hub id of the target (default: the demo pair)")
    parser.add_argument("--draft-model", default=DEMO, help="folder or hub id of the draft (default: the demo's)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument(
        "--nodes", nargs="+", type=positive, default=[6, 16, 32], help="most draft tokens of dynamic and auto trees"
    )
    parser.add_argument("--prompt-len", type=positive, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=positive, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--waves", type=positive, default=2, help="requests per slot (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=3, help="rounds (default: %(default)s)")
    add_report_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
