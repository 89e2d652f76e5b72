"""What a request's verifications so far say about its next draft."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.97
"""Weight of the past when something new is seen: about the last thirty observations count."""

PRIOR_ACCEPTANCE = (0.6, 0.25, 0.12, 0.06)
"""By sibling rank, before anything is known: the share of nodes whose child of that rank is the accepted one."""


@dataclass(slots=True)
class DraftHistory:
    """Moving averages over a request's steps; it depends on nothing but the request's own past."""

    rank_acceptance: list[float] = field(default_factory=lambda: list(PRIOR_ACCEPTANCE))
    greedy_match: float = 0.5  # p of the draft's most likely token: acceptance of a greedy proposal
    sampled_match: float = 0.6  # sum of min(p, q): acceptance of a sampled proposal
    tree_depth: float | None = None  # of the trees that were worth their nodes
    num_drafts: int = 0

    def note_draft(self, depth: int) -> None:
        """A tree of that depth was drafted."""
        self.num_drafts += 1
        self.tree_depth = depth if self.tree_depth is None else _mix(self.tree_depth, depth)

    def note_children(self, num_children: int, accepted_rank: int | None) -> None:
        """A node with that many sampled children was reached, and the child of that rank was accepted, or none."""
        for rank in range(min(num_children, len(self.rank_acceptance))):
            self.rank_acceptance[rank] = max(0.01, _mix(self.rank_acceptance[rank], rank == accepted_rank))

    def note_match(self, greedy: float, sampled: float) -> None:
        """At a root, a greedy and a sampled proposal would have been accepted with these probabilities."""
        self.greedy_match = _mix(self.greedy_match, greedy)
        self.sampled_match = _mix(self.sampled_match, sampled)


def _mix(old: float, new: float) -> float:
    return MEMORY * old + (1 - MEMORY) * new
