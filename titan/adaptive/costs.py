"""The costs of steps: of the target's and the draft's passes, and of the host beside them."""

from __future__ import annotations

from collections.abc import Sequence

from titan.adaptive.host_time import COLD_STEPS, HostTime
from titan.adaptive.load import Load, Outcome
from titan.adaptive.pass_cost import PassCost

COLD = 1.3
"""How many times as long the first steps with drafts may take, because of cold caches."""

COLD_PLAIN_STEPS = 5
"""First steps without drafts after some with drafts, which find cold caches: what they take tells nothing."""

FIRST_DRAFT = 1.5
"""How many times as much of the host's time the first drafts of all take as later ones."""


class Costs:
    """What steps are made of.

    Args:
        target: cost of the target's passes.
        draft: cost of the draft's passes; ``None``: it is part of the host's time.
    """

    def __init__(self, target: PassCost, draft: PassCost | None) -> None:
        self.target, self.draft, self.host = target, draft, HostTime()
        self._was_drafting, self._num_alike = False, COLD_PLAIN_STEPS  # an engine starts with steps without drafts

    def plain_seconds(self, load: Load, num_requests: int | None = None) -> float:
        """Return the seconds of a step without drafts.

        Args:
            load: of the step.
            num_requests: that emit tokens; ``None`` = as many as there are candidates.
        """
        n = len(load.candidates) if num_requests is None else num_requests
        return self.host.predict(n) + self.target.predict(load.num_rows, load.num_context_tokens, is_warm=True)

    def decode_seconds(self, load: Load) -> float:
        """Return the seconds of a step without drafts and prompts."""
        return self.plain_seconds(load._replace(num_rows=len(load.candidates)))

    def draft_line(self, load: Load) -> tuple[float, float]:
        """Return the seconds of a pass of the draft, whatever its rows, and of each row, near a row for each candidate."""
        if self.draft is None:
            return 0.0, 0.0
        n, context = len(load.candidates), load.num_context_tokens
        first, second = self.draft.predict(n, context), self.draft.predict(2 * n, context)
        per_row = min(max((second - first) / n, 0.0), first / n)
        return first - n * per_row, per_row

    def missing_row_seconds(self, load: Load) -> float:
        """Return the seconds of each row that feeds the draft what it has missed: many at once, each may take longer than a few."""
        n, num_missing = len(load.candidates), sum([each.num_missing - 1 for each in load.candidates if each.max_nodes])
        if self.draft is None or num_missing <= 0:
            return 0.0
        few, many = self.draft.predict(n, load.num_context_tokens), self.draft.predict(n + num_missing, load.num_context_tokens)
        return max(many - few, 0.0) / num_missing

    def note_plain(self, load: Load, num_requests: int, host_seconds: float, target_seconds: float, num_steps: int = 1) -> None:
        """Learn from steps without drafts, from their means.

        Args:
            load: of each of these steps; its candidates do not matter.
            num_requests: that emitted tokens.
            host_seconds: of a step, beside its passes.
            target_seconds: of its pass of the target.
            num_steps: number of the steps.
        """
        is_warm, change = self._count_steps(num_steps, is_drafting=False) >= COLD_PLAIN_STEPS, 0.0
        if is_warm and load.num_rows == num_requests:  # what prompts take says little of what decodes do
            # until something was drafted, it tells how fast the machine is, for passes with drafts as well
            size = num_requests, load.num_context_tokens
            change = self.target.note(*size, target_seconds, num_steps, is_warm=self.host.has_drafted)
        else:
            self.target.age(num_steps)
        if self.draft is not None:
            self.draft.follow(change, self.target.pace, num_steps)
        self.host.age(num_steps)
        if num_requests and (is_warm or not self.host.knows(num_requests)):
            self.host.note(num_requests, 0, host_seconds, num_steps)

    def note_drafting(self, load: Load, total: Outcome, num_nodes: Sequence[int], num_steps: int = 1) -> None:
        """Learn from steps with drafts that were decided on together, from their means.

        Args:
            load: of each of these steps.
            total: of their outcomes.
            num_nodes: that each candidate was to draft; of one at least.
            num_steps: number of the steps.
        """
        cold_share = min(max(COLD_STEPS - self._count_steps(num_steps, is_drafting=True), 0) / num_steps, 1.0)
        n, num_drafting = len(load.candidates), sum(map(bool, num_nodes))
        host_seconds = (total.host_seconds + total.deciding_seconds) / num_steps
        if not self.host.has_drafted:  # it may be the only one for long
            plain = self.host.predict(n)
            host_seconds = plain + (host_seconds - plain) / FIRST_DRAFT
        elif cold_share and self.host.knows(n, num_drafting):
            host_seconds = _warm(host_seconds, self.host.predict(n, num_drafting), cold_share)
        self.host.note(n, num_drafting, host_seconds, num_steps)
        if load.num_rows != n:  # what prompts take says little of what decodes do
            return
        rows, context, seconds = n + total.num_nodes / num_steps, load.num_context_tokens, total.target_seconds / num_steps
        _note_pass(self.target, (rows, context), seconds, cold_share, num_steps)
        is_caught_up = all(each.is_fed for count, each in zip(num_nodes, load.candidates, strict=True) if count)
        if self.draft is not None and total.num_draft_passes and is_caught_up:
            per_pass = max(1.0, total.num_draft_rows / total.num_draft_passes)
            seconds = total.draft_seconds / total.num_draft_passes
            _note_pass(self.draft, (per_pass, context * num_drafting / n), seconds, cold_share, num_steps)

    def note_review(self, load: Load, num_reviewed: int, outcome: Outcome) -> None:
        """Learn from a step with a review: its pass takes no less than one of growth, and may show that these are cheaper.

        Args:
            load: of the step.
            num_reviewed: candidates.
            outcome: of the step.
        """
        self._count_steps(1, is_drafting=True)
        rows, context = outcome.review_rows, load.num_context_tokens * num_reviewed / len(load.candidates)
        is_measured = self.draft is not None and 0 < rows <= self.draft.sizes[-1]
        if self.draft is not None and is_measured and 0 < outcome.review_seconds < self.draft.predict(rows, context):
            self.draft.note(rows, context, outcome.review_seconds)

    def _count_steps(self, num_steps: int, *, is_drafting: bool) -> int:
        """Count steps, and return how many of their kind came right before them."""
        num_before = self._num_alike if is_drafting == self._was_drafting else 0
        self._num_alike, self._was_drafting = num_before + num_steps, is_drafting
        return num_before


def _note_pass(cost: PassCost, size: tuple[float, float], seconds: float, cold_share: float, num_steps: int) -> None:
    """Add steps' mean pass of these rows and tokens of context; see `PassCost.note`."""
    if cold_share:
        seconds = _warm(seconds, cost.predict(*size), cold_share)
    cost.note(*size, seconds, num_steps)


def _warm(seconds: float, expected: float, cold_share: float) -> float:
    """Return what a part of steps would have taken with warm caches, as far as its mean time and what was expected tell.

    Args:
        seconds: mean over the steps.
        expected: of each.
        cold_share: share of the steps that found cold caches.
    """
    return seconds + cold_share * (min(seconds, max(expected, seconds / COLD)) - seconds)
