"""Serving requests that arrive at their own times, and what that says about load: latencies, goodput, saturation.

An engine is saturated where its queue grows by more than chance explains while the second half of the requests arrives: by more
than a tenth of them and two standard deviations. The numbers in flight at two moments are taken as Poisson distributed, with one
more than those at the first moment as their mean (one more, so that an engine idle just then has some noise as well); each has
this mean as its variance, times the gaps' coefficient of variation where that is above 1, because bursts vary more.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, pstdev
from typing import Protocol

from titan.bench.profiling import greedy_params

from titan.core.request import Request
from titan.frontend import FrontEnd

TOLERATED_GROWTH = 0.1
"""Share of the second half of the requests by which the queue may grow, noise apart."""

NUM_DEVIATIONS = 2.0
"""Standard deviations of the queue's own noise by which it may grow on top."""

ATTAINED = 0.9
"""Share of requests within the service-level target from which a rate counts as served well."""


class Clock(Protocol):
    """Seconds that pass, and waiting for them."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and when it arrives, in seconds after the first."""

    time: float
    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What a client saw of a request; times in seconds since the first arrival, at the end of the engine's steps."""

    arrival: float
    first_token: float
    finished: float
    num_tokens: int

    @property
    def to_first_token(self) -> float:
        return self.first_token - self.arrival

    @property
    def between_tokens(self) -> float | None:
        """Mean time between two tokens after the first; ``None`` for a single token."""
        return (self.finished - self.first_token) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def latency(self) -> float:
        return self.finished - self.arrival


@dataclass(frozen=True, slots=True)
class Target:
    """A service-level target.

    Raises:
        ValueError: a limit is not positive.
    """

    first_token: float  # most seconds to the first token
    between_tokens: float  # most seconds between two tokens, on average over a request

    def __post_init__(self) -> None:
        if not (self.first_token > 0 and self.between_tokens > 0):
            raise ValueError(f"a target of {self.first_token} s and {self.between_tokens} s is not allowed: both must be above 0")

    def is_met(self, times: RequestTimes) -> bool:
        """Whether a request was served within the target."""
        return times.to_first_token <= self.first_token and (times.between_tokens or 0.0) <= self.between_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """How an engine bore a stream of requests; rates per second, over the time from the first arrival to the last token."""

    seconds: float
    requests_per_second: float
    tokens_per_second: float
    goodput: float  # requests within the target per second (Zhong et al., "DistServe", 2024)
    attainment: float  # share of requests within the target
    following: float | None  # finished over arrived, while the second half arrives; None for a single request
    num_left: int  # requests in the engine when the last one arrives
    excess: float | None  # requests by which its queue grew beyond what is tolerated; above 0 it is saturated; None: not known


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sweep over rates finds; ``None`` where no rate was so."""

    followed_up_to: float | None  # rates up to here were all followed
    saturated_from: float | None  # the first rate at which the queue grew by more than chance explains
    well_served_up_to: float | None  # rates up to here had `ATTAINED` of the requests within the target


def serve(frontend: FrontEnd, arrivals: Sequence[TimedRequest], *, use_speculative: bool, clock: Clock) -> list[RequestTimes]:
    """Step an idle engine through a stream of requests: each is added when its time has come, whatever the engine is doing.

    Temperature 0, and the end of sequence is ignored. A request that comes during a step waits for its end, which its latency
    counts.

    Args:
        frontend: of an engine that takes as many waiting requests as there are.
        arrivals: in the order of their times, at least one.
        use_speculative: whether the engine may draft.
        clock: of the arrivals and of what is measured.

    Returns:
        The times of the requests, in the order of the arrivals.

    Raises:
        RuntimeError: a request was ended before it had its tokens.
    """
    engine = frontend.engine
    to_come = deque(
        (each.time, frontend.make_request(each.prompt, greedy_params(each.output_len, use_speculative=use_speculative)))
        for each in arrivals
    )
    requests = [request for _, request in to_come]
    first_tokens: dict[Request, float] = {}
    finished: dict[Request, float] = {}
    start = clock.now() - arrivals[0].time
    while len(finished) < len(requests):
        now = clock.now() - start
        while to_come and to_come[0][0] <= now:
            engine.scheduler.add(to_come.popleft()[1])
        if not engine.scheduler.has_unfinished:
            clock.sleep(to_come[0][0] - now)
            engine.scheduler.add(to_come.popleft()[1])  # its time has come, whatever rounding says
        changed = engine.step()
        now = clock.now() - start
        for request in changed:
            if request.error is not None:
                raise RuntimeError(f"request {request.request_id} ended early: {request.error}")
            first_tokens.setdefault(request, now)
            if request.is_finished:
                finished[request] = now
    return [
        RequestTimes(each.time, first_tokens[request], finished[request], request.num_output_tokens)
        for each, request in zip(arrivals, requests, strict=True)
    ]


def measure_load(times: Sequence[RequestTimes], target: Target) -> Load:
    """Sum a stream up.

    Args:
        times: of its requests, in the order of their arrivals, at least one.
        target: what good service is.
    """
    first, last = times[0].arrival, times[-1].arrival
    num_late = len(times) // 2
    middle = times[-num_late - 1].arrival
    num_finished = sum(middle < each.finished <= last for each in times)
    num_good = sum(map(target.is_met, times))
    seconds = max(each.finished for each in times) - first
    return Load(
        seconds,
        requests_per_second=len(times) / seconds,
        tokens_per_second=sum(each.num_tokens for each in times) / seconds,
        goodput=num_good / seconds,
        attainment=num_good / len(times),
        following=num_finished / num_late if num_late else None,
        num_left=sum(each.finished > last for each in times),
        excess=excess_growth(times),
    )


def excess_growth(times: Sequence[RequestTimes]) -> float | None:
    """Requests by which the queue grows, while the second half arrives, beyond a tenth of them and two standard deviations.

    Args:
        times: of the requests, in the order of their arrivals, at least one.

    Returns:
        Above 0 if the engine is saturated, by the rule above. ``None`` if the stream is too short to say: the first request is
        still there when the second half begins, so that the queue would grow in any engine.
    """
    num_late = len(times) // 2
    middle, last = times[-num_late - 1].arrival, times[-1].arrival
    if times[0].finished > middle:
        return None
    before, after = (sum(each.arrival <= moment < each.finished for each in times) for moment in (middle, last))
    gaps = [right.arrival - left.arrival for left, right in pairwise(times)]
    variation = max(1.0, pstdev(gaps) / mean(gaps))
    return after - before - TOLERATED_GROWTH * num_late - NUM_DEVIATIONS * math.sqrt(2 * (before + 1) * variation)


def find_limits(loads: Iterable[tuple[float, float | None, float]]) -> Limits:
    """Find where an engine stops following.

    Args:
        loads: rate, growth of the queue beyond what is tolerated (``None``: not known), and attainment, in any order.
    """
    followed: float | None = None
    is_followed = True
    saturated: float | None = None
    well_served: float | None = None
    is_well_served = True
    for rate, excess, attainment in sorted(loads, key=lambda each: each[0]):
        is_followed = is_followed and excess is not None and excess <= 0
        followed = rate if is_followed else followed
        if saturated is None and excess is not None and excess > 0:
            saturated = rate
        is_well_served = is_well_served and attainment >= ATTAINED
        well_served = rate if is_well_served else well_served
    return Limits(followed, saturated, well_served)


def round_rate(rate: float) -> float:
    """Two significant digits, which is all that a rate of a sweep needs."""
    return round(rate, 1 - math.floor(math.log10(rate)))
