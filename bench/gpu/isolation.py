"""Runs a section in a process of its own: an illegal access, a crash or a hang there costs that section's rows alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch

from titan.bench.gpu.sections import Row, Section, Setting, describe, run_section

GRACE = 20.0
"""Seconds that a section may run past its time, for the task that it is at, before it is ended."""
END = "end"


def run_isolated(
    section: Section, setting: Setting, seconds: float, note: Callable[[Row], None], *, grace: float = GRACE
) -> list[Row]:
    """Run a section in a new process.

    Args:
        section: what to run; it and what it refers to can be pickled.
        setting: for its tasks.
        seconds: that it may take, the start of the process included.
        note: is told every row as soon as it is known.
        grace: seconds past ``seconds`` until the process is ended.

    Returns:
        All rows of the section in the order of its table; those that the process did not come to say why.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(section, setting, time.time() + seconds, sender), daemon=True)
    deadline = time.monotonic() + seconds + grace
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe
    names: Sequence[str] = ("section",)
    rows: dict[int, Row] = {}
    problem = None
    try:
        while problem is None:
            if not receiver.poll(max(deadline - time.monotonic(), 0)):
                problem = f"ended after {seconds + grace:.0f} s without an answer"
                break
            try:
                message = receiver.recv()
            except EOFError:
                process.join()
                problem = f"the process ended with status {process.exitcode}"
                break
            if message == END:
                break
            if isinstance(message, str):
                problem = message
            elif isinstance(message, Row):
                rows[message.index] = message
                note(message)
            else:
                names = message
    finally:
        process.kill()
        process.join()
        receiver.close()
    for index, name in enumerate(names):
        if index not in rows:
            rows[index] = Row(section.name, index, name, "failed", problem=problem or "never came to an end")
            note(rows[index])
    return [rows[index] for index in sorted(rows)]


def _run(section: Section, setting: Setting, deadline: float, sender: Connection) -> None:
    """What the process does; ``deadline`` is in seconds of `time.time`, since processes share no other clock."""
    torch.set_num_threads(setting.num_threads)
    try:
        run_section(section, setting, deadline - time.time(), sender.send)
    except Exception as error:  # noqa: BLE001 (it is reported as the problem of the section)
        sender.send(describe(error))
    else:
        sender.send(END)
