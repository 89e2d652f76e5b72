"""The step loop: one engine for the callers of all threads, of which one at a time steps."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import RLock, current_thread, get_ident
from typing import Any, TypeVar
from weakref import finalize

from titan.core.checks import shown
from titan.core.metrics import EngineMetrics
from titan.core.process import check_process
from titan.core.request import Request
from titan.engine import Engine
from titan.schedule.scheduler import Scheduler

T = TypeVar("T")

PATIENCE_S = 1.0
"""A sleeping caller wakes after this many seconds to check for a leader, in case an interrupt lost its wake-up."""


@dataclass(slots=True, eq=False)
class _Run:
    """The requests of one call.

    Args:
        requests: all of them.
        by_id: the same, by their ids.
        to_queue: those that the scheduler has had no room for yet, in order.
        expiries: times at which requests of them time out, ascending, without those that have passed.
        failure: of a step, which ended those that were in flight; ``None`` = no step failed.
    """

    requests: Sequence[Request]
    by_id: dict[str, Request]
    to_queue: deque[Request]
    expiries: deque[float]
    failure: str | None = None

    def check(self) -> None:
        """Raise a `RuntimeError` if a step failed, which ended some of the requests."""
        if self.failure is not None:
            raise RuntimeError(f"a step failed, which ended all requests in flight: {self.failure}")

    def time_out(self, scheduler: Scheduler) -> None:
        """End requests that the scheduler has had no room for, and that are overdue."""
        if not self.expiries or self.expiries[0] > (now := scheduler.clock()):
            return
        while self.expiries and self.expiries[0] <= now:
            self.expiries.popleft()
        for request in self.to_queue:
            if request.expiry is not None and request.expiry <= now and not request.is_finished:
                scheduler.time_out(request)

    def queue(self, scheduler: Scheduler) -> None:
        """Queue requests while the scheduler has room for them; those that have ended meanwhile are dropped."""
        while self.to_queue and ((request := self.to_queue[0]).is_finished or scheduler.has_room):
            if not request.is_finished:
                scheduler.add(request)
            self.to_queue.popleft()  # now that it is in flight: an interrupt must not lose it


@dataclass(slots=True, eq=False)
class _Caller:
    """A thread that waits for an answer, for which the leader asks between steps."""

    ask: Callable[[], Any]  # returns None as long as there is no answer
    woken: SimpleQueue[None] = field(default_factory=SimpleQueue)
    answer: Any = None
    errors: list[Exception] = field(default_factory=list)  # one, raised instead of an answer
    has_left: bool = False  # with an answer, or interrupted

    @property
    def is_answered(self) -> bool:
        return self.answer is not None or bool(self.errors)


class StepLoop:
    """Steps an engine for all threads that wait for it; there is no thread of its own.

    A caller without its answer **leads**: it steps. If another caller leads already, it sleeps. Between steps, the leader asks on
    behalf of all, and wakes those who have their answer. When it has its own, the next caller leads.

    To hand work to the leader, callers or requests to abort: store it, then try to become leader. A leader that steps down checks
    once more. So no work is missed, and nobody blocks on the lock, not even a finalizer inside a step.

    Args:
        engine: used through the loop only, while there are several threads.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = RLock()  # held by the leader
        self._life = finalize(self, _await_step, self._lock, os.getpid())
        self._leader: int | None = None  # the thread that holds the lock
        self._callers: dict[_Caller, None] = {}  # in order of arrival; the leader is among them
        self._runs: dict[_Run, None] = {}  # in flight; changed and read by the leader only
        self._abandoned: deque[_Run] = deque()  # whose callers have left
        self._failure: str | None = None  # why some work was not completed, which may have left the engine half changed

    def run(self, requests: Sequence[Request], find_news: Callable[[], T | None]) -> Generator[T]:
        """Queue requests, and between steps yield what ``find_news`` returns unless it is ``None``, until the iteration is closed.

        The requests that are unfinished then are aborted, at the latest after the step that runs.

        Args:
            requests: not queued yet; that is done as the waiting queue has room, and callers take turns.
            find_news: called between steps, perhaps by another thread; must not wait.

        Raises:
            ValueError: two of them have one id, or one has that of a request in flight; none has started then.
            RuntimeError: a step failed, which ended one of the requests. The thread that made the step gets the error itself.
            RuntimeError: as `between_steps`.
        """
        expiries = sorted(each.expiry for each in requests if each.expiry is not None)
        by_id = {each.request_id: each for each in requests}
        run, scheduler = _Run(requests, by_id, deque(requests), deque(expiries)), self.engine.scheduler

        def ask() -> T | None:
            if run not in self._runs:
                self._register(run)
            run.check()
            run.time_out(scheduler)
            run.queue(scheduler)
            return find_news()

        try:
            while True:
                yield self._wait(ask)
        finally:
            self._abandoned.append(run)  # in no function of its own: an interrupt may strike at the beginning of one
            self._hand_over()

    def _register(self, run: _Run) -> None:
        """Add a run to those in flight.

        Raises:
            ValueError: two of its requests have one id, or one has that of a request in flight.
        """
        if len(run.by_id) < len(run.requests):
            request_id = next(each.request_id for each in run.requests if run.by_id[each.request_id] is not each)
            raise ValueError(
                f"request_id={shown(request_id)} names two completions of the call: those after the first of a request have its id "
                f"with -1, -2, ... behind it; allowed is another one"
            )
        for other in self._runs:
            for request_id in [each for each in run.by_id if each in other.by_id]:
                if all(one.is_finished for one in other.by_id[request_id].family):
                    continue
                raise ValueError(f"request_id={shown(request_id)} is that of a request in flight: allowed is another one")
        self._runs[run] = None

    def between_steps(self, function: Callable[[], T]) -> T:
        """Call a function before the next step, perhaps in another thread, and return its result.

        Raises:
            RuntimeError: the caller is inside a step, or in a forked process, or the process ends.
        """
        return self._wait(lambda: (function(),))[0]

    def abort(self, request_ids: Collection[str] | None = None) -> int:
        """Abort requests by their ids, or all, with all their completions; return how many of them were unfinished.

        Raises:
            RuntimeError: as `between_steps`.
        """
        scheduler = self.engine.scheduler
        wanted = None if request_ids is None else {*request_ids}

        def abort_families() -> int:
            num_aborted = 0
            for run in self._runs:
                asked = dict[Request, str]()  # the first of each family, by which of its ids
                for request_id in run.by_id if wanted is None else run.by_id.keys() & wanted:
                    asked.setdefault(run.by_id[request_id].family[0], request_id)
                for first, request_id in asked.items():
                    unfinished = [each for each in first.family if not each.is_finished]
                    for each in unfinished:
                        scheduler.abort(each, "abort_all() was called" if wanted is None else f"abort({request_id!r}) was called")
                    num_aborted += bool(unfinished)
            return num_aborted

        return self.between_steps(abort_families)

    def metrics(self) -> EngineMetrics:
        """Return the engine's metrics; requests that its scheduler has no room for yet count as waiting."""

        def measure() -> EngineMetrics:
            num_held = sum(not each.is_finished for run in self._runs for each in run.to_queue)
            metrics = self.engine.metrics()
            return replace(metrics, num_waiting=metrics.num_waiting + num_held)

        return self.between_steps(measure)

    def check_caller(self) -> None:
        """Refuse a caller that would wait forever.

        Raises:
            RuntimeError: as `between_steps`.
        """
        check_process()
        if self._leader == get_ident():
            raise RuntimeError(
                "an LLM cannot be called from inside its own step, by a logits processor, an observer or a drafter: call it "
                "when generate() has returned, or between the outputs of stream()"
            )
        if not self._life.alive and not current_thread().daemon:  # daemon threads sleep until they are gone
            raise RuntimeError("an LLM cannot be called while its process ends, by a function of atexit: call it before")

    def _wait(self, ask: Callable[[], T | None]) -> T:
        """Return the first answer of ``ask`` that is not ``None``; step meanwhile, unless another thread does."""
        self.check_caller()
        caller = _Caller(ask)
        try:
            while not caller.is_answered:
                self._callers[caller] = None  # again, if another thread was interrupted while it put this one last
                if not self._lead(lambda: self._step_for(caller)):
                    with suppress(Empty):
                        caller.woken.get(timeout=PATIENCE_S)
        finally:
            caller.has_left = True
            self._callers.pop(caller, None)
            self._hand_over()
        if caller.errors:
            raise caller.errors.pop()  # kept there, it would be in a cycle: its traceback has the caller, and the engine
        answer: T = caller.answer
        return answer

    def _lead(self, work: Callable[[], None]) -> bool:
        """Lead, do some work and return True; or return False, since another thread leads, or this one already."""
        own = get_ident()
        if self._leader == own:
            return False
        try:
            if not self._lock.acquire(blocking=False):
                return False
            self._leader = own
            self._do(work)
        finally:  # no call comes before the release: interrupts strike after calls, and may hide whether the lock was acquired
            if self._leader == own:
                self._leader = None
            try:  # noqa: SIM105 - that would be a call
                self._lock.release()
            except RuntimeError:  # the lock is another thread's
                pass
        return True

    def _do(self, work: Callable[[], None]) -> None:
        """Do work as the leader; if it fails or is interrupted, the next leader ends all requests first: it is half done."""
        if self._failure is not None:
            in_flight = {*self.engine.scheduler.in_flight}
            for run in self._runs:
                if not in_flight.isdisjoint(run.requests):
                    run.failure = self._failure
            self.engine.end_all(self._failure)
        self._failure = "it was interrupted"
        try:
            work()
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._failure = None

    def _step_for(self, own: _Caller) -> None:
        """Step until there is an answer for a caller, or the process ends; wake the others when there is an answer for them."""
        while self._life.alive:
            self._abort_abandoned()
            has_answered = False
            for caller in tuple(self._callers):
                try:
                    if not caller.is_answered:  # by a leader who was interrupted before it woke the caller
                        caller.answer = caller.ask()
                except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
                    caller.errors.append(error)
                if caller.is_answered:
                    self._callers.pop(caller, None)
                    caller.woken.put(None)
                    has_answered = True
            if own.is_answered:
                return
            if has_answered and not self.engine.scheduler.has_unfinished:
                continue  # one of them may have ended what another waits for
            first, *_ = tuple(self._callers)  # a copy: other threads come and leave
            self._put_last(first)  # another one is asked first next time, and may queue its requests
            if not self.engine.scheduler.has_unfinished:
                raise RuntimeError("a request is neither waiting nor running: it cannot be finished")
            self.engine.step()

    def _put_last(self, caller: _Caller) -> None:
        self._callers.pop(caller, None)
        self._callers[caller] = None
        if caller.has_left:  # just now, in its own thread
            self._callers.pop(caller, None)

    def _abort_abandoned(self) -> None:
        """Abort the requests that nobody waits for; those of a run that was refused were never in flight."""
        while self._abandoned:
            run = self._abandoned[0]
            if run in self._runs:
                for request in run.requests:
                    if not request.is_finished:
                        self.engine.scheduler.abort(request)
                del self._runs[run]
            self._abandoned.popleft()  # now that this is done: an interrupt must not lose it

    def _hand_over(self) -> None:
        """Unless another thread leads, do what was left for a leader, and wake the caller that leads next.

        Never waits: finalizers call it, at any time, in any thread, and inside a step.
        """
        try:
            while (self._abandoned or self._failure is not None) and self._lead(self._abort_abandoned):
                pass
        finally:
            if self._leader is None:
                for caller in tuple(self._callers)[:1]:
                    caller.woken.put(None)


def _await_step(lock: Any, process: int) -> None:
    """Wait for the step that runs: at the end of the process, which would abort beneath the step of a daemon thread.

    A process that is forked beside a step has no thread that would release the lock.
    """
    lock.acquire(blocking=os.getpid() == process)
