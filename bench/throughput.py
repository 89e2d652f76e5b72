"""Throughput of Titan's ways to batch, of speculation, and of other engines, on the same requests in interleaved rounds.

Every mode runs once per round, on requests that are new in each round and the same for all modes of a round. All requests of a
run arrive together, and at most as many run at once as --concurrency says. Temperature 0, and the end of sequence is ignored.
Tokens per second count the tokens that were asked for over the wall time of the run, prefill included. Latencies count from the
start of the run. Ratios are medians over the rounds of the ratio within a round. The parts of a step come from an extra run.

    titan bench throughput --quick                                          the demo pair, in under two minutes
    titan bench throughput --model DIR/target --draft-model DIR/draft
    titan bench throughput --output-len 16-512 --concurrency 8              mixed lengths: static against continuous batching
    titan bench throughput --modes titan vllm openvino --peer vllm=DIR      other engines: see bench/results/README.md
    titan bench throughput --profile --model DIR/target                     parts of a decode step at 512 tokens of context

Nothing else should run on the machine. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from titan.bench.engine_run import profile_workload
from titan.bench.floor import floor_seconds
from titan.bench.modes import MODES, PEERS, TITAN, TITAN_DRAFT, LoadedModes, RunMode, load_modes, modes_at, possible_modes
from titan.bench.options import add_draft, add_target, bench_parser, model_options, parse, positive
from titan.bench.prompts import prompt_stream
from titan.bench.report import count, measure_and_publish
from titan.bench.runs import Run, latency_figures, share_equal
from titan.bench.samples import Label, Sample
from titan.bench.step_times import model_of
from titan.bench.throughput_report import throughput_report
from titan.bench.turns import Turns
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.dtypes import RUN_DTYPES
from titan.kernels.backend import choose_device
from titan.models.decoder import Decoder
from titan.models.loader import resolve_model

NUM_WARM_UP_TOKENS = 16
"""Tokens that each request of a warm-up run generates."""
WAVES_OF_A_MIX = 4
"""Requests per slot with mixed output lengths, so that slots become free while others are busy."""
PROFILED = (TITAN, TITAN_DRAFT)
QUICK = {"dtype": ["float32"], "concurrency": [1, 8], "output_len": Lengths(16, 64)}
QUICK_MODES = (TITAN, TITAN_DRAFT, "titan-static", "titan-single", "transformers-static")


class ThroughputBench:
    """Times modes in rounds, and profiles those of `PROFILED`; its lists and ``versions`` grow as it goes.

    Args:
        args: from `parse_arguments`.

    Raises:
        ValueError: there are no such prompts, or no such device.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples: list[Sample] = []
        self.profiles: list[Sample] = []
        self.problems: list[str] = []
        self.versions: dict[str, str] = {}
        self._options = {
            "model": resolve_model(args.model, "target"),
            "draft_model": args.draft_model and resolve_model(args.draft_model, "draft"),
            "device": str(choose_device(args.device)),
            "draft_weight_bits": args.draft_weight_bits,
            "max_draft_tokens": args.max_draft_tokens,
            "max_batch_size": max(args.concurrency),
            "max_model_len": args.prompt_len.high + args.output_len.high,
            **model_options(args),
        }
        next(self._prompts())  # what is wrong with them shows before anything is loaded

    def run(self) -> None:
        """Load the modes of each dtype, and let them take turns with each number of requests at once."""
        args = self.args
        for dtype in args.dtype:
            with load_modes(args.modes, {**self._options, "dtype": dtype}, args.peer, self.problems) as loaded:
                for process in loaded.processes.values():
                    self.versions |= process.versions
                num_profiles = args.profiled_rounds * len(loaded.runs.keys() & PROFILED)
                num_turns = [args.timed_rounds * len(modes_at(loaded.runs, each)) + num_profiles for each in args.concurrency]
                with Turns(sum(num_turns), self.problems, loaded.recover) as turns:
                    self._measure(loaded, turns)
            del loaded, turns
            gc.collect()  # the models of this dtype go before the next are loaded

    def _measure(self, loaded: LoadedModes, turns: Turns) -> None:
        args = self.args
        prompts, output_lens = self._prompts(), args.output_len.stream(f"{args.seed}/outputs")
        profiles = {
            mode: partial(profile_workload, loaded.engine, use_speculative=MODES[mode].uses_draft)
            for mode in PROFILED
            if loaded.engine is not None and mode in loaded.runs
        }
        for at_once in args.concurrency:
            timed = {mode: loaded.runs[mode] for mode in modes_at(loaded.runs, at_once)}
            for round_id in range(args.timed_rounds):
                workload = take_workload(prompts, at_once * args.waves, output_lens)
                reference: Run | None = None
                for labels, run in self._runs(loaded.dtype, turns, timed, workload, at_once):
                    reference = run if labels["mode"] == TITAN else reference
                    self.samples.append(timed_sample(labels, round_id, run, reference))
            for round_id in range(args.profiled_rounds):
                workload = take_workload(prompts, at_once, output_lens)
                context = (sum(map(len, workload.prompts)) + sum(workload.output_lens) / 2) / at_once
                for labels, run in self._runs(loaded.dtype, turns, profiles, workload, at_once):
                    figures = {"context": context, **run.figures}
                    engine = loaded.engine if labels["mode"] == TITAN and "host" in figures else None
                    if engine is not None and isinstance(model_of(engine.runner), Decoder):
                        floor = 1e3 * floor_seconds(engine, at_once, context)
                        figures |= {"ms/pass at least": floor, "pass x least": figures["ms/target pass"] / floor}
                    if "host" in figures:  # nothing is timed on a GPU
                        self.profiles.append(Sample(labels, round_id, figures))

    def _runs(
        self, dtype: str, turns: Turns, modes: Mapping[str, RunMode], workload: Workload, at_once: int
    ) -> Iterator[tuple[dict[str, Label], Run]]:
        """Yield labels and run of each mode that does not fail.

        Each warms up at the beginning of its turn, since the system may have put its memory aside during those of the others.
        """
        warm_up = Workload(workload.prompts[:at_once], [min(NUM_WARM_UP_TOKENS, self.args.output_len.low)] * at_once)

        def work(run_mode: RunMode) -> Run:
            run_mode(warm_up, at_once)
            return run_mode(workload, at_once)

        for mode, run_mode in modes.items():
            run = turns.take(mode, f"at {count(at_once, 'request')} at once in {dtype}", partial(work, run_mode))
            if run is not None:
                yield {"dtype": dtype, "mode": mode, "at once": at_once}, run

    def _prompts(self) -> Iterator[list[int]]:
        args = self.args
        return prompt_stream(args.model, args.prompts, args.prompt_len, args.seed, **model_options(args))


def timed_sample(labels: Mapping[str, Label], round_id: int, run: Run, reference: Run | None) -> Sample:
    """Keep what the report needs of a run; ``reference`` is Titan's without a draft in the same round, if there is one."""
    latencies = latency_figures(run.requests)
    if MODES[str(labels["mode"])].ends_together:
        latencies = {name: value for name, value in latencies.items() if not name.startswith("between tokens")}
    equal = {} if reference is None else {"equal outputs": share_equal(run, reference)}
    figures = {**run.rates, **run.figures, **latencies, **equal}
    return Sample(labels, round_id, figures, {"latency, s": [each.latency for each in run.requests]})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse_arguments(argv)
    bench = ThroughputBench(args)
    make_report = partial(throughput_report, args, bench.samples, bench.profiles, bench.problems, bench.versions)
    measure_and_publish(args, bench.run, make_report, {"target": args.model, "draft": args.draft_model})


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; options that depend on others are filled in.

    Raises:
        ValueError: the draft or a mode is not possible, or --profile was asked for something that it cannot do.
    """
    parser = bench_parser("throughput", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: float32, 1 and 8 at once, outputs of 16-64 tokens")
    add_target(parser)
    add_draft(parser)
    add("--dtype", nargs="+", choices=list(RUN_DTYPES), default=["float32", "bfloat16"], help="default: float32 bfloat16")
    add("--device", default="auto", help="of Titan: auto, cpu, cuda, cuda:N (default: %(default)s)")
    add("--concurrency", nargs="+", type=positive, help="requests at once (default: 1 8 32; --profile: 32)")
    add("--prompts", default="auto", help="where they come from: auto, synthetic, code, ..., or a file (default: %(default)s)")
    add("--prompt-len", type=Lengths.parse, default=Lengths(64, 64), help="tokens, or 16-512 for a mix (default: %(default)s)")
    add("--output-len", type=Lengths.parse, default=Lengths(128, 128), help="tokens, or 16-512 for a mix (default: %(default)s)")
    add("--waves", type=positive, help=f"requests per slot (default: 1, with mixed output lengths {WAVES_OF_A_MIX})")
    add("--max-draft-tokens", type=positive, default=4, help="per request and step (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="default: %(default)s")
    add("--modes", nargs="+", choices=list(MODES), metavar="MODE", help=f"default: what can run, of {', '.join(MODES)}")
    peer_help = "environment of vllm or openvino (default: .peers/NAME), or llama.cpp=http://HOST:PORT; may be given again"
    add("--peer", action="append", type=_peer, default=[], metavar="NAME=WHERE", help=peer_help)
    add("--profile", action="store_true", help="where the time of Titan's decode steps goes; no throughput")
    add("--context-len", type=positive, default=512, help="mean of --profile, tokens (default: %(default)s)")
    args = parse(parser, argv, QUICK)

    args.peer = dict(args.peer)
    args.concurrency = args.concurrency or ([32] if args.profile else [1, 8, 32])
    args.waves = args.waves or (WAVES_OF_A_MIX if args.output_len.is_mixed else 1)
    args.timed_rounds, args.profiled_rounds = (0, args.rounds) if args.profile else (args.rounds, 1)
    if args.profile:
        prompt_len = args.context_len - args.output_len.low // 2
        if args.output_len.is_mixed or prompt_len < 1:
            lengths = f"--context-len {args.context_len} must be more than half of --output-len {args.output_len}"
            raise ValueError(f"{lengths}, which --profile takes as one length")
        args.prompt_len = Lengths(prompt_len, prompt_len)
    allowed = [mode for mode in possible_modes(args.draft_model, **model_options(args)) if mode in PROFILED or not args.profile]
    args.modes = args.modes or [mode for mode in (QUICK_MODES if args.quick else MODES) if mode in allowed]
    for mode in args.modes:
        if mode not in allowed:
            hint = "; give --draft-model" if MODES[mode].uses_draft else ""
            raise ValueError(f"--modes {mode} is not possible here: allowed are {', '.join(allowed)}{hint}")
    return args


def _peer(text: str) -> tuple[str, str]:
    name, _, where = text.partition("=")
    if name not in PEERS or not where:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give NAME=WHERE, where NAME is one of {', '.join(PEERS)}")
    return name, where
