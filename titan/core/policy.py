"""The seam of scheduling policies: which request starts next, whose prompt is computed first, and which request gives way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from titan.core.request import Request


class SchedulingPolicy(Protocol):
    """Orders the waiting requests of one engine, and chooses among the running ones where blocks are scarce.

    It keeps the waiting requests in a structure of its own: a step may not cost more, the more of them there are. ``now`` is in
    seconds of the scheduler's clock, which is that of ``request.metrics.arrival_time``. A request that the policy puts first and
    that does not fit is waited for; none is passed over. A subclass need not have `serve` and `end`, nor `displaceable` where
    nobody gives way to a waiting request, nor `prefill_order` where prompts are computed in the order of their start.

    An error of `add` ends a new request, one of `serve` a completion that starts with the prompt of a sibling that has just ended,
    one of `remove` or `end` none if the request has ended; any other one fails the step.

    When a step has failed, or was interrupted, all requests end: `remove` is called for those that wait, and `end` for all. For the
    request at which this struck, the policy may have had these calls already, or not yet `add`: errors that it raises are ignored.
    """

    name: str

    @abstractmethod
    def add(self, request: Request) -> None:
        """Note that a request waits, a new one or, if ``request.metrics.num_preemptions``, one that was preempted."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Note that a waiting request waits no more: it starts, unless ``request.is_finished``, for it was aborted or failed."""

    @abstractmethod
    def first(self, now: float) -> Request:
        """Return the waiting request that starts next; there is at least one."""

    def serve(self, request: Request, num_prompt_tokens: int, num_output_tokens: int) -> None:  # noqa: ARG002
        """Note that a request is given these many tokens more.

        Its prompt counts at once when it first starts, without tokens found in a cache.
        """
        return  # else type checkers take this for abstract

    def end(self, request: Request) -> None:  # noqa: ARG002
        """Note that a request, which waits no more, has finished, was aborted or failed.

        It may be called twice for a request, if its end failed or was interrupted.
        """
        return

    def prefill_order(self, prefills: Sequence[Request], now: float) -> Sequence[Request]:  # noqa: ARG002
        """Return running requests whose prompts are being computed in the order in which they get tokens of the step.

        Args:
            prefills: at least two, in order of their start. Each leaves at least half of what is left to those after it, as far as
                they want that, unless its prompt is complete with the step.
            now: as above.
        """
        return prefills

    @abstractmethod
    def victim(self, running: Sequence[Request], now: float) -> Request:
        """Return the running request to preempt for lack of KV blocks; ``running`` has at least one, in order of their start."""

    def displaceable(self, request: Request, running: Sequence[Request], now: float) -> Sequence[Request]:  # noqa: ARG002
        """Return the running requests that may be preempted for the first waiting one, in the order in which they would be."""
        return ()
