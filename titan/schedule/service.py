"""A log of the service that requests got: tokens by user, and the time until they started."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, MutableMapping

from titan.core.metrics import UserMetrics
from titan.core.request import Request

MAX_USERS = 1000
"""Maximum users in the log; the one whose requests started or ended least recently is forgotten first."""

MAX_STARTS = 1024
"""Maximum requests whose time in the queue is in the log: the last ones that started."""


class ServiceLog:
    """Counts tokens by user when requests start and end, not in every step."""

    def __init__(self) -> None:
        self.queue_s: deque[float] = deque(maxlen=MAX_STARTS)  # from arrival to start
        self._users: OrderedDict[str | None, UserMetrics] = OrderedDict()  # without the output of requests in flight

    def start(self, request: Request, num_prompt_tokens: int, now: float) -> None:
        """Note that a request starts for the first time, with this many tokens of its prompt to compute."""
        self.queue_s.append(now - request.metrics.arrival_time)
        self._add(request.terms.user, num_prompt_tokens, 0)

    def end(self, request: Request) -> None:
        if request.metrics.first_scheduled_time is not None:
            self._add(request.terms.user, 0, request.num_output_tokens)

    def users(self, in_flight: Iterable[Request]) -> dict[str | None, UserMetrics]:
        """Return the tokens that each user was given.

        Args:
            in_flight: the requests that wait or run; their output so far counts as well.
        """
        found = dict(self._users)
        for request in in_flight:
            _add_tokens(found, request.terms.user, 0, request.num_output_tokens)
        return found

    def _add(self, user: str | None, num_prompt_tokens: int, num_output_tokens: int) -> None:
        _add_tokens(self._users, user, num_prompt_tokens, num_output_tokens)
        self._users.move_to_end(user)
        if len(self._users) > MAX_USERS:
            self._users.popitem(last=False)


def _add_tokens(users: MutableMapping[str | None, UserMetrics], user: str | None, num_prompt: int, num_output: int) -> None:
    before = users.get(user, UserMetrics(0, 0))
    users[user] = UserMetrics(before.num_prompt_tokens + num_prompt, before.num_output_tokens + num_output)
