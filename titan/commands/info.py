"""Print the versions of Titan and its dependencies, the device, and the kernels in use; or what running a model takes."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from titan import __version__
from titan.commands.options import add_model_options, flag, given
from titan.core.dtypes import RUN_DTYPES
from titan.core.options import ModelOptions
from titan.kernels.backend import choose_backend, choose_device
from titan.kernels.interfaces import Backend
from titan.model_info import model_facts


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit status: 1 for a model that does not run.

    Raises:
        ValueError: there is no such model, or an option is not allowed.
    """
    args = _make_parser().parse_args(argv)
    options = given(args, ModelOptions.__annotations__)
    for name, value in options.items() if args.model is None else ():
        raise ValueError(f"{flag(name)}{'' if value is True else f'={value!r}'} needs --model: it is an option of a model")
    backend = choose_backend(choose_device("auto"))
    if args.model is not None:
        runs, facts = model_facts(args.model, ModelOptions(**options), backend)
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


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("titan info", description=__doc__, argument_default=argparse.SUPPRESS)
    parser.set_defaults(model=None, json=False)
    parser.add_argument("--model", help="say instead, from its config alone, whether and how it runs, and in how much memory")
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


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
