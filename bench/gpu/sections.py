"""What the GPU check is made of: a section is a list of tasks, a task is measured on its own and becomes a row."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

Figure = float | str
Status = Literal["ok", "wrong", "failed", "unavailable", "skipped"]
"""Of a row: its numbers are wrong; it ended in an error; the same, but of somebody else's code; there was no time for it."""

GRACE = 20.0
"""Seconds that a section may run past its time, for the task that it is at, before its process is ended."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What tasks need to know."""

    device: torch.device
    is_tiny: bool  # shapes so small that Triton's interpreter can run them
    seed: int = 0
    num_threads: int = 1  # of PyTorch on the host
    copy_bandwidth: float | None = None  # bytes per second, read and written, as measured in the same run


@dataclass(frozen=True, slots=True)
class Goal:
    """What a row is held to."""

    what: str
    required: float
    measured: float
    is_at_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it was reached; NaN reaches nothing."""
        return self.measured <= self.required if self.is_at_most else self.measured >= self.required


@dataclass(frozen=True, slots=True)
class Row:
    """What a task found: figures by column, goals, and why it is not ok, if it is not; the rest is filled in for it."""

    figures: Mapping[str, Figure] = field(default_factory=dict)
    goals: Sequence[Goal] = ()
    problem: str | None = None
    section: str = ""
    name: str = ""
    status: Status = "ok"
    seconds: float = 0.0  # that it took


@dataclass(frozen=True, slots=True)
class Task:
    """One row to come.

    Args:
        name: of the row.
        measure: does the work; a row with a problem has wrong numbers.
        seconds: that it takes, about; it is skipped where fewer are left.
        is_peer: somebody else's code, which may be absent or fail.
    """

    name: str
    measure: Callable[[], Row]
    seconds: float
    is_peer: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one kind.

    Args:
        name: on the command line.
        title: of the table.
        notes: what the columns mean.
        seconds: of the whole run that are meant for it; what sections before it did not use comes on top.
        columns: how each figure is written, as in ``format(figure, columns[name])``, by the name of the column.
        make_tasks: its tasks, the most important first; a function that other processes can import.
    """

    name: str
    title: str
    notes: str
    seconds: float
    columns: Mapping[str, str]
    make_tasks: Callable[[Setting], Sequence[Task]]


def run_section(
    section: Section, setting: Setting, deadline: float, emit: Callable[[Row], object], clock: Callable[[], float] = time.time
) -> None:
    """Run the tasks of a section one after the other; an error ends its own task only.

    Args:
        section: what to run.
        setting: for its tasks.
        deadline: by the clock; tasks that take longer than what is left are skipped.
        emit: is told every row.
        clock: by default the one that all processes share.
    """
    torch.set_num_threads(setting.num_threads)
    for task in section.make_tasks(setting):
        start = clock()
        left, row = deadline - start, Row()
        if task.seconds > left:
            problem = f"out of time: {max(left, 0):.0f} s are left, it takes {task.seconds:.0f} s"
            row = Row(status="skipped", problem=problem)
        else:
            try:
                row = task.measure()
                row = replace(row, status="wrong" if row.problem else "ok", goals=() if setting.is_tiny else tuple(row.goals))
            except Exception as error:  # noqa: BLE001 (whatever fails, the rows after it still count)
                traceback.print_exc()
                row = Row(status="unavailable" if task.is_peer else "failed", problem=describe(error))
        emit(replace(row, section=section.name, name=task.name, seconds=clock() - start))


def run_isolated(
    section: Section, setting: Setting, seconds: float, note: Callable[[Row], None], *, grace: float = GRACE
) -> list[Row]:
    """Run a section in a process of its own: an illegal access, a crash or a hang there costs that section's rows alone.

    Args:
        section: what to run; it and what it refers to can be pickled.
        setting: for its tasks.
        seconds: that it may take, the start of the process included.
        note: is told every row as soon as it is known.
        grace: seconds past ``seconds`` until the process is ended.

    Returns:
        The rows; a last one says why there are no more, if the process did not come to its end.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_section, args=(section, setting, time.time() + seconds, sender.send), daemon=True)
    end = time.monotonic() + seconds + grace
    rows: list[Row] = []
    problem = f"ended after {seconds + grace:.0f} s without an answer"
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe
    try:
        while receiver.poll(max(end - time.monotonic(), 0)):
            rows.append(receiver.recv())
            note(rows[-1])
    except EOFError:
        process.join()
        problem = f"the process ended with status {process.exitcode}" if process.exitcode else ""
    finally:
        process.kill()
        process.join()
        receiver.close()
    if problem:
        rows.append(Row(section=section.name, name="what came next", status="failed", problem=problem))
        note(rows[-1])
    return rows


def describe(error: BaseException) -> str:
    """An error on one line: its type and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"
