"""What drafts are worth: estimates of acceptance, of each request and of the fleet.

A request's own observations count as far as requests differ (Bühlmann and Straub, "Glaubwürdigkeit für Schadensätze", 1970): with
x_i the mean of w_i observations of request i, s² the variance of an observation and t² the variance between requests::

    acceptance_i = (w_i * x_i + k * mean) / (w_i + k)      k = s² / t²
    mean = sum(w_i / (w_i + k) * x_i) / sum(w_i / (w_i + k))

The fleet's history takes part as one more request, so that there is something to go by when all of them are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from titan.core.draft_history import AcceptanceCounts

STRENGTH = 2.0
"""Observations that the fleet counts as for each request, until it is known how far requests differ."""

STRENGTH_WEIGHT = 8.0
"""Observations after which this is known half."""


class FleetEstimate(NamedTuple):
    """What is to be expected of a request before it has drafted."""

    mean: float  # acceptance
    strength: float  # number of own observations that count as much
    agreement: float  # accepted nodes as a multiple of those that the draft expects

    def agreement_of(self, counts: AcceptanceCounts) -> float:
        """Return accepted first children as a multiple of those that the draft expects, after a request's counts; at most 1."""
        return min(1.0, (counts.num_accepted + STRENGTH * self.agreement) / (counts.num_expected + STRENGTH))

    def acceptance_of(self, counts: AcceptanceCounts) -> float:
        """Return the probability that the first child of a root is accepted, after a request's counts."""
        weight = _weight(counts)
        return (weight * _own(counts, self.agreement) + self.strength * self.mean) / (weight + self.strength)


def estimate_fleet(fleet: AcceptanceCounts, requests: Sequence[AcceptanceCounts]) -> FleetEstimate:
    """Estimate what requests have in common.

    Args:
        fleet: of all requests ever.
        requests: of those that are there.
    """
    observed = [(_weight(each), _own(each, fleet.agreement)) for each in (fleet, *requests)]
    own = observed[1:]
    total = sum(weight for weight, _ in own)
    strength = STRENGTH
    if total:
        mean = sum(weight * value for weight, value in own) / total
        variance = max(mean * (1 - mean), 1e-3)
        between = sum(weight * (value - mean) ** 2 for weight, value in own) - (sum(weight > 0 for weight, _ in own) - 1) * variance
        information = total - sum(weight**2 for weight, _ in own) / total
        strength = variance * (information + STRENGTH_WEIGHT) / (max(between, 0.0) + STRENGTH_WEIGHT * variance / STRENGTH)
    shares = [weight / (weight + strength) for weight, _ in observed]
    mean = sum(share * value for share, (_, value) in zip(shares, observed, strict=True)) / sum(shares)
    return FleetEstimate(mean, strength, fleet.agreement)


def _weight(counts: AcceptanceCounts) -> float:
    return max(counts.num_drafts, counts.num_expected)


def _own(counts: AcceptanceCounts, agreement: float) -> float:
    """Return the acceptance that a request's own observations show, with one of the fleet's."""
    return counts.confidence * min(1.0, (counts.num_accepted + agreement) / (counts.num_expected + 1))
