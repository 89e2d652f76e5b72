"""A step as the controller sees it: what there is to run, what is decided, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from titan.core.draft_history import AcceptanceCounts
from titan.core.growth import Worth

MAX_MISSING = 2
"""Tokens that a draft may lack of a request that it was fed in the step before."""


class Candidate(NamedTuple):
    """A request that emits tokens in a step."""

    counts: AcceptanceCounts
    max_nodes: int  # that it may draft; 0: none
    num_missing: int  # committed tokens that the draft has not seen, the root included
    num_remaining: int  # tokens that it may still emit
    stops_early: bool  # whether the draft's confidence may end its tree; else it drafts as many nodes as were decided
    weight: float = 1.0  # of its tokens
    is_typical: bool = True  # whether what it shows may be true of others; else its options are none that the draft sees
    num_reviewable: int | None = None  # tokens that a review would compare with what the draft says; None: there are no reviews

    @property
    def is_fed(self) -> bool:
        """Whether the draft lacks no more of it than what the last step left."""
        return self.num_missing <= MAX_MISSING


class Load(NamedTuple):
    """What a step has to run before any drafts are added."""

    candidates: Sequence[Candidate]
    num_rows: int  # of the target's pass: the candidates' roots and prefill chunks
    num_context_tokens: int  # before these rows, of all requests
    num_ending: int = 0  # of these rows, those of prompts that end with them, but for one each

    @property
    def num_lasting(self) -> int:
        """Rows that steps like this one have: prompts that end are over in the next."""
        return self.num_rows - self.num_ending


class Decision(NamedTuple):
    """What each candidate drafts."""

    num_nodes: list[int]  # 0: nothing
    most_nodes: Sequence[int]  # up to which growth may go on, if it is worth it
    worths: Sequence[Worth | None]  # where growth ends, by confidence; None: at `num_nodes`
    probed: Sequence[int] = ()  # candidates that show whether it would pay, by a node of their own or by a review
    reviewed: Sequence[int] = ()  # those of them that are reviewed
    is_probe: bool = False  # whether a probe is all that there is
    is_steady: bool = False  # whether it may be repeated: some draft, the draft was fed all of these, and none is probed

    @classmethod
    def nothing(cls, load: Load) -> Decision:
        """Return the decision that no candidate drafts."""
        nobody = [0] * len(load.candidates)
        return cls(nobody, nobody, [None] * len(load.candidates))

    @property
    def drafts(self) -> bool:
        """Whether any candidate drafts."""
        return any(self.num_nodes)


class Outcome(NamedTuple):
    """What came of a step."""

    num_nodes: int  # that were verified
    num_accepted: int
    num_draft_passes: int
    num_draft_rows: int
    seconds: float  # of the step
    draft_seconds: float
    target_seconds: float
    deciding_seconds: float = 0.0  # beside those of the step
    review_rows: int = 0  # of the draft's pass that reviews requests
    review_seconds: float = 0.0  # of that pass; 0: nobody knows

    @classmethod
    def total(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the sums of several, at least one."""
        return cls(*map(sum, zip(*outcomes, strict=True)))

    @property
    def host_seconds(self) -> float:
        """Seconds beside the passes."""
        return self.seconds - self.draft_seconds - self.target_seconds
