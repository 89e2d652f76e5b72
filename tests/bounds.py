"""The bounds that the policies state, held against what a server does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from titan.core.request import Request
from titan.schedule.policies.priority import AGED_TURN


class FairnessWatch:
    """How far the service of two users, over their weights, has drifted apart at most while both had waiting requests."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = weights
        self.largest_gap = 0.0
        self._since = dict[tuple[str, str], list[float]]()

    def note(self, before: Mapping[str, float], after: Mapping[str, float], waiting: Iterable[Request]) -> None:
        """After a step, with the service of each user before and after it."""
        users = {request.terms.user for request in waiting}
        for pair in combinations(self.weights, 2):
            if not users.issuperset(pair):
                self._since.pop(pair, None)
                continue
            first, second = ({user: service[user] / self.weights[user] for user in pair} for service in (before, after))
            differences = self._since.setdefault(pair, [first[pair[0]] - first[pair[1]]])
            differences.append(second[pair[0]] - second[pair[1]])
            self.largest_gap = max(self.largest_gap, max(differences) - min(differences))


class AgeingWatch:
    """By how many starts an aged request waited longer than it should, at most."""

    def __init__(self, ageing_s: float) -> None:
        self.ageing_s = ageing_s
        self.worst_excess = 0
        self._allowed = dict[Request, int]()  # starts in all by which a request should have started, or started again
        self._num_preemptions = dict[Request, int]()

    def note(self, waiting: Sequence[Request], num_starts: int, now: float) -> None:
        """Before each step; it is told of what waits, in any order, and how many requests have ever started."""
        ordered = sorted(waiting, key=lambda request: request.metrics.arrival_time)
        back = [each for each in waiting if self._num_preemptions.get(each, 0) < each.metrics.num_preemptions]
        for request in back:
            self._num_preemptions[request] = request.metrics.num_preemptions
            self._allowed.pop(request, None)
        self._allowed = {request: allowed for request, allowed in self._allowed.items() if request in waiting}
        for request, allowed in self._allowed.items():
            self.worst_excess = max(self.worst_excess, num_starts - allowed)
            came_before = [each for each in back if each.metrics.arrival_time <= request.metrics.arrival_time]
            self._allowed[request] += AGED_TURN * len(came_before)
        for k, request in enumerate(ordered):
            if request not in self._allowed and now - request.metrics.arrival_time >= self.ageing_s:
                self._allowed[request] = num_starts + AGED_TURN * (k + 1)
