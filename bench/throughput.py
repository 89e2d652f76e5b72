"""Throughput of Titan and of transformers on the same prompts, in interleaved rounds.

Every mode runs once per round, on prompts that are new in each round and the same for all modes of a round; a run is
one call with all its requests at once. Temperature 0, and the end of sequence is ignored. Tokens per second count
generated tokens over the wall time of the call, prefill included. Ratios are medians over the rounds of the ratio
within a round. The host and attention shares of Titan come from one extra run that is not timed otherwise.

    python -m titan.bench.throughput                                        the demo pair
    python -m titan.bench.throughput --model DIR/target --draft-model DIR/draft
    python -m titan.bench.throughput --profile --model DIR/target           parts of a decode step at 512 tokens of context

Nothing else should run on the machine. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from titan.bench.profiling import Shares, profile_shares
from titan.bench.report import (
    Spread,
    collect_provenance,
    format_figure,
    log,
    num_physical_cores,
    provenance_lines,
    table_lines,
    write_json,
    write_markdown,
)
from titan.bench.runners import (
    ASSISTED,
    CONTINUOUS,
    DRAFT_MODES,
    MODES,
    STATIC,
    TITAN,
    TITAN_DRAFT,
    Run,
    Runner,
    RunnerOptions,
    TitanRunner,
    allowed_modes,
    make_runners,
)
from titan.bench.workloads import Workload, prompt_stream, take_workload
from titan.models.loader import DEMO, DTYPES

NUM_WARM_UP_TOKENS = 16
"""Tokens that each request of a warm-up run generates."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one mode in one round."""

    dtype: str
    concurrency: int
    mode: str
    round_id: int
    tokens_per_second: float
    mean_acceptance_length: float | None
    num_equal: int | None  # outputs equal to those of Titan without a draft; None: that mode did not run
    load_average: float  # over the last minute, before the run


@dataclass(frozen=True, slots=True)
class ShareSample:
    """One profile of Titan; ``context_len`` is the mean over the profiled tokens of the tokens before them."""

    dtype: str
    concurrency: int
    mode: str
    context_len: int
    shares: Shares
    load_average: float


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one dtype and concurrency."""

    dtype: str
    mode: str
    concurrency: int
    num_rounds: int
    tokens_per_second: Spread
    ratios: dict[str, Spread]  # by baseline
    mean_acceptance_length: float | None
    host_share: float | None
    attention_share: float | None
    num_equal: int | None
    num_outputs: int
    load_average: float  # largest before a run


class Bench:
    """Measures what the command line asks for; ``samples`` and ``shares`` grow as it goes.

    Args:
        args: from `parse_arguments`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples: list[Sample] = []
        self.shares: list[ShareSample] = []

    def run(self) -> None:
        """Measure all dtypes and concurrencies, or profile them."""
        for dtype in self.args.dtype:
            if self.args.profile:
                self._profile_dtype(dtype)
            else:
                self._measure_dtype(dtype)
            gc.collect()  # the models of this dtype go before the next are loaded

    def _measure_dtype(self, dtype: str) -> None:
        args = self.args
        runners = self._make_runners(args.modes, dtype, args.prompt_len + args.output_len)
        prompts = prompt_stream(args.model, args.prompt_len, args.seed)
        for concurrency in args.concurrency:
            chosen = {mode: runner for mode, runner in runners.items() if mode != ASSISTED or concurrency == 1}
            warm_up = take_workload(prompts, concurrency, min(NUM_WARM_UP_TOKENS, args.output_len))
            for mode, runner in chosen.items():
                log(f"{dtype}, {concurrency} requests: warming up {mode}")
                runner.run(warm_up)
            for round_id in range(args.repeats):
                self._measure_round(dtype, round_id, chosen, take_workload(prompts, concurrency, args.output_len))
            for mode, runner in chosen.items():
                if isinstance(runner, TitanRunner):
                    self._measure_shares(dtype, mode, runner, take_workload(prompts, concurrency, args.output_len))

    def _profile_dtype(self, dtype: str) -> None:
        args = self.args
        prompt_len = args.context_len - args.output_len // 2
        prompts = prompt_stream(args.model, prompt_len, args.seed)
        for mode in args.modes:
            runner = self._make_runners([mode], dtype, prompt_len + args.output_len)[mode]
            assert isinstance(runner, TitanRunner)
            for concurrency in args.concurrency:
                runner.run(take_workload(prompts, concurrency, min(NUM_WARM_UP_TOKENS, args.output_len)))
                for _ in range(args.repeats):
                    self._measure_shares(dtype, mode, runner, take_workload(prompts, concurrency, args.output_len))

    def _make_runners(self, modes: Sequence[str], dtype: str, max_model_len: int) -> dict[str, Runner]:
        args = self.args
        log(f"{dtype}: loading {args.model}")
        options = RunnerOptions(
            model=args.model,
            draft_model=args.draft_model,
            dtype=dtype,
            max_draft_tokens=args.max_draft_tokens,
            max_batch_size=max(32, *args.concurrency),
            max_model_len=max_model_len,
        )
        return make_runners(modes, options)

    def _measure_round(self, dtype: str, round_id: int, runners: dict[str, Runner], workload: Workload) -> None:
        """Run every mode once; a round that is interrupted leaves no samples."""
        concurrency = len(workload.prompts)
        runs: dict[str, Run] = {}
        loads: dict[str, float] = {}
        for mode, runner in runners.items():
            loads[mode] = psutil.getloadavg()[0]
            runs[mode] = runner.run(workload)
            rate = workload.num_output_tokens / runs[mode].seconds
            log(f"{dtype}, {concurrency} requests, round {round_id + 1}/{self.args.repeats}: {mode} {rate:.1f} tokens/s")
        reference = runs[TITAN].token_ids if TITAN in runs else None
        for mode, run in runs.items():
            self.samples.append(
                Sample(
                    dtype=dtype,
                    concurrency=concurrency,
                    mode=mode,
                    round_id=round_id,
                    tokens_per_second=workload.num_output_tokens / run.seconds,
                    mean_acceptance_length=run.mean_acceptance_length,
                    num_equal=None if reference is None else count_equal(run.token_ids, reference),
                    load_average=loads[mode],
                )
            )

    def _measure_shares(self, dtype: str, mode: str, runner: TitanRunner, workload: Workload) -> None:
        concurrency = len(workload.prompts)
        log(f"{dtype}, {concurrency} requests: profiling {mode}")
        load_average = psutil.getloadavg()[0]
        shares = profile_shares(runner.llm.engine, workload, skip_prefill=self.args.profile)
        if shares is not None:
            context_len = len(workload.prompts[0]) + workload.output_len // 2
            self.shares.append(ShareSample(dtype, concurrency, mode, context_len, shares, load_average))


def count_equal(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int:
    """Count the outputs that equal those of the same place in ``reference``, token by token."""
    return sum(list(mine) == list(theirs) for mine, theirs in zip(outputs, reference, strict=True))


def make_rows(bench: Bench, baselines: Sequence[str]) -> list[Row]:
    """Sum up the samples: one row per dtype, concurrency and mode, in the order of measurement."""
    groups: dict[tuple[str, int, str], list[Sample]] = {}
    for sample in bench.samples:
        groups.setdefault((sample.dtype, sample.concurrency, sample.mode), []).append(sample)
    shares = {(sample.dtype, sample.concurrency, sample.mode): sample.shares for sample in bench.shares}
    rows = []
    for key, samples in groups.items():
        dtype, concurrency, mode = key
        rates = {sample.round_id: sample.tokens_per_second for sample in samples}
        ratios = {}
        for baseline in baselines:
            others = {sample.round_id: sample.tokens_per_second for sample in groups.get((dtype, concurrency, baseline), [])}
            shared = rates.keys() & others.keys()
            if shared and baseline != mode:
                ratios[baseline] = Spread.of([rates[round_id] / others[round_id] for round_id in shared])
        lengths = [sample.mean_acceptance_length for sample in samples if sample.mean_acceptance_length is not None]
        equal = [sample.num_equal for sample in samples if sample.num_equal is not None]
        rows.append(
            Row(
                dtype=dtype,
                mode=mode,
                concurrency=concurrency,
                num_rounds=len(samples),
                tokens_per_second=Spread.of(list(rates.values())),
                ratios=ratios,
                mean_acceptance_length=sum(lengths) / len(lengths) if lengths else None,
                host_share=shares[key].host if key in shares else None,
                attention_share=shares[key].attention if key in shares else None,
                num_equal=sum(equal) if equal else None,
                num_outputs=len(samples) * concurrency,
                load_average=max(sample.load_average for sample in samples),
            )
        )
    return rows


def throughput_table(rows: Sequence[Row], baselines: Sequence[str]) -> list[str]:
    """Lay out rows; the ratio columns are named after their baselines."""
    used = [baseline for baseline in baselines if any(baseline in row.ratios for row in rows)]
    header = ["dtype", "mode", "requests", "tokens/s", "min..max", *(f"x {baseline}" for baseline in used)]
    header += ["tokens/step", "host", "attention", "equal outputs", "load"]
    cells = []
    for row in rows:
        rate = row.tokens_per_second
        ratios = [format_figure(row.ratios[name].median, 2) if name in row.ratios else "-" for name in used]
        cells.append(
            [
                row.dtype,
                row.mode,
                str(row.concurrency),
                f"{rate.median:.1f}",
                f"{rate.minimum:.1f}..{rate.maximum:.1f}",
                *ratios,
                format_figure(row.mean_acceptance_length, 2),
                format_figure(row.host_share, 1, suffix=" %", scale=100),
                format_figure(row.attention_share, 1, suffix=" %", scale=100),
                "-" if row.num_equal is None else f"{row.num_equal}/{row.num_outputs}",
                f"{row.load_average:.2f}",
            ]
        )
    return table_lines(header, cells, num_text_columns=2)


def profile_table(samples: Sequence[ShareSample]) -> list[str]:
    """Lay out profiles, one row per repetition."""
    header = ["dtype", "mode", "requests", "context", "steps", "ms/step", "host", "attention", "load"]
    cells = [
        [
            sample.dtype,
            sample.mode,
            str(sample.concurrency),
            str(sample.context_len),
            str(sample.shares.num_steps),
            f"{sample.shares.step_seconds * 1e3:.2f}",
            f"{sample.shares.host:.1%}",
            f"{sample.shares.attention:.1%}",
            f"{sample.load_average:.2f}",
        ]
        for sample in samples
    ]
    return table_lines(header, cells, num_text_columns=2)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    provenance = collect_provenance("titan.bench.throughput", argv)
    print("\n".join([*provenance_lines(provenance), ""]), flush=True)
    bench = Bench(args)
    try:
        bench.run()
    except KeyboardInterrupt:
        log("interrupted: reporting what was measured so far")
    rows = make_rows(bench, args.baseline)
    table = profile_table(bench.shares) if args.profile else throughput_table(rows, args.baseline)
    print("\n".join(table), flush=True)
    if args.json is not None:
        write_json(args.json, provenance, vars(args), {"rows": rows, "samples": bench.samples, "shares": bench.shares})
    if args.markdown is not None:
        title = "Parts of a decode step" if args.profile else "Throughput"
        modes = [f"- {mode}: {MODES[mode]}" for mode in args.modes]
        write_markdown(args.markdown, title, [provenance_lines(provenance), [_describe_workload(args)], modes, table])


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; options that depend on others are filled in.

    Raises:
        SystemExit: an option is not allowed; the message says why.
    """
    parser = argparse.ArgumentParser(
        prog="python -m titan.bench.throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEMO, help="folder or hub id of the target (default: the demo pair)")
    parser.add_argument("--draft-model", help="folder or hub id of the draft, or ngram (default: the demo's, or none)")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--concurrency", nargs="+", type=_positive, help="requests at once (default: 1 8 32; --profile: 32)")
    parser.add_argument("--prompt-len", type=_positive, default=64, help="tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=_positive, default=128, help="tokens (default: %(default)s)")
    parser.add_argument("--max-draft-tokens", type=_positive, default=4, help="per request and step (default: %(default)s)")
    parser.add_argument("--repeats", type=_positive, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), help="default: all that the models allow")
    parser.add_argument(
        "--baseline", nargs="+", choices=list(MODES), default=[STATIC, CONTINUOUS, TITAN], help="a ratio column each"
    )
    parser.add_argument("--threads", type=_positive, default=num_physical_cores(), help="default: the physical cores, %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--profile", action="store_true", help="where the time of Titan's decode steps goes; no throughput")
    parser.add_argument("--context-len", type=_positive, default=512, help="mean of --profile, tokens (default: %(default)s)")
    args = parser.parse_args(argv)

    if args.draft_model is None and args.model == DEMO:
        args.draft_model = DEMO
    if args.concurrency is None:
        args.concurrency = [32] if args.profile else [1, 8, 32]
    try:
        allowed = allowed_modes(args.draft_model)
    except ValueError as error:
        parser.error(f"--draft-model: {error}")
    if args.profile:
        allowed = [mode for mode in allowed if mode in (TITAN, TITAN_DRAFT)]
    if args.modes is None:
        args.modes = allowed
    for mode in args.modes:
        if mode not in allowed:
            hint = "; give --draft-model" if mode in DRAFT_MODES else ""
            parser.error(f"--modes {mode} is not possible here: allowed are {', '.join(allowed)}{hint}")
    if args.profile and args.context_len <= args.output_len // 2:
        parser.error(f"--context-len {args.context_len} must be more than half of --output-len {args.output_len}")
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be at least 1")
    return value


def _describe_workload(args: argparse.Namespace) -> str:
    models = f"{args.model}, draft {args.draft_model} with at most {args.max_draft_tokens} draft tokens"
    if args.profile:
        return f"{models}; decode steps at a mean context of {args.context_len} tokens."
    return (
        f"{models}; prompts of {args.prompt_len} tokens, {args.output_len} generated, temperature 0, end of sequence ignored; "
        f'medians of {args.repeats} interleaved rounds; "equal outputs" are equal to those of titan.'
    )


if __name__ == "__main__":
    main()
