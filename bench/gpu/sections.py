"""What the GPU check is made of: a section is a list of tasks, a task is measured on its own and becomes a row."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

Figure = float | str | None
Status = Literal["ok", "wrong", "failed", "unavailable", "skipped"]
"""Of a row: its numbers are wrong; it ended in an error; the same, but of somebody else's code; there was no time for it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What tasks need to know."""

    device: torch.device
    is_tiny: bool  # shapes so small that Triton's interpreter can run them
    seed: int = 0
    num_threads: int = 1  # of PyTorch on the host
    copy_bandwidth: float | None = None  # bytes per second, read and written, as measured in the same run
    matmul_rate: float | None = None  # floating-point operations per second


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
class Measurement:
    """What a task found: figures by column; ``problem`` says what is wrong with the numbers that came out, if anything is."""

    figures: Mapping[str, Figure]
    goals: Sequence[Goal] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One row to come.

    Args:
        name: of the row.
        measure: does the work.
        seconds: that it takes, about; it is skipped where fewer are left.
        rank: tasks of lower rank run first.
        is_peer: somebody else's code, which may be absent or fail.
    """

    name: str
    measure: Callable[[], Measurement]
    seconds: float
    rank: int = 0
    is_peer: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a task."""

    section: str
    index: int  # among the rows of its section
    name: str
    status: Status
    figures: Mapping[str, Figure] = field(default_factory=dict)
    goals: Sequence[Goal] = ()
    problem: str | None = None  # why it is not ok
    seconds: float = 0.0  # that it took


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one kind.

    Args:
        name: on the command line.
        title: of the table.
        notes: what the columns mean.
        seconds: of the whole run that are meant for it; what sections before it did not use comes on top.
        columns: how each figure is written, as in ``format(figure, columns[name])``, by the name of the column.
        make_tasks: its tasks, in the order of the table; a function that other processes can import.
    """

    name: str
    title: str
    notes: str
    seconds: float
    columns: Mapping[str, str]
    make_tasks: Callable[[Setting], Sequence[Task]]


def run_section(
    section: Section,
    setting: Setting,
    seconds: float,
    emit: Callable[[Sequence[str] | Row], None],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run the tasks of a section by rank; an error ends its own task only.

    Args:
        section: what to run.
        setting: for its tasks.
        seconds: from now on; tasks that take longer than what is left are skipped.
        emit: is told the names of the rows, once, then every row as soon as it is known.
        clock: replaced in tests.
    """
    start = clock()
    tasks = section.make_tasks(setting)
    emit([task.name for task in tasks])
    for index, task in sorted(enumerate(tasks), key=lambda each: each[1].rank):
        row = Row(section.name, index, task.name, "ok")
        task_start = clock()
        left = seconds - (task_start - start)
        if task.seconds > left:
            emit(
                replace(row, status="skipped", problem=f"out of time: {max(left, 0):.0f} s are left, it takes {task.seconds:.0f} s")
            )
            continue
        try:
            found = task.measure()
        except Exception as error:  # noqa: BLE001 (whatever fails, the rows after it still count)
            traceback.print_exc()
            status: Status = "unavailable" if task.is_peer else "failed"
            emit(replace(row, status=status, problem=describe(error), seconds=clock() - task_start))
            continue
        emit(
            replace(
                row,
                status="ok" if found.problem is None else "wrong",
                figures=found.figures,
                goals=() if setting.is_tiny else tuple(found.goals),
                problem=found.problem,
                seconds=clock() - task_start,
            )
        )


def describe(error: BaseException) -> str:
    """An error on one line: its type and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"
