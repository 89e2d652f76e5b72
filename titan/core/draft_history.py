"""Statistics of a request's verifications so far, from which its next draft is planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

LONGEST_MEMORY = 0.97
"""Largest weight of the past in an average: the weight grows with the number of observations, up to about thirty."""

PRIOR_ACCEPTANCE = (0.75, 0.12, 0.06, 0.03)
"""Initial acceptance by sibling rank: the share of nodes whose child of that rank is accepted. Low enough for later siblings that
trees of six nodes start as chains."""

FIRST_CALIBRATION_RATE, LAST_CALIBRATION_RATE = 2.0, 0.3
"""How far a surprise of 1 moves the logarithm of the temperature: far at first, less once it is about right."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.02, 2.0


@dataclass(slots=True)
class Average:
    """A moving average with an initial guess."""

    value: float
    num_seen: int = 0

    def note(self, value: float) -> None:
        """Add a value."""
        self.num_seen += 1
        memory = min(LONGEST_MEMORY, 1 - 1 / (self.num_seen + 2))
        self.value = memory * self.value + (1 - memory) * value


@dataclass(slots=True)
class DraftHistory:
    """Averages over a request's steps; they depend only on the request's own past."""

    rank_acceptance: list[Average] = field(default_factory=lambda: [Average(value) for value in PRIOR_ACCEPTANCE])
    greedy_match: Average = field(default_factory=lambda: Average(0.5))  # p of the draft's most likely token
    sampled_match: Average = field(default_factory=lambda: Average(0.6))  # sum of min(p, q)
    tree_depth: Average | None = None  # greatest depth of each drafted tree
    temperature: float | None = None  # at which the draft's probabilities match acceptance; None: not known yet
    num_confidences: int = 0
    num_drafts: int = 0

    def note_draft(self, depth: int) -> None:
        """Record that a tree of this depth was drafted."""
        self.num_drafts += 1
        if self.tree_depth is None:
            self.tree_depth = Average(depth)
        self.tree_depth.note(depth)

    def note_children(self, num_children: int, accepted_rank: int | None) -> None:
        """Record a node that was reached: its number of sampled children, and the rank of the accepted one; ``None`` = no child."""
        for rank, acceptance in enumerate(self.rank_acceptance[:num_children]):
            acceptance.note(rank == accepted_rank)

    def note_match(self, greedy: float, sampled: float) -> None:
        """Record the probabilities with which a greedy and a sampled proposal would have been accepted at a root."""
        self.greedy_match.note(greedy)
        self.sampled_match.note(sampled)

    def note_confidence(self, start: float, logprob: float, is_accepted: bool) -> None:
        """Record whether a node's most likely child was accepted: move the temperature so that such probabilities match acceptance.

        Temperature scaling, Guo et al., "On calibration of modern neural networks", 2017, one stochastic step at a time.

        Args:
            start: the initial temperature.
            logprob: of the child, at the temperature at which it was drafted.
            is_accepted: whether the target accepted it.
        """
        surprise = is_accepted - exp(logprob)
        rate = max(LAST_CALIBRATION_RATE, FIRST_CALIBRATION_RATE / (1 + self.num_confidences / 2))
        self.num_confidences += 1
        moved = log(self.temperature or start) - rate * surprise
        self.temperature = min(max(exp(moved), MIN_TEMPERATURE), MAX_TEMPERATURE)
