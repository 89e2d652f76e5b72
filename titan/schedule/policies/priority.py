"""The policy "priority": requests start by class and deadline, with ageing."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from titan.core.checks import check_number
from titan.core.policy import SchedulingPolicy
from titan.core.request import Request
from titan.core.terms import PRIORITIES
from titan.schedule.heap import Heap

AGED_TURN = 4
"""Number of starts of which one is the oldest request's, if that has aged."""

_RANKS = {priority: rank for rank, priority in enumerate(PRIORITIES)}


class PriorityPolicy(SchedulingPolicy):
    """Requests start by class, then by deadline, then those with the least work left, then in order of arrival.

    Work is in tokens: those to compute again or for the first time, and those that may still be emitted. A request has **aged**
    when ``ageing_s`` have passed since it arrived. Every fourth start (`AGED_TURN`) is the oldest request's if it has aged,
    whatever its class: so one that has aged is, at the latest, among the next ``4 * (k + 1)`` starts, where ``k`` requests that
    arrived before it wait or are preempted meanwhile.

    A critical request that finds the batch or the KV cache full takes the place of running requests of the batch class, each of
    which gives way at most once, and not when it has aged; so does an aged one whose turn comes before that of a critical one.
    Prompts get tokens of a step in that order, those of aged requests first. Where running requests lack blocks, the one that is
    least in the order gives way; aged ones are the last to.

    Args:
        ageing_s: seconds, at least 0; with 0, every fourth start is the oldest request's.

    Raises:
        ValueError: ``ageing_s`` is negative or not finite.
    """

    name = "priority"

    def __init__(self, ageing_s: float = 60.0) -> None:
        self.ageing_s = check_number("ageing_s", ageing_s, low=0.0)
        self._by_key: Heap[Request] = Heap()
        self._by_age: Heap[Request] = Heap()
        self._num_starts = 0  # since the last one that was the oldest's turn

    def add(self, request: Request) -> None:
        self._by_key.push(request, _key(request))
        self._by_age.push(request, request.metrics.arrival_time)

    def remove(self, request: Request) -> None:
        self._by_key.discard(request)
        self._by_age.discard(request)
        if not request.is_finished:
            self._num_starts = (self._num_starts + 1) % AGED_TURN

    def first(self, now: float) -> Request:
        if self._num_starts == AGED_TURN - 1:
            oldest, _ = self._by_age.top()
            if self._has_aged(oldest, now):
                return oldest
        return self._by_key.top()[0]

    def prefill_order(self, prefills: Sequence[Request], now: float) -> Sequence[Request]:
        return sorted(prefills, key=lambda request: self._importance(request, now))

    def victim(self, running: Sequence[Request], now: float) -> Request:
        return max(running, key=lambda request: self._importance(request, now))

    def displaceable(self, request: Request, running: Sequence[Request], now: float) -> Sequence[Request]:
        if "critical" not in (request.terms.priority, self._by_key.top()[0].terms.priority):
            return ()
        batch = [
            each
            for each in running
            if each.terms.priority == "batch" and not each.metrics.num_preemptions and not self._has_aged(each, now)
        ]
        return sorted(batch, key=_key, reverse=True)

    def _importance(self, request: Request, now: float) -> tuple[bool, tuple[int, float, int, float]]:
        return not self._has_aged(request, now), _key(request)

    def _has_aged(self, request: Request, now: float) -> bool:
        return now - request.metrics.arrival_time >= self.ageing_s


def _key(request: Request) -> tuple[int, float, int, float]:
    """Return the key that orders requests, the most important first: class, deadline, work left, arrival."""
    terms, arrival = request.terms, request.metrics.arrival_time
    deadline = inf if terms.deadline_s is None else arrival + terms.deadline_s
    work = request.num_uncomputed_tokens + request.num_remaining_tokens
    return _RANKS[terms.priority], deadline, work, arrival
