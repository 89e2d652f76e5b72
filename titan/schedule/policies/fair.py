"""Fair shares of the service for users: the virtual token counter."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

from titan.core.checks import check_number, check_text, shown
from titan.core.policy import SchedulingPolicy
from titan.core.request import Request
from titan.schedule.heap import Heap


class FairPolicy(SchedulingPolicy):
    """The waiting request of the user who was given the least service, in order of arrival, starts next.

    This is the virtual token counter of Sheng et al., "Fairness in serving large language models" (OSDI 2024). A user's service is
    the weighted number of tokens, of prompts when they first start and of output when it is emitted, over the user's weight.
    Whoever comes to have waiting requests is lifted to the least counter of those who have, or of the last who had: no credit is
    saved up while not asking.

    While two users both have waiting requests, the service that they are given (over their weights) differs by at most ``2 * U``,
    with ``U = (prompt_weight * P + output_weight * R) / w``: ``P`` is the longest prompt, ``R`` the most output tokens that
    requests running at once may emit, at most ``max_batch_size`` times the largest ``max_tokens``, and ``w`` the least weight of a
    user. The difference of their counters is at most ``U``. (A counter that is ahead belongs to a user whose request started when
    it was the least; what has come since is that request's prompt, and output of requests that run at once.)

    Where running requests lack blocks, the latest of the user who was given most gives way. Nobody gives way to a waiting request.

    Args:
        weights: shares of users by name, numbers above 0; 1 for those who are not named, and for requests without a user.
        prompt_weight: of a prompt token, at least 0.
        output_weight: of an output token, above 0.

    Raises:
        ValueError: a weight is not allowed.
    """

    name = "fair"

    def __init__(
        self, weights: Mapping[str, float] | None = None, *, prompt_weight: float = 1.0, output_weight: float = 2.0
    ) -> None:
        if not isinstance(weights, Mapping | None):
            raise ValueError(f"weights={shown(weights)} is not allowed: it must be a dict of users to numbers, or None")
        self._weights = {
            check_text("user in weights", user): check_number(f"weights[{user!r}]", weight, low=0.0, open_low=True)
            for user, weight in (weights or {}).items()
        }
        self.prompt_weight = check_number("prompt_weight", prompt_weight, low=0.0)
        self.output_weight = check_number("output_weight", output_weight, low=0.0, open_low=True)
        self._service = defaultdict[str | None, float](float)  # over the weight; of idle users, only while above the least
        self._waiting: dict[str | None, OrderedDict[Request, None]] = {}  # by user, for users who have some
        self._backlogged: Heap[str | None] = Heap()  # the same users by their service, which may have grown since
        self._last: str | None = None  # the last user whose requests stopped waiting
        self._least = 0.0  # service of a backlogged user, or of the last one; never falls
        self._in_flight = defaultdict[str | None, set[Request]](set)  # by user
        self._idle: Heap[str | None] = Heap()  # users without requests, by service

    def add(self, request: Request) -> None:
        user, is_new = request.terms.user, not request.metrics.num_preemptions
        if is_new:
            self._in_flight[user].add(request)
            self._idle.discard(user)
        if user not in self._waiting:
            if self._waiting:
                self._find_least()
            else:
                self._least = max(self._least, self._service.get(self._last, 0.0))
            self._forget_idle()
            self._service[user] = max(self._service[user], self._least)
            self._waiting[user] = OrderedDict()
            self._backlogged.push(user, self._service[user])
        self._waiting[user][request] = None
        if not is_new:
            self._waiting[user].move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        user = request.terms.user
        waiting = self._waiting.get(user, OrderedDict())
        waiting.pop(request, None)
        if not waiting:
            self._waiting.pop(user, None)
            self._backlogged.discard(user)
            self._last = user

    def first(self, now: float) -> Request:  # noqa: ARG002
        return next(iter(self._waiting[self._find_least()]))

    def serve(self, request: Request, num_prompt_tokens: int, num_output_tokens: int) -> None:
        user = request.terms.user
        tokens = self.prompt_weight * num_prompt_tokens + self.output_weight * num_output_tokens
        self._service[user] += tokens / self._weights.get(user, 1.0)

    def end(self, request: Request) -> None:
        user = request.terms.user
        self._in_flight[user].discard(request)
        if not self._in_flight[user]:
            del self._in_flight[user]
            self._idle.push(user, self._service[user])

    def victim(self, running: Sequence[Request], now: float) -> Request:  # noqa: ARG002
        return max(reversed(running), key=lambda request: self._service[request.terms.user])

    def _find_least(self) -> str | None:
        """Return the user of the least service among those who have waiting requests; there must be one."""
        user, service = self._backlogged.top()
        while service < self._service[user]:
            self._backlogged.push(user, self._service[user])
            user, service = self._backlogged.top()
        self._least = service
        return user

    def _forget_idle(self) -> None:
        """Forget idle users who would be lifted to the least service anyway, so that memory does not grow with every user ever."""
        while self._idle:
            user, service = self._idle.top()
            if service > self._least:
                return
            self._idle.discard(user)
            del self._service[user]
