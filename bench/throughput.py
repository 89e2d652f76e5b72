"""Throughput of Titan's ways to batch, of speculation, and of other engines, on the same requests in interleaved rounds.

Every mode runs once per round, on requests that are new in each round and the same for all modes of a round. All requests of a
run arrive together, and at most as many run at once as --concurrency says. Temperature 0, and the end of sequence is ignored.
Tokens per second count the tokens that were asked for over the wall time of the run, prefill included. Latencies count from the
start of the run. Ratios are medians over the rounds of the ratio within a round. Decode steps are those that compute no prompt.

    titan bench throughput --quick                                          the demo pair, in under two minutes
    titan bench throughput --model DIR/target --draft-model DIR/draft
    titan bench throughput --output-len 16-512 --concurrency 8              mixed lengths: static against continuous batching
    titan bench throughput --modes titan vllm openvino --peer vllm=DIR      other engines: see bench/results/README.md

Nothing else should run on the machine. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from titan.bench.loading import threads_on
from titan.bench.modes import (
    MODES,
    PEERS,
    TITAN,
    TITAN_DRAFT,
    TITAN_SINGLE,
    TITAN_STATIC,
    LoadedModes,
    RunMode,
    load_modes,
    modes_at,
    possible_modes,
)
from titan.bench.options import add_draft, add_target, bench_parser, model_options, parse, positive
from titan.bench.prompts import prompt_stream
from titan.bench.report import Report, Table, count, figure_table, in_one_round, measure_and_publish
from titan.bench.runs import Run, latency_figures, with_equal_outputs
from titan.bench.samples import Label, Row, Sample, make_rows, rotated, with_ratio
from titan.bench.step_times import model_of, product_and_kv_seconds
from titan.bench.turns import Turns
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.dtypes import RUN_DTYPES
from titan.core.options import EngineConfig
from titan.engine import Engine
from titan.kernels.backend import choose_device
from titan.models.decoder import Decoder
from titan.models.files import resolve_model

WAVES_OF_A_MIX = 4
"""Requests per slot with mixed output lengths, so that slots become free while others are busy."""
QUICK = {"dtype": ["float32"], "concurrency": [1, 8], "output_len": Lengths(16, 64)}
QUICK_MODES = (TITAN, TITAN_DRAFT, TITAN_STATIC, TITAN_SINGLE, "transformers-static")

LABELS = ("dtype", "mode", "at once")
GAIN, P50, P99, STRETCH = f"x {TITAN}", f"P50 x {TITAN}", f"P99 x {TITAN}", f"step x {TITAN}"
"""Ratios to continuous batching without a draft: tokens/s, percentiles of the latency, time of a step."""
SPEED = {"tokens/s": "±.1f", GAIN: "±.2f", "requests/s": ".2f", "tokens/step": ".2f", "equal outputs": ".1%"}
LATENCY = {
    **{f"latency P{percent}, ms": ".1f" for percent in (50, 90, 99)},
    P50: "±.2f",
    P99: "±.2f",
    **{f"{kind} P{percent}, ms": ".1f" for kind in ("first token", "between tokens") for percent in (50, 99)},
}
MACHINE = {**dict.fromkeys(("CPU", "GPU", "KV mean", "KV peak"), ".0%"), "batch": ".1f", "ms/step": ".2f", STRETCH: "±.2f"}
STEP = {
    "context": ".0f",
    "ms/decode step": "±.2f",
    **dict.fromkeys(("host", "draft", "target"), ".0%"),
    "trees, batch, acceptance": ".1%",
    **dict.fromkeys(("ms/target pass", "ms/products and KV", "pass x products and KV"), ".2f"),
    "draft passes": ".1f",
    "ms/draft pass": ".2f",
}


class ThroughputBench:
    """Times modes in rounds; its lists and ``versions`` grow as it goes.

    Args:
        args: from `parse_arguments`.

    Raises:
        ValueError: there are no such prompts, or no such device.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.versions: dict[str, str] = {}
        device = choose_device(args.device)
        self._options = {
            "model": resolve_model(args.model, "target"),
            "draft_model": args.draft_model and resolve_model(args.draft_model, "draft"),
            "device": str(device),
            "num_threads": threads_on(device),
            "draft_weight_bits": args.draft_weight_bits,
            "max_draft_tokens": args.max_draft_tokens,
            "max_batch_size": max(args.concurrency),
            "max_model_len": args.prompt_len.high + args.output_len.high,
            "max_num_batched_tokens": EngineConfig().schedule.max_num_batched_tokens,  # the others have defaults of their own
            **model_options(args),
        }
        next(self._prompts())  # what is wrong with them shows before anything is loaded

    def run(self) -> Iterator[None]:
        """Load the modes of each dtype, and let them take turns with each number of requests at once."""
        args = self.args
        for dtype in args.dtype:
            with load_modes(args.modes, {**self._options, "dtype": dtype}, args.peer, self.problems) as loaded:
                if loaded.engine is not None:
                    self.versions["kernels"] = loaded.engine.backend.facts()["kernels"]
                for process in loaded.processes.values():
                    self.versions |= process.versions
                num_turns = args.rounds * sum(len(modes_at(loaded.runs, each)) for each in args.concurrency)
                with Turns(num_turns, self.problems, loaded.recover) as turns:
                    yield from self._measure(loaded, turns)
            del loaded, turns
            gc.collect()  # the models of this dtype go before the next are loaded

    def _measure(self, loaded: LoadedModes, turns: Turns) -> Iterator[None]:
        args = self.args
        prompts, output_lens = self._prompts(), args.output_len.stream(f"{args.seed}/outputs")
        for at_once in args.concurrency:
            modes = {mode: loaded.runs[mode] for mode in modes_at(loaded.runs, at_once)}
            place = f"at {count(at_once, 'request')} at once in {loaded.dtype}"
            for round_id in range(args.rounds):
                workload = take_workload(prompts, at_once * args.waves, output_lens)
                context = (sum(map(len, workload.prompts)) + sum(workload.output_lens) / 2) / len(workload)
                alone: float | None = None
                if TITAN in modes and not args.output_len.is_mixed:  # the passes of a batch that shrinks differ
                    # before all turns, each of which begins with a warm-up
                    alone = product_and_kv_ms(loaded.engine, at_once, context)
                runs: dict[str, Run] = {}
                for mode, run_mode in rotated(modes.items(), round_id):
                    run = turns.take(mode, place, partial(_run, run_mode, workload, at_once))
                    if run is None:
                        continue
                    if mode == TITAN and alone is not None and (ms := run.figures.get("ms/target pass")) is not None:
                        figures = {**run.figures, "ms/products and KV": alone, "pass x products and KV": ms / alone}
                        run = replace(run, figures=figures)
                    runs[mode] = run
                    labels: dict[str, Label] = {"dtype": loaded.dtype, "mode": mode, "at once": at_once}
                    self.samples.append(timed_sample(labels, round_id, run, context))
                if TITAN in runs:
                    self.samples[-len(runs) :] = with_equal_outputs(self.samples[-len(runs) :], runs.values(), runs[TITAN])
            yield

    def _prompts(self) -> Iterator[list[int]]:
        args = self.args
        return prompt_stream(args.model, args.prompts, args.prompt_len, args.seed, **model_options(args))

    def report(self) -> Report:
        """Lay out what was measured so far."""
        args, samples = self.args, with_ratios(self.samples)
        rows = make_rows(samples)
        modes = dict.fromkeys(str(row.labels["mode"]) for row in rows)
        about = (
            f"{args.model}, draft {args.draft_model} with at most {args.max_draft_tokens} draft tokens; prompts ({args.prompts}) "
            f"of {args.prompt_len} tokens, {args.output_len} generated, {count(args.waves, 'request')} per slot, all there from "
            f"the start; temperature 0, end of sequence ignored; medians of {count(args.rounds, 'interleaved round')} with half "
            f'their range (one round has none); "equal outputs" are equal to those of {TITAN}; KV is the share of blocks for '
            f'{count(max(args.concurrency), "request")}; a draft gains tokens/step divided by "{STRETCH}", times its batch over '
            f"that of {TITAN}; host, draft and target are shares of a decode step."
        )
        return Report(
            "Throughput",
            throughput_answer(rows),
            {"rows": rows, "samples": samples},
            throughput_tables(rows),
            notes=[about, *(f"- {mode}: {MODES[mode].description}" for mode in modes)],
            warnings=list(dict.fromkeys(self.problems)),
            versions=self.versions,
        )


def _run(run_mode: RunMode, workload: Workload, at_once: int) -> Run:
    """Run a mode after a warm-up."""
    run_mode(workload.warm_up(at_once), at_once)
    return run_mode(workload, at_once)


def product_and_kv_ms(engine: Engine | None, at_once: int, context: float) -> float | None:
    """Return what the products and the KV of a pass without a draft take alone; it is known on a CPU, of Titan's own decoder."""
    if engine is None or not engine.backend.is_host or not isinstance(model_of(engine.runner), Decoder):
        return None
    return 1e3 * product_and_kv_seconds(engine, at_once, context)


def timed_sample(labels: Mapping[str, Label], round_id: int, run: Run, context: float) -> Sample:
    """Keep what the report needs of a run.

    Args:
        labels: of the run.
        round_id: likewise.
        run: of a mode.
        context: mean tokens of a request, of those that it generates half.
    """
    latencies = latency_figures(run.requests)
    if MODES[str(labels["mode"])].ends_together:
        latencies = {name: value for name, value in latencies.items() if not name.startswith("between tokens")}
    figures = {"context": context, **run.rates, **run.figures, **latencies}
    return Sample(labels, round_id, figures, {"latency, s": [each.latency for each in run.requests]})


def with_ratios(samples: Sequence[Sample]) -> list[Sample]:
    """Add "x MODE" of tokens/s for every other mode, and the other ratios to `TITAN`."""
    for mode in dict.fromkeys(str(each.labels["mode"]) for each in samples):
        samples = with_ratio(samples, f"x {mode}", "tokens/s", mode=mode)
    for name, figure in ((P50, "latency P50, ms"), (P99, "latency P99, ms"), (STRETCH, "ms/step")):
        samples = with_ratio(samples, name, figure, mode=TITAN)
    return list(samples)


def throughput_answer(rows: Sequence[Row]) -> str:
    """What speculation gains; of a run without it, the fastest mode."""
    if not rows:
        return "Nothing was measured."
    gains = [
        f"{row.figures[GAIN]:±.2fx} with {_place(row)}" for row in rows if row.labels["mode"] == TITAN_DRAFT and GAIN in row.figures
    ]
    if gains:
        return f"Tokens/s with speculation over none{in_one_round(rows)}: {', '.join(gains)}."
    best = max(rows, key=lambda row: row.figures["tokens/s"].median)
    return f"Fastest{in_one_round(rows)}: {best.labels['mode']}, {best.figures['tokens/s']:±.1f} tokens/s with {_place(best)}."


def throughput_tables(rows: Sequence[Row]) -> list[Table]:
    """Speed, Titan over every other mode, latency, machine, and parts of a step; those that have figures."""
    mine = [row for row in rows if row.labels["mode"] in (TITAN, TITAN_DRAFT)]
    tables = [
        figure_table("Throughput", rows, LABELS, SPEED),
        figure_table("Titan over the others, tokens/s", mine, LABELS, {f"x {row.labels['mode']}": "±.2f" for row in rows}),
        figure_table("Latency", rows, LABELS, LATENCY),
        figure_table("Machine", rows, LABELS, MACHINE),
        figure_table("Parts of a decode step", [row for row in mine if "host" in row.figures], LABELS, STEP),
    ]
    return [table for table in tables if table.rows]


def _place(each: Row) -> str:
    return f"{count(int(each.labels['at once']), 'request')} at once in {each.labels['dtype']}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse_arguments(argv)
    bench = ThroughputBench(args)
    measure_and_publish(args, bench.run, bench.report)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; options that depend on others are filled in.

    Raises:
        ValueError: the draft or a mode is not possible, or no mode runs as many requests at once.
    """
    parser = bench_parser("throughput", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: float32, 1 and 8 at once, outputs of 16-64 tokens")
    add_target(parser)
    add_draft(parser)
    add("--dtype", nargs="+", choices=list(RUN_DTYPES), default=["float32", "bfloat16"], help="default: float32 bfloat16")
    add("--device", default="auto", help="of Titan: auto, cpu, cuda, cuda:N (default: %(default)s)")
    add("--concurrency", nargs="+", type=positive, default=[1, 8, 32], help="requests at once (default: 1 8 32)")
    add("--prompts", default="auto", help="auto, code, prose, chat, json or synthetic (default: %(default)s)")
    add("--prompt-len", type=Lengths.parse, default=Lengths(64, 64), help="tokens, or 16-512 for a mix (default: %(default)s)")
    add("--output-len", type=Lengths.parse, default=Lengths(128, 128), help="tokens, or 16-512 for a mix (default: %(default)s)")
    add("--waves", type=positive, help=f"requests per slot (default: 1, with mixed output lengths {WAVES_OF_A_MIX})")
    add("--max-draft-tokens", type=positive, default=4, help="per request and step (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="default: %(default)s")
    add("--modes", nargs="+", choices=list(MODES), metavar="MODE", help=f"default: what can run, of {', '.join(MODES)}")
    peer_help = "environment of vllm or openvino (default: .peers/NAME); may be given again"
    add("--peer", action="append", type=_peer, default=[], metavar="NAME=FOLDER", help=peer_help)
    args = parse(parser, argv, QUICK)

    args.peer = dict(args.peer)
    args.waves = args.waves or (WAVES_OF_A_MIX if args.output_len.is_mixed else 1)
    allowed = possible_modes(args.draft_model, **model_options(args))
    args.modes = args.modes or [mode for mode in (QUICK_MODES if args.quick else MODES) if mode in allowed]
    for mode in args.modes:
        if mode not in allowed:
            hint = "; give a model as --draft-model" if MODES[mode].uses_draft else ""
            raise ValueError(f"--modes {mode} is not possible here: allowed are {', '.join(allowed)}{hint}")
    measured = {mode for at_once in args.concurrency for mode in modes_at(args.modes, at_once)}
    if not measured:
        raise ValueError(f"--modes {' '.join(args.modes)} runs one request at a time: it is measured with --concurrency 1 only")
    args.modes = [mode for mode in args.modes if mode in measured]
    return args


def _peer(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if name not in PEERS or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give NAME=FOLDER, where NAME is one of {', '.join(PEERS)}")
    return name, folder
