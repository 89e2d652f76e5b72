"""What the GPU check is made of: a section is a list of tasks, a task is measured on its own and becomes a row."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from textwrap import shorten
from typing import Any, Literal

import torch

from titan.bench.gpu.timing import synchronize
from titan.bench.samples import Label, Sample
from titan.bench.turns import error_line

Figures = Mapping[str, float]
Status = Literal["ok", "wrong", "failed", "unavailable", "skipped"]
"""Status of a row: fine; wrong numbers; an error; an error in somebody else's code; no time left."""

GRACE = 20.0
"""Seconds that a section may run past its time, for the task that it is at, before its process is ended."""
START = 300.0
"""Seconds that a section may take at least until its tasks are known: an engine compiles and records all that it may need."""
PATIENCE = 5
"""Times the seconds planned for a task that it may take, and `GRACE` besides, before its process is ended."""


class WrongNumbersError(ValueError):
    """What a task computed is not what it should be."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What tasks need to know."""

    device: torch.device
    is_tiny: bool  # shapes so small that Triton's interpreter can run them; they have no goals
    seed: int = 0
    num_threads: int = 1  # of PyTorch on the host
    batches: Sequence[int] = ()  # of whole engines; if empty, those that are planned
    copy_bandwidth: float | None = None  # bytes per second, read and written, as measured in the same run
    peak: float | None = None  # operations per second of a matrix product, likewise


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
    """Run a section in a process of its own: a task that crashes, hangs, or leaves the device unusable costs its own row alone.

    The tasks after it run in a new process. Yields rows as soon as they are known, the first of which says how long it took until
    the tasks were; there are no more after one without labels, whose process did not get as far within `START` and ``grace``.
    """
    deadline, num_known = time.time() + seconds, 0
    left = [(Row({}, 0, {}, status="failed"), seconds)]  # what becomes of a row whose process is lost; planned seconds
    while left and (not num_known or time.time() < deadline):
        start = time.time()
        try:
            with _process(section.make_tasks, setting, deadline, num_known) as receive:
                left = receive((deadline - start if num_known else max(seconds, START)) + grace)
                if left and not num_known:
                    took = time.time() - start
                    yield Row({next(iter(left[0][0].labels)): "start"}, 0, {"start, s": took}, seconds=took)
                while left:
                    start = time.time()
                    row = receive(min(PATIENCE * left[0][1], max(deadline - start, 0)) + grace)
                    if row is None:  # the device is unusable
                        break
                    yield row
                    num_known, left = num_known + 1, left[1:]
        except ConnectionError as error:
            lost, *left = left if left[0][0].labels else left[:1]
            num_known += 1
            yield replace(lost[0], problem=str(error), seconds=time.time() - start)
    yield from (replace(row, status="skipped", problem="out of time") for row, _ in left)


@contextmanager
def _process(*arguments: Any) -> Iterator[Callable[[float], Any]]:
    """Start `_send_rows`; yields a function that waits so many seconds for what is sent next, or raises `ConnectionError`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_rows, args=(*arguments, sender), daemon=True)
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe

    def receive(seconds: float) -> Any:
        try:
            if receiver.poll(max(seconds, 0)):
                return receiver.recv()
        except EOFError:
            process.join(GRACE)
            raise ConnectionError(f"its process ended with status {process.exitcode}") from None
        raise ConnectionError(f"its process was ended after {max(seconds, 0):.0f} s without an answer")

    try:
        yield receive
    finally:
        process.kill()
        process.join()
        receiver.close()


def _send_rows(
    make_tasks: Callable[[Setting], Sequence[Task]], setting: Setting, deadline: float, first: int, sender: Connection
) -> None:
    """Send what is to come from task ``first`` on, then its rows; and ``None`` after one that left the device unusable."""
    torch.set_num_threads(setting.num_threads)
    tasks = make_tasks(setting)[first:]
    lost = [Row(task.labels, 0, {}, status="unavailable" if task.is_peer else "failed", goals=task.goals) for task in tasks]
    sender.send([(row, task.seconds) for row, task in zip(lost, tasks, strict=True)])
    for row in run_tasks(tasks, deadline):
        sender.send(row)
        if row.status != "ok":
            try:
                synchronize(setting.device)
            except RuntimeError:  # after an illegal access, all that the device is asked for fails
                sender.send(None)
                return
