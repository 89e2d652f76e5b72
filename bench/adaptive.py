"""Adaptive speculation against none and against fixed numbers of draft tokens, over the number of requests at once.

    titan bench adaptive --quick                                             the demo pair, a first look
    titan bench adaptive --model DIR/target --draft-model DIR/draft --dtype float32
    titan bench adaptive --hopeless                                          a draft with shuffled weights, of the same cost
    titan bench adaptive --mixed                                             a draft that is wrong for every second request
    titan bench adaptive --first-steps 100                                   new engines, without a warm-up: none against adaptive

Each setting has an engine of its own, with the options of its name and defaults else; they share the weights, and take turns on
the same requests, which are new in each round. All requests of a run arrive together. Temperature 0, and the end of sequence is
ignored. Tokens per second count the wall time of a run, prefill included. Ratios are medians over the rounds of the ratio within a
round, with 95 % intervals. Nothing else should run on the machine. Ctrl-C ends the measurement and reports what there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from titan.bench.adaptive_report import ADAPTIVE, FIXED, OFF, adaptive_report
from titan.bench.draft_recipes import DraftRecipe, LoadedDraft, Models, check_same_tokens
from titan.bench.engine_run import BLOCK_SIZE, make_idle, num_blocks_for, run_first_steps, run_workload
from titan.bench.hopeless_drafts import HalfHopelessDrafter, load_shuffled
from titan.bench.loading import load_target
from titan.bench.options import add_draft, add_target, bench_parser, model_options, parse, positive
from titan.bench.prompts import prompt_stream
from titan.bench.report import count, measure_and_publish
from titan.bench.runs import Run
from titan.bench.samples import Sample
from titan.bench.turns import Turns, in_rounds
from titan.bench.workloads import Lengths, Workload, take_workload
from titan.core.dtypes import RUN_DTYPES
from titan.core.options import EngineConfig
from titan.draft.base import Drafter
from titan.draft.draft_model import DraftModelDrafter
from titan.draft.registry import open_drafter
from titan.engine import Engine
from titan.kernels.backend import choose_backend, choose_device

NUM_WARM_UP_TOKENS = 16
"""Tokens that each request of a warm-up run generates."""
QUICK = {"concurrency": [1, 8], "fixed": [2, 6], "output_len": 48, "rounds": 3}


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
            self.settings |= {f"{FIXED} {each}": {"speculation": "fixed", "max_draft_tokens": each} for each in args.fixed}
        self.settings[ADAPTIVE] = {}
        longest_step = 1 + EngineConfig().speculation.max_draft_tokens
        self._output_len = args.first_steps * longest_step + 1 if args.first_steps else args.output_len
        self._prompts = prompt_stream(args.model, args.prompts, args.prompt_len, args.seed, **model_options(args))
        self._backend = choose_backend(choose_device(args.device))
        self._target, self._tokenizer = load_target(args, self._backend)
        self._drafts: Models = {}
        self._engines: dict[str, Engine] = {}
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
                for round_id, setting in in_rounds(list(self.settings), args.rounds):
                    run = turns.take(setting, place, partial(self._run, setting, workloads[round_id], at_once))
                    if run is not None:
                        labels = {"at once": at_once, "setting": setting}
                        self.samples.append(Sample(labels, round_id, {**run.rates, **run.figures}))
                yield

    def _run(self, setting: str, workload: Workload, at_once: int) -> Run:
        """Run once, after a warm-up, since the system may have put an engine's memory aside; the first steps have none."""
        if self.args.first_steps:
            return run_first_steps(self._make_engine(setting), workload, self.args.first_steps)
        engine, output_len = self._engines[setting], min(NUM_WARM_UP_TOKENS, self._output_len)
        run_workload(engine, take_workload(iter(workload.prompts), at_once, repeat(output_len)), at_once)
        return run_workload(engine, workload, at_once)

    def _recover(self, setting: str) -> None:
        if setting in self._engines:
            make_idle(self._engines[setting])

    def _make_engine(self, setting: str) -> Engine:
        most, max_model_len = max(self.args.concurrency), self.args.prompt_len.high + self._output_len
        config = EngineConfig.of(
            max_batch_size=most,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_blocks_for(most, max_model_len),
            enable_prefix_caching=False,
            draft_weight_bits=self.args.draft_weight_bits,
            **model_options(self.args),
            **self.settings[setting],
        )
        engine = Engine(config, self._target, tokenizer=self._tokenizer, backend=self._backend)
        if setting != OFF:
            engine.swap_draft(self._make_drafter(engine))
        return engine

    def _make_drafter(self, engine: Engine) -> Drafter:
        args, draft = self.args, self.args.draft_model
        if args.hopeless and not self._drafts:
            drafter = open_drafter(draft, engine.config.model, engine.draft_context())()
            if isinstance(drafter, DraftModelDrafter):
                check_same_tokens(drafter, "--hopeless")
            shuffled = load_shuffled(draft, args.dtype, args.draft_weight_bits, self._backend, args.seed)
            self._drafts[draft, None] = LoadedDraft(shuffled)
        recipe = DraftRecipe(draft, draft, num_tokens=engine.config.speculation.max_draft_tokens)
        drafter = recipe.make_drafter(engine, args.model, self._drafts)
        if not args.mixed:
            return drafter
        if not isinstance(drafter, DraftModelDrafter):
            raise ValueError(f"--mixed needs a draft model: --draft-model {draft} is none")
        return HalfHopelessDrafter(draft, drafter.model, engine.draft_context(), drafter.vocabulary)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ValueError: an option is not allowed, or the models cannot be used.
    """
    args = parse_arguments(argv)
    bench = AdaptiveBench(args)
    models = {"target": args.model, "draft": args.draft_model}
    measure_and_publish(args, bench.run, lambda: adaptive_report(args, bench.samples, bench.problems), models)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: there is no draft.
    """
    parser = bench_parser("adaptive", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a first look: 1 and 8 at once, two fixed numbers, outputs of 48 tokens, 3 rounds")
    add_target(parser)
    add_draft(parser)
    add("--dtype", choices=list(RUN_DTYPES), default="bfloat16")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N (default: %(default)s)")
    add("--concurrency", nargs="+", type=positive, default=[1, 8, 32], help="requests at once (default: 1 8 32)")
    add("--fixed", nargs="+", type=positive, default=[1, 2, 4, 6], help="fixed numbers of draft tokens (default: 1 2 4 6)")
    add("--prompts", default="auto", help="where they come from: auto, synthetic, code, ..., or a file (default: %(default)s)")
    add("--prompt-len", type=Lengths.parse, default=Lengths(64, 64), help="tokens, or 16-512 for a mix (default: %(default)s)")
    add("--output-len", type=positive, default=128, help="tokens (default: %(default)s)")
    add("--waves", type=positive, help="requests per slot (default: 1, with --mixed 2, so that there are both kinds)")
    add("--rounds", type=positive, default=10, help="default: %(default)s")
    add("--first-steps", type=positive, metavar="N", help="time only the first N steps of new engines, off and adaptive")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--hopeless", action="store_true", help="shuffle the draft's weights: nothing that it proposes is right")
    drafts.add_argument("--mixed", action="store_true", help="change the proposals for every second request: they are wrong")
    args = parse(parser, argv, QUICK)
    args.waves = args.waves or (2 if args.mixed else 1)
    if args.draft_model is None:
        raise ValueError(f"--model {args.model} needs a draft: give --draft-model")
    return args
