"""The command line ``titan``: its commands, and what becomes of their errors.

A command is imported when it is called: what is only asked for a version or for help answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from titan import __version__

COMMANDS = {
    "generate": "continue a prompt and show the speed",
    "info": "versions, device, kernels; or of a --model, whether it runs",
    "bench": "benchmarks: throughput, load, drafts and others",
}
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
    words = sys.argv[1:] if argv is None else argv
    command, arguments = _make_parser().parse_args(words[:1]).command, words[1:]  # which the command reads
    try:
        return _bench(arguments) if command == "bench" else _run("titan.commands", command, arguments)
    except (RuntimeError, MemoryError) as error:  # RecursionError is a RuntimeError
        print(f"titan: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"titan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntitan: interrupted", file=sys.stderr)
        return 130


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "titan",
        "titan [-h] [--version] COMMAND ...",
        f"Speculative decoding for causal language models. Commands, each with --help:\n\n{_list(COMMANDS)}",
        'for example: titan generate "def quicksort(" --compare',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"titan {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    return parser


def _bench(arguments: Sequence[str]) -> int:
    """Run a benchmark, or list them; its options follow its name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: titan bench NAME [options], titan bench NAME --help\n\n{_list(BENCHES)}")
        return 0 if arguments else 2
    name, *options = arguments
    if name not in BENCHES:
        raise ValueError(f"there is no benchmark {name!r}; allowed: {', '.join(BENCHES)}")
    return _run("titan.bench", name, options)


def _run(package: str, name: str, arguments: Sequence[str]) -> int:
    return int(import_module(f"{package}.{name}").main(arguments) or 0)


def _list(names: dict[str, str]) -> str:
    return "\n".join(f"  {name:12}{text}" for name, text in names.items())


if __name__ == "__main__":
    sys.exit(main())
