"""What steps teach: their costs, what drafts bring, and how much what was seen before still counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from titan.adaptive.comparison import Comparison
from titan.adaptive.costs import Costs
from titan.adaptive.load import Candidate, Decision, Load, Outcome
from titan.adaptive.probes import Probes
from titan.adaptive.rest import Rest
from titan.adaptive.value import Yield
from titan.core.draft_history import AcceptanceCounts

PRIOR = AcceptanceCounts(num_accepted=2.1, num_expected=3.0, confidence=0.6, num_drafts=2.0)
"""What is known of drafts before there is one."""

IDLE_FADE = 0.975
"""Share that counts keep of a request's drafts per step in which it does not draft, and of all drafts if none does."""

LEAST_DRAFTS = 4.0
"""Number of drafts that what was ever seen counts as at least."""

LEAST_MORE, MOST_LONGER = 0.01, 4.0
"""Share by which drafting must be expected to lengthen a step for its yield to be noted; and how many times as much, or as little,
it may then have been."""


class Lessons:
    """Keeps what is known, and steps that were not learned from yet.

    Args:
        costs: of steps, as far as they are known; followed from here on.
        probes: whose account of what drafts cost and save is kept.
    """

    def __init__(self, costs: Costs, probes: Probes) -> None:
        self.costs, self.fleet, self.drafting_yield = costs, replace(PRIOR), Yield()
        self._probes = probes
        self._steps: list[tuple[Load, Decision, Outcome, int]] = []

    def add(self, load: Load, decision: Decision, total: Outcome, num_steps: int = 1) -> None:
        """Take note of steps.

        Args:
            load: of each of them.
            decision: that they followed.
            total: of their outcomes.
            num_steps: number of the steps; several only with drafts.
        """
        self._steps.append((load, decision, total, num_steps))

    def learn(self, compared: Comparison) -> None:
        """Learn from the steps that were noted; what was compared is what their decisions went by."""
        for each in self._steps:  # before the costs that they were planned by change
            self._note_yield(compared, *each)
        for each in self._steps:
            self._learn_from(*each)
        self._steps.clear()

    def learn_rest(self, rest: Rest) -> None:
        """Learn from a rest of one step at least; see `idle`."""
        load, n, num_steps = rest.mean_load, rest.num_requests, rest.num_steps
        self._probes.observe(rest.seconds, self.costs.plain_seconds(load, n), None, n, num_steps=num_steps)
        self.costs.note_plain(load, n, *rest.typical_seconds, num_steps)

    def _learn_from(self, load: Load, decision: Decision, total: Outcome, num_steps: int) -> None:
        n = len(load.candidates)
        if decision.reviewed:  # what such a step takes says little of others
            self.costs.note_review(load, len(decision.reviewed), total)
        elif decision.drafts:
            self.costs.note_drafting(load, total, decision.num_nodes, num_steps)
        else:
            self.costs.note_plain(load, n, total.host_seconds, total.target_seconds)
        if not n:
            return
        self._age_counts(load, decision, num_steps)
        num_accepted = total.num_accepted if decision.drafts or decision.reviewed else None
        seconds, plain_seconds = total.seconds + total.deciding_seconds, self.costs.plain_seconds(load)
        self._probes.observe(seconds, plain_seconds, num_accepted, n, is_probe=decision.is_probe, num_steps=num_steps)

    def _note_yield(self, compared: Comparison, load: Load, decision: Decision, total: Outcome, num_steps: int) -> None:
        """Compare what steps brought with what was planned, if they had nothing else to do, and the plan was for such steps."""
        planned, prices, n = compared.optimum, compared.prices, len(load.candidates)
        if not decision.drafts or decision.reviewed or prices is None or not n == load.num_rows == prices.load.num_lasting:
            return
        drafting, has_passes = [i for i, count in enumerate(decision.num_nodes) if count], self.costs.draft is not None
        more = planned.seconds - prices.plain_seconds
        is_fed = not has_passes or all(load.candidates[i].is_fed for i in drafting)
        is_as_planned = is_fed and decision.num_nodes == planned.num_nodes
        has_failed = has_passes and not total.num_nodes and not total.num_draft_passes
        if more < LEAST_MORE * prices.plain_seconds or not (is_as_planned or has_failed):
            return
        share = 1.0  # of the nodes that were planned, those that would have taken as long
        if total.num_draft_passes or not has_passes:  # else they are not known, and those that were planned
            num_passes, rows_seconds = total.num_draft_passes / num_steps, total.num_draft_rows / num_steps * prices.row_seconds
            real = prices.step(len(drafting), num_passes, rows_seconds, total.num_nodes / num_steps)
            share = min(max((real - prices.plain_seconds) / more, 1 / MOST_LONGER), MOST_LONGER)
        chains = [(decision.num_nodes[i] * share, compared.estimates.means[i]) for i in drafting]
        promised = num_steps * sum([p * (1 - p**count) / (1 - p) if p < 1 else count for count, p in chains])
        self.drafting_yield.note(total.num_accepted, promised, num_steps)

    def _age_counts(self, load: Load, decision: Decision, num_steps: int) -> None:
        """Let older drafts count less."""
        if not decision.drafts and not decision.reviewed:
            self.idle(load.candidates, num_steps)
            return
        fade, reviewed = IDLE_FADE**num_steps, decision.reviewed
        for i, (count, candidate) in enumerate(zip(decision.num_nodes, load.candidates, strict=True)):
            if not count and i not in reviewed:
                candidate.counts.fade(fade)

    def idle(self, candidates: Sequence[Candidate], num_steps: int) -> None:
        """Let drafts count less after steps without any."""
        self.forget(candidates, IDLE_FADE**num_steps)
        self.drafting_yield.fade(num_steps)

    def forget(self, candidates: Sequence[Candidate], share: float) -> None:
        """Let the drafts of these and of all count for this share of what they did."""
        for each in candidates:
            each.counts.fade(share)
        self.fleet.fade(share, LEAST_DRAFTS)
