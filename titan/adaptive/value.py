"""What drafts are worth: estimates of acceptance, of each request and of all.

A request's own drafts count as far as requests differ: credibility, Bühlmann and Straub, "Glaubwürdigkeit für Schadensätze", 1970.
With x_i the mean of w_i drafts of request i, s² the variance of one draft and t² the variance between requests::

    acceptance_i = (w_i * x_i + k * mean) / (w_i + k)      k = s² / t²
    mean = sum(w_i / (w_i + k) * x_i) / sum(w_i / (w_i + k))

so that a request that drafts all the time counts no more in the mean than one that does not. The last drafts of all requests take
part as one more of them, and so do the last requests that have left: there is something to go by when all are new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from operator import mul
from typing import NamedTuple

from titan.core.draft_history import AcceptanceCounts

STRENGTH, STRENGTH_DRAFTS = 10.0, 8.0
"""k until requests have drafted, and the number of drafts after which this counts half."""

AGREEMENT_NODES = 2.0
"""Number of nodes that the agreement of all counts as in that of one request."""

NUM_PAST = 16
"""Number of requests that have left and still tell of others."""

YIELD_PRIOR, YIELD_MEMORY = 16.0, 127 / 128
"""Tokens that drafting counts as having brought, as planned, beside what was seen; and the share of that which a step leaves,
with drafts or without."""


class Estimates(NamedTuple):
    """Probabilities that the first child of a root is accepted, and what they go by."""

    means: Sequence[float]  # of each request
    bounds: Sequence[float]  # a standard error higher
    agreements: Sequence[float]  # of each request: accepted nodes as a multiple of those that the draft expects; at most 1


@dataclass(slots=True)
class PastRequests:
    """What requests that have left showed."""

    last: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_PAST))  # drafts and acceptance of each
    _present: Sequence[AcceptanceCounts] = ()

    def follow(self, present: Sequence[AcceptanceCounts], agreement: float) -> None:
        """Add the requests that have left.

        Args:
            present: counts of those that are there now.
            agreement: of all requests.
        """
        staying = set(map(id, present))
        for counts in self._present:
            if id(counts) not in staying and counts.num_drafts:
                self.last.append((counts.num_drafts, own_acceptance(counts, agreement)))
        self._present = present


class Yield:
    """What drafting brings for its time, as a multiple of what the chains that were planned would have brought for theirs.

    Siblings are accepted, too; growth ends where the draft is unsure, and does not where it is sure. A **return** is tokens that
    drafts bring, over the seconds that a step is expected to take longer with them.
    """

    def __init__(self) -> None:
        self._num_accepted = self._num_promised = 0.0

    @property
    def factor(self) -> float:
        """Return that was seen, as a multiple of that which was planned."""
        return (YIELD_PRIOR + self._num_accepted) / (YIELD_PRIOR + self._num_promised)

    def note(self, num_accepted: int, num_promised: float, num_steps: int = 1) -> None:
        """Add steps.

        Args:
            num_accepted: draft tokens.
            num_promised: those that the planned return would have brought in the time that drafting took.
            num_steps: number of the steps.
        """
        memory = YIELD_MEMORY**num_steps
        self._num_accepted = memory * self._num_accepted + num_accepted
        self._num_promised = memory * self._num_promised + num_promised

    def fade(self, num_steps: int) -> None:
        """After steps without drafts, let it count less that drafting brought less than planned. If it brought more, that stays."""
        if self._num_accepted < self._num_promised:
            self._num_accepted *= YIELD_MEMORY**num_steps
            self._num_promised *= YIELD_MEMORY**num_steps


def own_acceptance(counts: AcceptanceCounts, agreement: float) -> float:
    """Return the acceptance that a request's own drafts show.

    Args:
        counts: of the request.
        agreement: of all requests.
    """
    return min(1.0, counts.confidence * _agreement(counts, agreement))


def estimate(fleet: AcceptanceCounts, past: PastRequests, requests: Sequence[AcceptanceCounts]) -> Estimates:
    """Estimate the acceptance of requests.

    Args:
        fleet: counts of the last drafts of all requests.
        past: requests that have left.
        requests: counts of those to estimate, at least one.
    """
    n, agreement = len(requests), fleet.agreement
    drafts = [*[each.num_drafts for each in requests], *[count for count, _ in past.last]]
    own = [*[own_acceptance(each, agreement) for each in requests], *[shown for _, shown in past.last]]
    k = _strength(drafts, own)
    shares = [count / (count + k) for count in (*drafts, fleet.num_drafts)]
    mean = sum(map(mul, shares, (*own, own_acceptance(fleet, agreement)))) / sum(shares)
    means = [share * shown + (1 - share) * mean for share, shown in zip(shares[:n], own[:n], strict=True)]
    seen = 1 + min(fleet.num_drafts, k)
    bounds = [_bound(p, seen + each.num_drafts) for p, each in zip(means, requests, strict=True)]
    agreements = [min(1.0, _agreement(each, agreement)) for each in requests]
    return Estimates(means, bounds, agreements)


def _bound(mean: float, num_seen: float) -> float:
    """Return an acceptance that is a standard error higher."""
    return min(1.0, mean + sqrt(mean * (1 - mean) / num_seen))


def _agreement(counts: AcceptanceCounts, agreement: float) -> float:
    return (counts.num_accepted + AGREEMENT_NODES * agreement) / (counts.num_expected + AGREEMENT_NODES)


def _strength(drafts: Sequence[float], own: Sequence[float]) -> float:
    """Return k: the moments' estimate of t², with a prior."""
    total = sum(drafts)
    if not total:
        return STRENGTH
    mean: float = sum(map(mul, drafts, own)) / total
    variance = max(mean * (1 - mean), 1e-3)
    between = sum([count * (shown - mean) ** 2 for count, shown in zip(drafts, own, strict=True)])
    between -= (len(drafts) - drafts.count(0.0) - 1) * variance
    information: float = total - sum(map(mul, drafts, drafts)) / total
    return variance * (information + STRENGTH_DRAFTS) / (max(between, 0.0) + STRENGTH_DRAFTS * variance / STRENGTH)
