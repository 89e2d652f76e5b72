"""The command line: ``titan generate``, ``titan info``, ``titan bench``."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from titan import __version__
from titan.core.dtypes import RUN_DTYPES, dtype_name
from titan.core.options import (
    DRAFT_SAMPLINGS,
    DTYPES,
    MODEL_IMPLS,
    SPECULATION_TARGETS,
    SPECULATIONS,
    EngineOptions,
    ModelOptions,
    draft_tree_of,
    weight_bits_of,
)
from titan.core.outputs import RequestMetrics, RequestOutput
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.draft.registry import is_registered
from titan.kernels.backend import choose_backend, choose_device
from titan.kernels.interfaces import Backend
from titan.llm import LLM
from titan.model_info import model_facts
from titan.prompts import Prompt
from titan.tree_view import LEGEND, VerifiedTree, render_tree, token_text, verified_trees

BENCHES = {
    "throughput": "batching modes, speculation and other engines on the same requests",
    "load": "a server's load: rates of arrivals, policies, long prompts, prefix cache, quantised KV, each against none",
    "adaptive": "adaptive speculation against none and fixed numbers of draft tokens, over the requests at once",
    "drafts": "drafts and shapes of draft trees against one target: draft models, its own first layers, n-grams",
    "parts": "parts of a step: swaps, scheduling, layers of transformers, the host's part on CUDA",
    "gpu_check": "a CUDA device: tests, kernels against its bandwidth and others, whole engines",
    "tune": "tiles of tree attention on this CUDA device, for the checked-in table",
}
"""Modules of `titan.bench` that have a ``main(arguments)``, and what each measures."""

WARM_UP_TOKENS = 24
"""Tokens generated before timing starts, so that one-time set-up is not measured."""

DTYPE_HELP = f"dtype of weights and KV: {', '.join(DTYPES)} (default: auto)"
IMPL_HELP = "native: Titan's own decoder; transformers: modules of that library; auto: the former where it can (default: auto)"
TRUST_HELP = "run the code that a checkpoint comes with"
REVISION_HELP = "branch, tag or commit of --model on the hub (default: its main branch)"

SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "ignore_eos")
"""Options of ``titan generate`` that `SamplingParams` takes under the same names."""
ENGINE_OPTIONS = {"tokenizer", *EngineOptions.__annotations__} - {"seed"}
"""Options of ``titan generate`` that `LLM` takes under the same names; ``--seed`` is one of the sampling."""
SHOWS_OF_DRAFTS = ("show_tree", "compare")
"""Options of ``titan generate`` that show what drafts do, and need some."""
DRAFT_MODEL_OPTIONS = ("draft_dtype", "draft_weight_bits")
"""Options of ``titan generate`` that say how a draft model runs, and need one."""
DRAFT_OPTIONS = (*DRAFT_MODEL_OPTIONS, "speculation_target", "max_draft_tokens", "draft_tree", "draft_sampling")
"""Options of ``titan generate`` that say how to draft, and need a draft, even if speculation is off."""


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


@dataclass(frozen=True, slots=True)
class Difference:
    """The first output token at which two runs differ, and by how much the two largest logits do there."""

    place: int
    top2_gap: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 2 for bad use, 1 for a failure."""
    if sys.stdout is None:  # it was closed, as by >&-
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that its encoding lacks, as stderr has it
    try:
        try:
            return _run_command(argv)
        finally:
            sys.stdout.flush()  # here, where an error can still be reported
    except BrokenPipeError:  # the reader has closed the pipe
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"titan: {error}", file=sys.stderr)
        _discard_output()
        return 1


def _discard_output() -> None:
    """Send what is left of the output nowhere: Python writes it when it exits, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(_join_parents(sys.argv[1:] if argv is None else argv))
    if rest and args.command != "bench":
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if args.command == "bench":
            return _bench(args.bench, rest)
        return _generate(args) if args.command == "generate" else _info(args)
    except (RuntimeError, MemoryError) as error:  # RecursionError is a RuntimeError
        print(f"titan: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"titan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntitan: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    example = 'for example: titan generate "def quicksort(" --compare'
    parser = argparse.ArgumentParser("titan", description="Speculative decoding for causal language models.", epilog=example)
    parser.add_argument("--version", action="version", version=f"titan {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_parser = partial(commands.add_parser, argument_default=argparse.SUPPRESS)  # what is not given is left to the library
    generate = add_parser("generate", help="continue a prompt and show the speed", description=_generate.__doc__)
    _add_generate(generate)
    generate.set_defaults(parser=generate)
    info = add_parser("info", help="versions, device, kernels; or of a --model, whether it runs", description=_info.__doc__)
    info.set_defaults(parser=info, model=None, json=False)
    info.add_argument("--model", help="say instead, from its config alone, whether and how this model runs, and in how much memory")
    info.add_argument("--revision", help=REVISION_HELP)
    info.add_argument("--dtype", help=DTYPE_HELP)
    info.add_argument("--model-impl", choices=MODEL_IMPLS, help=IMPL_HELP)
    info.add_argument("--trust-remote-code", action="store_true", help=TRUST_HELP)
    info.add_argument("--json", action="store_true", help="print one JSON object")
    bench = commands.add_parser("bench", help=f"benchmarks: {', '.join(BENCHES)}", add_help=False)
    bench.add_argument("bench", nargs="?", choices=BENCHES, help="which benchmark; its own options follow (try --help)")
    return parser


def _join_parents(argv: Sequence[str]) -> list[str]:
    """Rewrite ``--draft-tree -1,0`` as ``--draft-tree=-1,0``: argparse takes an argument that starts with a minus for an option."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--draft-tree" and re.match(r"-\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(draft_model=None, chat=False, show_tree=False, compare=False, json=False)
    add = parser.add_argument
    add("prompt", help='the text to continue, for example "def quicksort("')
    add("--chat", action="store_true", help="the prompt is a user's message, to be answered: put it into the model's chat template")
    add("--model", default="demo", help="target: demo, a folder or a hub id (default: demo)")
    add("--draft-model", help="draft: demo, a folder, a hub id, ngram, or none (default: demo with the demo model, else none)")
    add("--tokenizer", help="folder or hub id of the tokenizer (default: that of --model)")
    add("--revision", help=REVISION_HELP)
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
        help='shape of the draft tree: auto, dynamic, chain, or the parent of each node, -1 for the root, such as "-1,-1,0" '
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
    add("--model-impl", choices=MODEL_IMPLS, help=IMPL_HELP)
    add("--trust-remote-code", action="store_true", help=TRUST_HELP)
    add("--dtype", help=DTYPE_HELP)
    add("--draft-dtype", help="dtype of the draft's weights and KV (default: that of the target)")
    add(
        "--draft-weight-bits",
        type=weight_bits_of,
        metavar="BITS",
        help="8: round the draft's matrices, which a CPU with AVX2 or AVX-512, or a GPU in bfloat16, reads in less time; none: "
        "leave them as they are; auto: 8 where it is faster (default)",
    )
    add("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--num-threads", type=int, help="threads on a CPU (default: one per physical core, at most PyTorch's number)")
    add("--no-warm-up", dest="warm_up", action="store_false", help="on a GPU: compile kernels when they are first needed")
    add("--compare", action="store_true", help="run again without speculation and print the speed-up")
    add("--json", action="store_true", help="print one JSON object instead of text")


def _given(args: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """Return the options of these names that a command line gives, or that have a default here."""
    return {name: value for name, value in vars(args).items() if name in names}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _generate(args: argparse.Namespace) -> int:
    """Continue one prompt, greedily by default, and stream the text; then print the speed, tokens per step and acceptance."""
    params, options = SamplingParams(**_given(args, SAMPLING_OPTIONS)), _given(args, ENGINE_OPTIONS)
    draft_model = args.draft_model
    if draft_model is None:
        draft_model = "demo" if args.model == "demo" else "none"
    has_draft, is_off = draft_model != "none", options.get("speculation") == "off"
    unused = [name for name in DRAFT_OPTIONS if name in options and not has_draft]
    unused += ["speculation"] * ("speculation" in options and not is_off and not has_draft)
    unused += [name for name in SHOWS_OF_DRAFTS if getattr(args, name) and (is_off or not has_draft)]
    if unused:
        needed = ["--draft-model"] * (not has_draft) + ["no --speculation off"] * is_off
        raise ValueError(f"{_flag(unused[0])} needs a draft: give {' and '.join(needed)}")
    for name in DRAFT_MODEL_OPTIONS:
        if name in options and is_registered(draft_model):
            raise ValueError(f"{_flag(name)} needs a draft model, which {draft_model!r} is not")
    draft = None if draft_model == "none" else draft_model
    llm = LLM(args.model, draft, max_batch_size=1, enable_prefix_caching=False, generation_config="vllm", **options)
    plain_params = replace(params, use_speculative=False)
    prompt: Prompt = args.prompt
    if args.chat:
        try:
            prompt = llm.chat_prompt([{"role": "user", "content": args.prompt}])
        except ValueError as error:
            raise ValueError(f"--chat cannot be used: {error}") from error
    for warm_up in (params, plain_params) if args.compare else (params,):
        warm_up = replace(warm_up, max_tokens=WARM_UP_TOKENS, ignore_eos=True, stop=None)
        _check_completed(llm.generate(prompt, warm_up, use_tqdm=False)[0])
    if not (args.chat or args.json):
        print(args.prompt, end="", flush=True)
    run = _run(llm, prompt, params, echo=not args.json, keep_trees=args.show_tree)
    plain = _run(llm, prompt, plain_params, echo=False) if args.compare else None
    difference = None if plain is None else _find_difference(llm, run, plain)
    if args.json:
        result = _as_json(run, plain, difference)
        if args.show_tree:
            result["trees"] = [_tree_as_json(each) for each in run.trees]
        print(json.dumps(result))
        return 0
    print("\n")
    if args.show_tree:
        _print_trees(llm, run.trees)
    print(_summary(run, llm.metrics().draft_vocabulary))
    if plain is not None:
        print(
            f"without speculation: {plain.num_tokens} tokens, {plain.tokens_per_second:.1f} tokens/s, "
            f"{_comparison(difference, llm, params)}; speed-up {run.tokens_per_second / plain.tokens_per_second:.2f}x"
        )
    return 0


def _find_difference(llm: LLM, run: Run, plain: Run) -> Difference | None:
    """Return where two runs differ; ``None`` if they do not. The logits at that place are computed again."""
    ours, others = run.output.outputs[0].token_ids, plain.output.outputs[0].token_ids
    if ours == others:
        return None
    place = next((i for i, (one, other) in enumerate(zip(ours, others, strict=False)) if one != other), min(len(ours), len(others)))
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=2, use_speculative=False)
    [output] = llm.generate([[*run.output.prompt_token_ids, *ours[:place]]], one_token, use_tqdm=False)
    _check_completed(output)
    [logprobs] = output.outputs[0].logprobs or [{}]
    best, second, *_ = sorted((each.logprob for each in logprobs.values()), reverse=True)  # three where the best ones tie
    return Difference(place, best - second)


def _comparison(difference: Difference | None, llm: LLM, params: SamplingParams) -> str:
    """Return whether the texts are the same, and if not, why; see docs/equality.md."""
    if difference is None:
        return "same text"
    where = f"different text from token {difference.place + 1} on"
    if params.temperature > 0 and llm.engine.config.speculation.draft_sampling == "sampled":
        return f"{where}, because sampled drafts keep the distribution of the tokens, not the tokens of a seed"
    dtype = dtype_name(llm.engine.dtype)
    why = f"passes over other rows round differently in {dtype}"
    if params.is_greedy:
        why += f", and the two largest logits are {difference.top2_gap:.2g} apart there"
    return f"{where}, because {why}" + (" (--dtype float32 gives the same text)" if params.is_greedy and dtype != "float32" else "")


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


def _summary(run: Run, draft_vocabulary: float | None) -> str:
    metrics = run.output.metrics
    line = f"{run.num_tokens} tokens, {run.tokens_per_second:.1f} tokens/s"
    if metrics.num_draft_tokens:
        per_depth = " ".join(f"{rate:.2f}" for rate in _acceptance_per_depth(metrics))
        nodes = metrics.num_draft_tokens / metrics.num_sequence_steps
        line += f", mean acceptance length {metrics.mean_acceptance_length:.2f}, {nodes:.2f} draft tokens per step"
        line += f", acceptance per depth {per_depth}"
    if draft_vocabulary is not None and draft_vocabulary < 1:
        line += f"; the draft's vocabulary has {draft_vocabulary:.1%} of the target's tokens"
    return line


def _acceptance_per_depth(metrics: RequestMetrics) -> list[float]:
    """Return the acceptance rate of the draft tokens at depth 1, 2, ..."""
    accepted = [*metrics.accepted_per_depth, *[0] * len(metrics.proposed_per_depth)]
    return [count / proposed for count, proposed in zip(accepted, metrics.proposed_per_depth, strict=False)]


def _as_json(run: Run, plain: Run | None, difference: Difference | None) -> dict[str, object]:
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
        result["difference"] = None if difference is None else asdict(difference)
    return result


def _info(args: argparse.Namespace) -> int:
    """Print the versions of Titan and its dependencies, the device, and the kernels in use; or what running a model takes."""
    given = _given(args, ModelOptions.__annotations__)
    for name, value in given.items() if args.model is None else ():
        raise ValueError(f"{_flag(name)}{'' if value is True else f'={value!r}'} needs --model: it is an option of a model")
    backend = choose_backend(choose_device("auto"))
    if args.model is not None:
        runs, facts = model_facts(args.model, ModelOptions(**given), backend)
        _print_facts({**facts, **backend.facts()}, args.json)
        return 0 if runs else 1
    facts = {
        "titan": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "triton", "accelerate", "safetensors", "tokenizers")},
        **backend.facts(),
        **{f"layers, {name}": _layer_kernels(backend, dtype) for name, dtype in RUN_DTYPES.items()},
    }
    _print_facts(facts, args.json)
    return 0


def _print_facts(facts: Mapping[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
    else:
        width = max(map(len, facts))
        print("\n".join(f"{name:{width}}  {value}" for name, value in facts.items()))


def _layer_kernels(backend: Backend, dtype: torch.dtype) -> str:
    try:
        return backend.layer_ops(dtype, frozenset()).name
    except ValueError as error:  # a GPU that is not supported
        return f"none: {error}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _bench(name: str | None, arguments: Sequence[str]) -> int:
    """Run a benchmark of `titan.bench`, or list them; its options follow its name."""
    from importlib import import_module

    if name is None:
        listed = "\n".join(f"  {each:12}{text}" for each, text in BENCHES.items())
        print(f"usage: titan bench NAME [options], titan bench NAME --help\n\n{listed}")
        return 0 if {"-h", "--help"} & set(arguments) else 2
    return int(import_module(f"titan.bench.{name}").main(arguments) or 0)


if __name__ == "__main__":
    sys.exit(main())
