"""The options that the commands share."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from titan.core.options import DTYPES, MODEL_IMPLS


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how the model of ``--model`` is opened."""
    add = parser.add_argument
    add("--revision", help="branch, tag or commit of --model on the hub (default: its main branch)")
    add("--dtype", help=f"dtype of weights and KV: {', '.join(DTYPES)} (default: auto)")
    add(
        "--model-impl",
        choices=MODEL_IMPLS,
        help="native: Titan's own decoder; transformers: modules of that library; auto: the former where it can (default: auto)",
    )
    add("--trust-remote-code", action="store_true", help="run the code that a checkpoint comes with")


def given(args: argparse.Namespace, names: Collection[str]) -> dict[str, Any]:
    """Return the options of these names that a command line gives, or that have a default here."""
    return {name: value for name, value in vars(args).items() if name in names}


def flag(name: str) -> str:
    """Return an option as it is written on a command line."""
    return f"--{name.replace('_', '-')}"
