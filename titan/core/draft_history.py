"""Statistics of a request's verifications so far, from which its next draft is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from math import exp
from operator import mul

LONGEST_MEMORY = 0.97
"""Largest weight of the past in an average: the weight grows with the number of observations, up to about thirty."""

PRIOR_ACCEPTANCE = (0.75, 0.12, 0.06, 0.03)
"""Initial acceptance by sibling rank: the share of nodes whose child of that rank is accepted. It is so low for later siblings
that trees of six nodes start as chains."""

CALIBRATION_RATE = 0.3
"""Step of the logarithm of the temperature per surprise of 1, once the temperature is about right."""

FURTHER_AT_FIRST = tuple(
    takewhile(lambda further: further > 0, (2.0 / (1 + num_before / 2) - CALIBRATION_RATE for num_before in count()))
)
"""Additions to this step for the first surprises, one each."""

CALIBRATED_CONFIDENCES = 4
"""Number of observations that a temperature taken over from other requests counts as."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.02, 2.0

CONFIDENCE_MEMORY = 0.93
"""Weight of the past in the mean of the draft's confidence: short, to follow a text that becomes easier or harder."""


@dataclass(slots=True)
class Average:
    """A moving average with an initial guess."""

    value: float
    num_seen: int = 0

    def note(self, value: float) -> None:
        self.num_seen += 1
        memory = min(LONGEST_MEMORY, 1 - 1 / (self.num_seen + 2))
        self.value = memory * self.value + (1 - memory) * value


@dataclass(slots=True)
class AcceptanceCounts:
    """Counts of accepted first children, compared with the draft's probabilities, over nodes that verification reached.

    Older nodes count less. A draft that gives no probabilities counts as sure of all its tokens.
    """

    num_accepted: float = 0.0
    num_expected: float = 0.0  # sum of the draft's probabilities of these children
    confidence: float = 1.0  # mean probability of the first child of a root, verified or not
    num_drafts: float = 0.0  # number of drafts in that mean; older ones count less

    @property
    def agreement(self) -> float:
        """Ratio of accepted children to the number that the draft expected."""
        return self.num_accepted / self.num_expected if self.num_expected else 1.0

    def note_draft(self, probability: float) -> None:
        """Add a draft: the probability of the first child of its root."""
        self.num_drafts = CONFIDENCE_MEMORY * self.num_drafts + 1
        self.confidence += (probability - self.confidence) / self.num_drafts

    def note(self, probability: float, is_accepted: bool) -> None:
        """Add a verified node: the draft's probability of its first child, and whether that was accepted."""
        self.num_accepted = LONGEST_MEMORY * self.num_accepted + is_accepted
        self.num_expected = LONGEST_MEMORY * self.num_expected + probability

    def fade(self, share: float, least: float = 0.0) -> None:
        """Reduce the weight of past observations, because time went by without new ones.

        Args:
            share: the part of the weight that remains.
            least: number of drafts, and of expected children, below which weights do not fade.
        """
        if self.num_drafts > least:
            self.num_drafts = max(least, share * self.num_drafts)
        if self.num_expected > least:
            share = max(share, least / self.num_expected)
            self.num_accepted *= share
            self.num_expected *= share


@dataclass(slots=True, eq=False)
class DraftHistory:
    """Averages over a request's steps; only the initial temperature may depend on other requests."""

    rank_acceptance: list[Average] = field(default_factory=lambda: [Average(value) for value in PRIOR_ACCEPTANCE])
    temperature: float | None = None  # makes the draft's probabilities match acceptance; None: unknown yet
    num_confidences: int = 0
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    tokens_per_step: Average = field(default_factory=lambda: Average(1.0))

    def note_children(self, num_children: int, accepted_rank: int | None) -> None:
        """Record a reached node: the number of its sampled children, and the rank of the accepted one; ``None`` = none."""
        for rank, acceptance in enumerate(self.rank_acceptance[:num_children]):
            acceptance.note(rank == accepted_rank)

    def start_at(self, temperature: float) -> None:
        """Set the initial temperature of a new request, from which its calibration goes on."""
        self.temperature = temperature
        self.num_confidences = CALIBRATED_CONFIDENCES

    def note_surprises(self, start: float, surprises: Sequence[float]) -> None:
        """Move the temperature towards the one at which the draft's probabilities match acceptance.

        Temperature scaling, Guo et al., "On calibration of modern neural networks", 2017, by stochastic steps.

        Args:
            start: the initial temperature.
            surprises: per first child of a reached node: 1 if it was accepted, else 0, minus its probability when it was drafted.
        """
        further = map(mul, FURTHER_AT_FIRST[self.num_confidences :], surprises)
        step = CALIBRATION_RATE * sum(surprises) + sum(further)
        self.move_temperature(start, exp(-step), len(surprises))

    def move_temperature(self, start: float, factor: float, num_confidences: int) -> None:
        """Multiply the temperature.

        Args:
            start: the initial temperature.
            factor: of the change.
            num_confidences: number of probabilities from which the factor was found.
        """
        self.num_confidences += num_confidences
        moved = (self.temperature or start) * factor
        self.temperature = MIN_TEMPERATURE if moved < MIN_TEMPERATURE else moved if moved < MAX_TEMPERATURE else MAX_TEMPERATURE
