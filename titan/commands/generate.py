"""Continue one prompt, greedily by default, and stream the text; then print the speed, tokens per step and acceptance."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest

from titan.commands.options import add_model_options, flag, given
from titan.core.dtypes import dtype_name
from titan.core.metrics import EngineMetrics
from titan.core.options import (
    DRAFT_SAMPLINGS,
    SPECULATION_TARGETS,
    SPECULATIONS,
    EngineOptions,
    draft_tree_of,
    weight_bits_of,
)
from titan.core.outputs import RequestMetrics, RequestOutput
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.diagnosis import faults
from titan.draft.registry import is_registered
from titan.frontend.prompts import Prompt
from titan.llm import LLM
from titan.tree_view import LEGEND, VerifiedTree, render_tree, token_text, verified_trees

WARM_UP_TOKENS = 24
"""Tokens generated before timing starts, so that one-time set-up is not measured."""

SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "ignore_eos")
"""Options that `SamplingParams` takes under the same names."""
ENGINE_OPTIONS = {"tokenizer", *EngineOptions.__annotations__} - {"seed"}
"""Options that `LLM` takes under the same names; ``--seed`` is one of sampling."""
SHOWS_OF_DRAFTS = ("show_tree", "compare")
"""Options that show what drafts do, and need some."""
DRAFT_MODEL_OPTIONS = ("draft_dtype", "draft_weight_bits")
"""Options that say how a draft model runs, and need one."""
DRAFT_OPTIONS = (*DRAFT_MODEL_OPTIONS, "speculation_target", "max_draft_tokens", "draft_tree", "draft_sampling")
"""Options that say how to draft, and need a draft, even if speculation is off."""


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: its output, its duration, and the draft tree of each step if requested."""

    output: RequestOutput
    seconds: float
    trees: list[VerifiedTree]

    @property
    def num_tokens(self) -> int:
        return len(self.output.outputs[0].token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit status.

    Raises:
        RuntimeError: the generation failed.
        ValueError: an option or the prompt is not allowed.
    """
    args = _make_parser().parse_args(argv)
    params, options = SamplingParams(**given(args, SAMPLING_OPTIONS)), given(args, ENGINE_OPTIONS)
    draft_model = args.draft_model
    if draft_model is None:
        draft_model = "demo" if args.model == "demo" else "none"
    has_draft, is_off = draft_model != "none", options.get("speculation") == "off"
    unused = [name for name in DRAFT_OPTIONS if name in options and not has_draft]
    unused += ["speculation"] * ("speculation" in options and not is_off and not has_draft)
    unused += [name for name in SHOWS_OF_DRAFTS if getattr(args, name) and (is_off or not has_draft)]
    if unused:
        needed = ["--draft-model"] * (not has_draft) + ["no --speculation off"] * is_off
        raise ValueError(f"{flag(unused[0])} needs a draft: give {' and '.join(needed)}")
    for name in DRAFT_MODEL_OPTIONS:
        if name in options and is_registered(draft_model):
            raise ValueError(f"{flag(name)} needs a draft model, which {draft_model!r} is not")
    draft, text = None if draft_model == "none" else draft_model, args.prompt
    if text == "-":
        if sys.stdin is None:  # it was closed, as by <&-
            raise ValueError("the prompt - is what the standard input has, which is closed")
        text = sys.stdin.read().removesuffix("\n")
    llm = LLM(args.model, draft, max_batch_size=1, enable_prefix_caching=False, generation_config="vllm", **options)
    plain_params = replace(params, use_speculative=False)
    prompt: Prompt = text
    if args.chat:
        try:
            prompt = llm.chat_prompt([{"role": "user", "content": text}])
        except ValueError as error:
            raise ValueError(f"--chat cannot be used: {error}") from error
    for warm_up in (params, plain_params) if args.compare else (params,):
        warm_up = replace(warm_up, max_tokens=WARM_UP_TOKENS, ignore_eos=True, stop=None)
        _check_completed(llm.generate(prompt, warm_up, use_tqdm=False)[0])
    if not (args.chat or args.json):
        print(text, end="", flush=True)
    run = _run(llm, prompt, params, echo=not args.json, keep_trees=args.show_tree)
    summary = _summary(run, llm.metrics())
    plain = _run(llm, prompt, plain_params, echo=False) if args.compare else None
    if args.json:
        result = _as_json(run, plain)
        if args.show_tree:
            result["trees"] = [_tree_as_json(each) for each in run.trees]
        print(json.dumps(result))
        return 0
    print("\n")
    if args.show_tree:
        _print_trees(llm, run.trees)
    print(summary)
    if plain is not None:
        print(
            f"without speculation: {plain.num_tokens} tokens, {plain.tokens_per_second:.1f} tokens/s, "
            f"{_comparison(run, plain, llm, params)}; speed-up {run.tokens_per_second / plain.tokens_per_second:.2f}x"
        )
    return 0


def _first_difference(run: Run, plain: Run) -> int | None:
    """Return the place of the first output token at which two runs differ; ``None`` if they do not."""
    pairs = zip_longest(run.output.outputs[0].token_ids, plain.output.outputs[0].token_ids)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def _comparison(run: Run, plain: Run, llm: LLM, params: SamplingParams) -> str:
    """Return whether the texts are the same, and if not, why; see docs/equality.md."""
    if (place := _first_difference(run, plain)) is None:
        return "same text"
    where = f"different text from token {place + 1} on"
    if params.temperature > 0 and llm.engine.config.speculation.draft_sampling == "sampled":
        return f"{where}, because sampled drafts keep the distribution of the tokens, not the tokens of a seed"
    dtype = dtype_name(llm.engine.dtype)
    hint = " (--dtype float32 gives the same text)" if params.is_greedy and dtype != "float32" else ""
    return f"{where}, because passes over other rows round differently in {dtype}{hint}"


def _run(llm: LLM, prompt: Prompt, params: SamplingParams, *, echo: bool, keep_trees: bool = False) -> Run:
    """Generate once; with ``echo``, print the text as it arrives."""
    kept: list[VerifiedTree] = []

    def keep(plan: StepPlan, acceptance: Acceptance) -> None:
        kept.extend(verified_trees(plan, acceptance))

    if keep_trees:
        llm.engine.observers.append(keep)
    start = time.perf_counter()
    num_printed = 0
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        if echo:
            print(text[num_printed:], end="", flush=True)
        num_printed = len(text)
    seconds = time.perf_counter() - start
    if keep_trees:
        llm.engine.observers.remove(keep)
    if echo and output.error:
        print()
    _check_completed(output)
    return Run(output, seconds, kept)


def _check_completed(output: RequestOutput) -> None:
    if output.error is not None:
        raise RuntimeError(output.error)


def _print_trees(llm: LLM, trees: Sequence[VerifiedTree]) -> None:
    """Print the tree of each step, in colour on a terminal unless NO_COLOR is set (https://no-color.org)."""
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(f"{LEGEND}\n")
    for step, each in enumerate(trees, start=1):
        print(f"step {step}: {len(each.path)} of {each.tree.num_nodes} draft tokens accepted")
        print(render_tree(each, lambda token_id: token_text(llm.frontend.tokenizer, token_id), color=color) + "\n")


def _tree_as_json(verified: VerifiedTree) -> dict[str, object]:
    return {
        "root_token_id": verified.root_token_id,
        "token_ids": verified.tree.token_ids.tolist(),
        "parents": verified.tree.parents.tolist(),
        "path": verified.path,
        "final_token_id": verified.final_token_id,
    }


def _summary(run: Run, engine: EngineMetrics) -> str:
    metrics = run.output.metrics
    line = f"{run.num_tokens} tokens, {run.tokens_per_second:.1f} tokens/s"
    if metrics.num_draft_tokens:
        per_depth = " ".join(f"{rate:.2f}" for rate in _acceptance_per_depth(metrics))
        nodes = metrics.num_draft_tokens / metrics.num_sequence_steps
        line += f", mean acceptance length {metrics.mean_acceptance_length:.2f}, {nodes:.2f} draft tokens per step"
        line += f", acceptance per depth {per_depth}"
    elif engine.draft != "none":
        line += ", nothing was drafted"
    if engine.draft_vocabulary is not None and engine.draft_vocabulary < 1:
        line += f"; the draft's vocabulary has {engine.draft_vocabulary:.1%} of the target's tokens"
    return "\n".join([line, *faults(engine)])


def _acceptance_per_depth(metrics: RequestMetrics) -> list[float]:
    """Return the acceptance rate of the draft tokens at depth 1, 2, ..."""
    accepted = [*metrics.accepted_per_depth, *[0] * len(metrics.proposed_per_depth)]
    return [count / proposed for count, proposed in zip(accepted, metrics.proposed_per_depth, strict=False)]


def _as_json(run: Run, plain: Run | None) -> dict[str, object]:
    completion = run.output.outputs[0]
    result: dict[str, object] = {
        "prompt": run.output.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "mean_acceptance_length": run.output.metrics.mean_acceptance_length,
        "acceptance_per_depth": _acceptance_per_depth(run.output.metrics),
        "metrics": asdict(run.output.metrics),
    }
    if plain is not None:
        result["without_speculation"] = {"seconds": plain.seconds, "tokens_per_second": plain.tokens_per_second}
        result["speed_up"] = run.tokens_per_second / plain.tokens_per_second
        result["first_difference"] = _first_difference(run, plain)
    return result


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("titan generate", description=__doc__, argument_default=argparse.SUPPRESS)
    parser.set_defaults(draft_model=None, chat=False, show_tree=False, compare=False, json=False)
    add = parser.add_argument
    add("prompt", help='the text to continue, for example "def quicksort("; - reads it from the standard input')
    add("--chat", action="store_true", help="the prompt is a user's message, to be answered: put it into the model's chat template")
    add("--model", default="demo", help="target: demo, a folder or a hub id (default: demo)")
    add("--draft-model", help="draft: demo, a folder, a hub id, ngram, or none (default: demo with the demo model, else none)")
    add("--tokenizer", help="folder or hub id of the tokenizer (default: that of --model)")
    add_model_options(parser)
    add("--max-tokens", type=int, default=256, help="most tokens to generate (default: 256)")
    add("--max-model-len", type=int, help="most tokens of prompt and output, for which there is room (default: the model's)")
    add(
        "--speculation",
        choices=SPECULATIONS,
        help="draft as much as pays at each step, always as much as allowed, or nothing (default: adaptive)",
    )
    add(
        "--speculation-target",
        choices=SPECULATION_TARGETS,
        help="what adaptive speculation maximises; with one prompt both are the same (default: throughput)",
    )
    add("--max-draft-tokens", type=int, help="most draft tokens per step (default: 6)")
    add(
        "--draft-tree",
        type=draft_tree_of,
        metavar="SHAPE",
        help='shape of the draft tree: auto, dynamic, chain, or the parent of each node, -1 for the root, such as "[-1,-1,0]" '
        "(default: auto)",
    )
    add(
        "--draft-sampling",
        choices=DRAFT_SAMPLINGS,
        help="propose the draft's most likely tokens, or sample them; auto and temperature 0 are greedy here, as there is a seed "
        "(default: auto)",
    )
    add("--show-tree", action="store_true", help="print the draft tree of each step; with --json, add them to the object")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    add("--top-p", type=float, help="keep the most likely tokens of this mass (default: 1)")
    add("--top-k", type=int, help="keep this many tokens, 0 = all (default: 0)")
    add("--min-p", type=float, help="cut tokens below this share of the best one (default: 0)")
    add("--seed", type=int, default=0, help="random seed (default: 0)")
    add("--stop", action="append", help="stop at this text; may be given again")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    add("--draft-dtype", help="dtype of the draft's weights and KV (default: that of the target)")
    add(
        "--draft-weight-bits",
        type=weight_bits_of,
        metavar="BITS",
        help="8: round the draft's matrices, which a CPU with AVX2 or AVX-512, or a GPU in bfloat16, reads in less time; none: "
        "leave them as they are; auto: 8 where kernels can read them so (default)",
    )
    add("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--num-threads", type=int, help="threads on a CPU (default: one per physical core, at most PyTorch's number)")
    add("--no-warm-up", dest="warm_up", action="store_false", help="on a GPU: compile kernels when they are first needed")
    add("--compare", action="store_true", help="run again without speculation and print the speed-up")
    add("--json", action="store_true", help="print one JSON object instead of text")
    return parser
