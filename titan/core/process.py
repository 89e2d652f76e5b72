"""A check that this process was not forked from one that had made an engine."""

from __future__ import annotations

import os
from functools import cache


def check_process() -> None:
    """Refuse a process that was forked from one with an engine: it has none of the threads that its locks and PyTorch wait for.

    Raises:
        RuntimeError: the process was forked after an engine had been made.
    """
    if os.getpid() != _first_process():
        raise RuntimeError(
            f"process {os.getpid()} was forked from process {_first_process()} after that had made an LLM, and threads do not "
            f"survive a fork: start it with multiprocessing.get_context('spawn'), and make an LLM there"
        )


@cache
def _first_process() -> int:
    """Return the process that made the first engine, in processes forked from it as well."""
    return os.getpid()
