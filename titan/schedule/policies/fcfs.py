"""First come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from titan.core.policy import SchedulingPolicy
from titan.core.request import Request


class FcfsPolicy(SchedulingPolicy):
    """Requests start in order of arrival; the latest is preempted, and starts first again."""

    name = "fcfs"

    def __init__(self) -> None:
        self._waiting: OrderedDict[Request, None] = OrderedDict()

    def add(self, request: Request) -> None:
        self._waiting[request] = None
        if request.metrics.num_preemptions:
            self._waiting.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        del self._waiting[request]

    def first(self, now: float) -> Request:  # noqa: ARG002
        return next(iter(self._waiting))

    def victim(self, running: Sequence[Request], now: float) -> Request:  # noqa: ARG002
        return running[-1]
