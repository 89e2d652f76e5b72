"""What a request's verifications so far say about its next draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

LONGEST_MEMORY = 0.97
"""Weight of the past when something new is seen: it grows with what has been seen, up to about thirty observations."""

PRIOR_ACCEPTANCE = (0.75, 0.12, 0.06, 0.03)
"""By sibling rank, before anything is known: the share of nodes whose child of that rank is the accepted one. So few for siblings
that trees of six nodes begin as chains."""

FIRST_CALIBRATION_RATE, LAST_CALIBRATION_RATE = 2.0, 0.3
"""By so much a surprise of 1 moves the logarithm of the temperature: much at first, little once it is about right."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.02, 2.0


@dataclass(slots=True)
class Average:
    """A moving average that begins with a guess."""

    value: float
    num_seen: int = 0

    def note(self, value: float) -> None:
        """Take one more value in."""
        self.num_seen += 1
        memory = min(LONGEST_MEMORY, 1 - 1 / (self.num_seen + 2))
        self.value = memory * self.value + (1 - memory) * value


@dataclass(slots=True)
class DraftHistory:
    """Averages over a request's steps; they depend on nothing but the request's own past."""

    rank_acceptance: list[Average] = field(default_factory=lambda: [Average(value) for value in PRIOR_ACCEPTANCE])
    greedy_match: Average = field(default_factory=lambda: Average(0.5))  # p of the draft's most likely token
    sampled_match: Average = field(default_factory=lambda: Average(0.6))  # sum of min(p, q)
    tree_depth: Average | None = None  # of the trees that were worth their nodes
    temperature: float | None = None  # at which the draft's probabilities are acceptances; None: not known yet
    num_confidences: int = 0
    num_drafts: int = 0

    def note_draft(self, depth: int) -> None:
        """A tree of that depth was drafted."""
        self.num_drafts += 1
        if self.tree_depth is None:
            self.tree_depth = Average(depth)
        self.tree_depth.note(depth)

    def note_children(self, num_children: int, accepted_rank: int | None) -> None:
        """A node with that many sampled children was reached, and the child of that rank was accepted, or none."""
        for rank, acceptance in enumerate(self.rank_acceptance[:num_children]):
            acceptance.note(rank == accepted_rank)

    def note_match(self, greedy: float, sampled: float) -> None:
        """At a root, a greedy and a sampled proposal would have been accepted with these probabilities."""
        self.greedy_match.note(greedy)
        self.sampled_match.note(sampled)

    def note_confidence(self, start: float, logprob: float, is_accepted: bool) -> None:
        """The most likely child of a node was tried; move the temperature so that such probabilities become acceptances.

        Temperature scaling, Guo et al., "On calibration of modern neural networks", 2017, one stochastic step at a time.

        Args:
            start: the temperature before anything was known.
            logprob: of the child, at the temperature it was drafted at.
            is_accepted: whether the target took it.
        """
        surprise = is_accepted - exp(logprob)
        rate = max(LAST_CALIBRATION_RATE, FIRST_CALIBRATION_RATE / (1 + self.num_confidences / 2))
        self.num_confidences += 1
        moved = log(self.temperature or start) - rate * surprise
        self.temperature = min(max(exp(moved), MIN_TEMPERATURE), MAX_TEMPERATURE)
