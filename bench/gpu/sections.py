"""What the GPU check is made of: a section is a list of tasks, a task is measured on its own and becomes a row."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from textwrap import shorten
from typing import Literal

import torch

from titan.bench.samples import Label, Sample
from titan.bench.turns import error_line

Figures = Mapping[str, float]
Status = Literal["ok", "wrong", "failed", "unavailable", "skipped"]
"""Of a row: fine; wrong numbers; an error; an error in somebody else's code; no time left."""

GRACE = 20.0
"""Seconds that a section may run past its time, for the task that it is at, before its process is ended."""


class WrongNumbersError(ValueError):
    """What a task computed is not what it should be."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What tasks need to know."""

    device: torch.device
    is_tiny: bool  # shapes so small that Triton's interpreter can run them; they have no goals
    seed: int = 0
    num_threads: int = 1  # of PyTorch on the host
    copy_bandwidth: float | None = None  # bytes per second, read and written, as measured in the same run


@dataclass(frozen=True, slots=True)
class Row(Sample):
    """What became of a task: a sample, whose labels begin with the section, and why there are no figures, if there are none."""

    status: Status = "ok"
    problem: str | None = None
    seconds: float = 0.0  # that it took
    goals: Figures = field(default_factory=dict)

    @property
    def is_met(self) -> dict[str, bool]:
        """Whether goals are met, by figure, as far as these were measured; NaN reaches nothing."""
        return {name: self.figures[name] >= least for name, least in self.goals.items() if name in self.figures}


@dataclass(frozen=True, slots=True)
class Task:
    """One row to come."""

    labels: Mapping[str, Label]
    measure: Callable[[], Figures]  # errors, `WrongNumbersError` among them, become the status of the row
    seconds: float  # that it takes, about; it is skipped where fewer are left
    is_peer: bool = False  # somebody else's code, which may be absent or fail
    goals: Figures = field(default_factory=dict)  # that figures of the row must at least reach


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one kind."""

    name: str  # on the command line
    title: str
    notes: str  # what the columns mean
    seconds: float  # of the whole run; what sections before it did not use comes on top
    columns: Mapping[str, str]  # format specs by figure
    make_tasks: Callable[[Setting], Sequence[Task]]  # the most important first; other processes must be able to import it
    compare: Callable[[Sequence[Row]], list[Row]] = list  # adds what follows from several rows


def run_tasks(tasks: Sequence[Task], deadline: float, clock: Callable[[], float] = time.time) -> Iterator[Row]:
    """Run tasks one after the other; an error ends its own task only, and those that take longer than what is left are skipped."""
    for task in tasks:
        start = clock()
        left = deadline - start
        row = Row(task.labels, 0, {}, goals=task.goals)
        try:
            if task.seconds > left:
                problem = f"out of time: {max(left, 0):.0f} s are left, it takes {task.seconds:.0f} s"
                row = replace(row, status="skipped", problem=problem)
            else:
                row = replace(row, figures=task.measure())
        except WrongNumbersError as error:
            row = replace(row, status="wrong", problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever fails, the rows after it still count
            traceback.print_exc()
            problem = shorten(error_line(error), 200)  # compilers begin to list there
            row = replace(row, status="unavailable" if task.is_peer else "failed", problem=problem)
        yield replace(row, seconds=clock() - start)


def run_isolated(section: Section, setting: Setting, seconds: float, *, grace: float = GRACE) -> Iterator[Row]:
    """Run a section in a process of its own: an illegal access, a crash or a hang there costs that section's rows alone.

    Yields rows as soon as they are known; a last one says why there are no more, if the process did not come to its end within
    ``seconds``, its start included, and ``grace``.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = section.make_tasks, setting, time.time() + seconds, sender
    process = context.Process(target=_send_rows, args=arguments, daemon=True)
    end = time.monotonic() + seconds + grace
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe
    try:
        while receiver.poll(max(end - time.monotonic(), 0)):
            yield receiver.recv()
        yield Row({}, 0, {}, status="failed", problem=f"what came next was ended after {seconds + grace:.0f} s without an answer")
    except EOFError:
        process.join()
        if process.exitcode:
            yield Row({}, 0, {}, status="failed", problem=f"what came next ended the process with status {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send_rows(make_tasks: Callable[[Setting], Sequence[Task]], setting: Setting, deadline: float, sender: Connection) -> None:
    torch.set_num_threads(setting.num_threads)
    for row in run_tasks(make_tasks(setting), deadline):
        sender.send(row)
