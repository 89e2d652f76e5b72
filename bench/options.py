"""The options that the benches share on their command lines."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from titan.core.dtypes import RUN_DTYPES
from titan.core.options import MODEL_IMPLS, weight_bits_of
from titan.kernels.cpu.threads import available_cores
from titan.models.files import DEMO, resolve_model
from titan.models.loader import download

KERNEL_VARIABLES = ("TITAN_", "ONEDNN_", "MKL_", "OMP_")
"""How the names of environment variables begin that choose or restrict the kernels of Titan and other engines."""


def bench_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of ``titan bench name``, with what every benchmark takes: files to write, threads and seed."""
    parser = argparse.ArgumentParser(
        prog=f"titan bench {name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results, with every sample and provenance")
    parser.add_argument("--markdown", type=output_file, metavar="FILE", help="write the tables")
    threads = min(available_cores(), torch.get_num_threads())
    parser.add_argument("--threads", type=positive, default=threads, help="default: as LLM has them, here %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default: %(default)s)")
    return parser


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model is the target; `parse` downloads the revision, and makes it ``args.model``."""
    parser.add_argument("--model", default=DEMO, help="folder or hub id of the target (default: the demo pair)")
    parser.add_argument("--revision", help="branch, tag or commit of a target on the hub (default: its main branch)")
    parser.add_argument("--model-impl", choices=MODEL_IMPLS, default="auto", help="who computes the layers (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of checkpoints; other engines do not")


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add the options for the draft and how it is loaded; `parse` fills in that of the demo pair, if its target is asked for."""
    parser.add_argument("--draft-model", help="folder or hub id of the draft, or ngram (default: the demo's, or none)")
    add_draft_weight_bits(parser)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype``, of a benchmark that runs in one."""
    parser.add_argument("--dtype", choices=list(RUN_DTYPES), default="bfloat16", help="of weights and KV (default: bfloat16)")


def add_draft_weight_bits(parser: argparse.ArgumentParser) -> None:
    """Add the option for the weights of drafts."""
    parser.add_argument(
        "--draft-weight-bits",
        type=weight_bits_of,
        default="auto",
        metavar="BITS",
        help="of Titan's drafts: 8, none (as they are), or auto, which is 8 where kernels can read them so (default)",
    )


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return how models are to be opened, as `LLM` and `open_model` take it.

    Args:
        args: of a parser with `add_target`.
    """
    return {"model_impl": args.model_impl, "trust_remote_code": args.trust_remote_code}


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, quick: Mapping[str, Any] | None = None
) -> argparse.Namespace:
    """Read a command line, let torch use its threads, and keep it as ``command``, after the variables that change kernels.

    Args:
        parser: of the command line.
        argv: the command line; ``None`` = that of the process.
        quick: the defaults after ``--quick``.

    Raises:
        ValueError: an option has a value twice.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if quick is not None and args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_args(argv)
    for name, values in vars(args).items():
        if isinstance(values, list) and len(set(values)) < len(values):
            text = " ".join(map(str, values))
            raise ValueError(f"--{name.replace('_', '-')} {text} has a value twice: allowed is each once")
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(os.environ.items()) if name.startswith(KERNEL_VARIABLES)]
    args.command = " ".join([*settings, parser.prog, *map(shlex.quote, argv)])
    torch.set_num_threads(args.threads)
    if "draft_model" in args:
        args.draft_model = args.draft_model or (DEMO if args.model == DEMO else None)
    if getattr(args, "revision", None):
        args.model = download(resolve_model(args.model, "target"), args.revision, **model_options(args))
    return args


def positive(text: str) -> int:
    """Read an integer of at least 1, as a type of `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be an integer of at least 1")
    return int(text)


def above_zero(text: str) -> float:
    """Read a number, as a type of `argparse`."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it must be a number above 0")
    return float(text)


def output_file(text: str) -> Path:
    """Read the name of a file to write, as a type of `argparse`; its folder may be missing."""
    path = Path(text)
    there = next(each for each in (path, *path.absolute().parents) if each.exists())  # the root exists
    if there.is_dir() == (there == path) or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not allowed: it is a folder, or {there} cannot be written to")
    return path
