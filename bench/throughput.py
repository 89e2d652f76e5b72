"""Throughput of Titan's ways to batch, of speculation, and of other engines, on the same requests in interleaved rounds.

Every mode runs once per round, on requests that are new in each round and the same for all modes of a round. All requests of a
run arrive together, and at most as many run at once as --concurrency says. Temperature 0, and the end of sequence is ignored.
Tokens per second count the tokens that were asked for over the wall time of the run, prefill included. Latencies count from the
start of the run. Ratios are medians over the rounds of the ratio within a round. The host and attention shares come from one
extra run that is not timed otherwise.

    titan bench throughput --quick                                          the demo pair, in under two minutes
    titan bench throughput --model DIR/target --draft-model DIR/draft
    titan bench throughput --output-len 16-512 --concurrency 8              mixed lengths: static against continuous batching
    titan bench throughput --modes titan vllm openvino --peer vllm=DIR      other engines: `python -m titan.bench.peers.make_env -h`
    titan bench throughput --profile --model DIR/target                     parts of a decode step at 512 tokens of context

Nothing else should run on the machine. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import psutil
from titan.bench.profiling import profile_shares
from titan.bench.progress import Progress
from titan.bench.survivors import error_line

from titan.bench.prompts import prompt_stream
from titan.bench.provenance import Provenance, collect_provenance
from titan.bench.report import Report, Table, add_report_options, count, measure_and_publish, positive, use_threads
from titan.bench.runners import (
    DESCRIPTIONS,
    DRAFT_MODES,
    PEER_MODES,
    PEERS,
    TITAN,
    TITAN_DRAFT,
    TITAN_MODES,
    TITAN_SINGLE,
    TITAN_STATIC,
    RunnerOptions,
    Runners,
    TitanRunner,
    installed_modes,
    possible_modes,
)
from titan.bench.runs import Run, count_equal
from titan.bench.throughput_report import (
    bound_notes,
    bound_table,
    claim_table,
    latency_table,
    machine_table,
    make_charts,
    make_claims,
    profile_table,
    ratio_table,
    throughput_answer,
    throughput_table,
)
from titan.bench.throughput_rows import Row, Sample, ShareSample, make_rows, make_sample
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.models.loader import DEMO, DTYPES

NUM_WARM_UP_TOKENS = 16
"""Tokens that each request of a warm-up run generates."""
WAVES_OF_A_MIX = 4
"""Requests per slot with mixed output lengths, so that slots become free while others are busy."""


class Bench:
    """Measures what the command line asks for; samples, shares, problems and versions grow as it goes.

    Args:
        args: from `parse_arguments`.

    Raises:
        ValueError: there are no such prompts.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples: list[Sample] = []
        self.shares: list[ShareSample] = []
        self.problems: list[str] = []
        self.versions: dict[str, str] = {}
        self._units_left: Counter[tuple[str, str]] = Counter()  # by dtype and mode, for the progress
        next(self._prompts(args.prompt_len))  # what is wrong with them shows before anything is loaded

    def run(self) -> None:
        """Measure all dtypes and concurrencies, or profile them."""
        args = self.args
        for concurrency in args.concurrency:
            for mode in args.modes if args.profile else modes_at(args.modes, concurrency):
                num_profiles = (args.rounds if args.profile else 1) if mode in (TITAN, TITAN_DRAFT) else 0
                num_runs = 0 if args.profile else args.rounds
                for dtype in args.dtype:
                    self._units_left[dtype, mode] += num_runs + num_profiles
        with Progress(self._units_left.total()) as progress:
            for dtype in args.dtype:
                (self._profile_dtype if args.profile else self._measure_dtype)(dtype, progress)
                gc.collect()  # the models of this dtype go before the next are loaded

    def _measure_dtype(self, dtype: str, progress: Progress) -> None:
        args = self.args
        prompts, output_lens = self._prompts(args.prompt_len), args.output_len.stream(f"{args.seed}/outputs")
        with self._make_runners(args.modes, dtype, args.prompt_len.high + args.output_len.high, progress) as runners:
            for concurrency in args.concurrency:
                warm_up = take_workload(prompts, concurrency, repeat(min(NUM_WARM_UP_TOKENS, args.output_len.low)))
                for round_id in range(args.rounds):
                    workload = take_workload(prompts, concurrency * args.waves, output_lens)
                    self._run_all(runners, (dtype, concurrency), round_id, warm_up, workload, progress)
                for mode in (TITAN, TITAN_DRAFT):
                    if mode in runners.by_mode:
                        workload = take_workload(prompts, concurrency, output_lens)
                        self._measure_shares(runners, dtype, mode, workload, progress)

    def _profile_dtype(self, dtype: str, progress: Progress) -> None:
        args = self.args
        output_len = args.output_len.low
        prompt_len = args.context_len - output_len // 2
        prompts = self._prompts(Lengths(prompt_len, prompt_len))
        with self._make_runners(args.modes, dtype, prompt_len + output_len, progress) as runners:
            for mode in args.modes:
                for concurrency in args.concurrency:
                    for repetition in range(args.rounds):
                        if mode in runners.by_mode:
                            warm_up = None
                            if repetition == 0:
                                warm_up = take_workload(prompts, concurrency, repeat(min(NUM_WARM_UP_TOKENS, output_len)))
                            workload = take_workload(prompts, concurrency, repeat(output_len))
                            self._measure_shares(runners, dtype, mode, workload, progress, warm_up=warm_up)

    def _prompts(self, lengths: Lengths) -> Iterator[list[int]]:
        return prompt_stream(self.args.model, self.args.prompts, lengths, self.args.seed)

    def _make_runners(self, modes: Sequence[str], dtype: str, max_model_len: int, progress: Progress) -> Runners:
        args = self.args
        options = RunnerOptions(
            model=args.model,
            draft_model=args.draft_model,
            dtype=dtype,
            device=args.device,
            max_draft_tokens=args.max_draft_tokens,
            max_batch_size=max(args.concurrency),
            max_model_len=max_model_len,
            threads=args.threads,
            peers=args.peer,
        )
        runners = Runners(modes, options, progress.note)
        self.problems += [problem for problem in runners.problems if problem not in self.problems]
        self.versions |= runners.versions
        for mode in modes:
            if mode not in runners.by_mode:
                progress.leave_out(self._units_left.pop((dtype, mode), 0))
        return runners

    def _drop(self, runners: Runners, place: tuple[str, int, str], error: Exception, progress: Progress) -> None:
        """Leave a mode that failed out from now on, for this dtype; what it measured before is kept."""
        dtype, concurrency, mode = place
        runners.drop(mode)
        self.problems.append(f"{mode} ended at {count(concurrency, 'request')} at once in {dtype}: {error_line(error)}")
        progress.note(self.problems[-1])
        progress.leave_out(self._units_left.pop((dtype, mode), 0))

    def _count(self, dtype: str, mode: str, text: str, progress: Progress) -> None:
        self._units_left[dtype, mode] -= 1
        progress.advance(text)

    def _run_all(
        self, runners: Runners, place: tuple[str, int], round_id: int, warm_up: Workload, workload: Workload, progress: Progress
    ) -> None:
        """Run every mode once, Titan without a draft first, as the outputs are compared with its.

        Each warms up at the beginning of its turn, since the system may have put its memory aside during those of the others.
        """
        dtype, concurrency = place
        reference: Run | None = None
        for mode in modes_at(self.args.modes, concurrency):
            if mode not in runners.by_mode:
                continue
            load_average = psutil.getloadavg()[0]
            runner = runners.by_mode[mode]
            try:
                runner.run(warm_up, concurrency)
                run = runner.run(workload, concurrency)
            except Exception as error:  # noqa: BLE001 - whatever ends one mode, the others go on
                self._drop(runners, (dtype, concurrency, mode), error, progress)
                continue
            what = f"{dtype}, {concurrency} at once, round {round_id + 1}: {mode}"
            self._count(dtype, mode, f"{what} {run.tokens_per_second:.1f} tokens/s", progress)
            if mode == TITAN:
                reference = run
            self.samples.append(
                make_sample(
                    (dtype, concurrency, mode),
                    round_id,
                    run,
                    num_threads=self.args.threads,
                    num_equal=None if reference is None else count_equal(run, reference),
                    load_average=load_average,
                )
            )

    def _measure_shares(
        self, runners: Runners, dtype: str, mode: str, workload: Workload, progress: Progress, *, warm_up: Workload | None = None
    ) -> None:
        runner = runners.by_mode[mode]
        assert isinstance(runner, TitanRunner)
        try:
            if warm_up is not None:
                runner.run(warm_up, len(warm_up))
            load_average = psutil.getloadavg()[0]
            shares = profile_shares(runner.llm.engine, workload, use_speculative=runner.uses_draft, skip_prefill=self.args.profile)
        except Exception as error:  # noqa: BLE001 - whatever ends one mode, the others go on
            self._drop(runners, (dtype, len(workload), mode), error, progress)
            return
        if shares is not None:
            context_len = (sum(map(len, workload.prompts)) + workload.num_output_tokens / 2) / len(workload)
            self.shares.append(ShareSample(dtype, len(workload), mode, context_len, shares, load_average))
        self._count(dtype, mode, f"{dtype}, {len(workload)} at once, profiled: {mode}", progress)


def modes_at(modes: Sequence[str], concurrency: int) -> list[str]:
    """The modes that make sense at this concurrency, Titan without a draft first.

    One request at a time is the same with static, continuous and no batching; some engines know nothing else.
    """
    if concurrency == 1:
        chosen = [mode for mode in modes if mode not in (TITAN_STATIC, TITAN_SINGLE) or TITAN not in modes]
    else:
        chosen = [mode for mode in modes if mode not in PEER_MODES or not PEER_MODES[mode].only_single]
    return sorted(chosen, key=lambda mode: mode != TITAN)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    use_threads(args)
    models = {"target": args.model, "draft": args.draft_model}
    provenance = collect_provenance("throughput", argv, models=models, seed=args.seed)
    bench = Bench(args)
    measure_and_publish(bench.run, lambda is_complete: _report(bench, provenance, is_complete=is_complete), args)


def _report(bench: Bench, provenance: Provenance, *, is_complete: bool) -> Report:
    args = bench.args
    rows = make_rows(bench.samples, bench.shares)
    return Report(
        "Parts of a decode step" if args.profile else "Throughput",
        throughput_answer(rows, bench.shares),
        replace(provenance, versions=provenance.versions | bench.versions),
        vars(args),
        {"rows": rows, "samples": bench.samples, "shares": bench.shares},
        [profile_table(bench.shares)] if args.profile else _tables(rows, bench.shares),
        charts=make_charts(rows, bench.samples, bench.shares),
        notes=[_describe_workload(args), *_describe_modes(args.modes), *bound_notes(rows)],
        warnings=bench.problems,
        is_complete=is_complete,
    )


def _tables(rows: Sequence[Row], shares: Sequence[ShareSample]) -> list[Table]:
    tables = [throughput_table(rows), ratio_table(rows), latency_table(rows), machine_table(rows)]
    claims = make_claims(rows)
    return [*tables, claim_table(claims), bound_table(rows, shares)] if claims else tables


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; options that depend on others are filled in.

    Raises:
        SystemExit: an option is not allowed; the message says why.
        ValueError: the draft or a mode is not possible, or --profile was asked for something that it cannot do.
    """
    parser = argparse.ArgumentParser(
        prog="titan bench throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: float32, 1 and 8 at once, outputs of 16-64 tokens")
    add("--model", default=DEMO, help="folder or hub id of the target (default: the demo pair)")
    add("--draft-model", help="folder or hub id of the draft, or ngram (default: the demo's, or none)")
    add("--dtype", nargs="+", choices=list(DTYPES), help="default: float32 bfloat16")
    add("--device", default="auto", help="of Titan: auto, cpu, cuda, cuda:N (default: %(default)s)")
    add("--concurrency", nargs="+", type=positive, help="requests at once (default: 1 8 32; --profile: 32)")
    add("--prompts", default="auto", help="where they come from: auto, synthetic, code, ..., or a file (default: %(default)s)")
    add("--prompt-len", type=_lengths, default=Lengths(64, 64), help="tokens, or 16-512 for a mix (default: %(default)s)")
    add("--output-len", type=_lengths, help="tokens, or 16-512 for a mix (default: 128)")
    add("--waves", type=positive, help=f"requests per slot (default: 1, with mixed output lengths {WAVES_OF_A_MIX})")
    add("--max-draft-tokens", type=positive, default=4, help="per request and step (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="default: %(default)s")
    add(
        "--modes",
        nargs="+",
        choices=list(DESCRIPTIONS),
        metavar="MODE",
        help=f"default: what can run, of {', '.join(DESCRIPTIONS)}",
    )
    add(
        "--peer",
        action="append",
        type=_peer,
        default=[],
        metavar="NAME=WHERE",
        help=f"environment of {PEERS[0]} or {PEERS[1]} (default: .peers/NAME), or {PEERS[2]}=http://HOST:PORT; may be given again",
    )
    add("--profile", action="store_true", help="where the time of Titan's decode steps goes; no throughput")
    add("--context-len", type=positive, default=512, help="mean of --profile, tokens (default: %(default)s)")
    add_report_options(parser)
    args = parser.parse_args(argv)

    if args.draft_model is None and args.model == DEMO:
        args.draft_model = DEMO
    args.peer = dict(args.peer)
    args.dtype = args.dtype or (["float32"] if args.quick else ["float32", "bfloat16"])
    args.output_len = args.output_len or (Lengths(16, 64) if args.quick else Lengths(128, 128))
    args.concurrency = args.concurrency or ([32] if args.profile else [1, 8] if args.quick else [1, 8, 32])
    args.waves = args.waves or (WAVES_OF_A_MIX if args.output_len.is_mixed else 1)
    _fill_modes(args)
    return args


def _fill_modes(args: argparse.Namespace) -> None:
    """Choose the modes, or check those that were asked for.

    Raises:
        ValueError: a mode is not possible with this draft, or --profile was asked for something that it cannot do.
    """
    default = [*TITAN_MODES, "transformers-static"] if args.quick else installed_modes(args.peer)
    try:
        allowed = possible_modes(list(DESCRIPTIONS), args.draft_model)
    except ValueError as error:
        raise ValueError(f"--draft-model: {error}") from error
    if args.profile:
        allowed = [mode for mode in allowed if mode in (TITAN, TITAN_DRAFT)]
        if args.output_len.is_mixed or args.context_len <= args.output_len.low // 2:
            raise ValueError(
                f"--context-len {args.context_len} must be more than half of --output-len {args.output_len}, which --profile "
                f"takes as one length"
            )
    for mode in args.modes or ():
        if mode not in allowed:
            hint = "; give --draft-model" if mode in DRAFT_MODES else ""
            raise ValueError(f"--modes {mode} is not possible here: allowed are {', '.join(allowed)}{hint}")
    args.modes = args.modes or [mode for mode in default if mode in allowed]


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _peer(text: str) -> tuple[str, str]:
    name, _, where = text.partition("=")
    if name not in PEERS or not where:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give NAME=WHERE, where NAME is one of {', '.join(PEERS)}")
    return name, where


def _describe_workload(args: argparse.Namespace) -> str:
    models = f"{args.model}, draft {args.draft_model} with at most {args.max_draft_tokens} draft tokens"
    if args.profile:
        return f"{models}; decode steps at a mean context of {args.context_len} tokens."
    return (
        f"{models}; prompts ({args.prompts}) of {args.prompt_len} tokens, {args.output_len} generated, "
        f"{count(args.waves, 'request')} per slot, all there from the start; temperature 0, end of sequence ignored; medians of "
        f"{count(args.rounds, 'interleaved round')} with half their range (one round has none); "
        f'"equal outputs" are equal to those of {TITAN}; KV is the share of blocks for '
        f"{count(max(args.concurrency), 'request')}."
    )


def _describe_modes(modes: Sequence[str]) -> list[str]:
    lines = [f"- {mode}: {DESCRIPTIONS[mode]}" for mode in modes]
    absent = [peer for peer in PEERS if not any(mode in PEER_MODES and PEER_MODES[mode].peer == peer for mode in modes)]
    if absent:
        lines.append(
            f"- not in this run: {', '.join(absent)}; `python -m titan.bench.peers.make_env NAME` makes an environment for vllm or "
            f"openvino, a server of llama.cpp is given as --peer llama.cpp=http://HOST:PORT"
        )
    return lines


if __name__ == "__main__":
    main()
