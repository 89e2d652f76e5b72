"""Probes: one node of a request that would not draft, to see whether it would pay.

Their net cost, which is their time less that of the tokens which they save, is a share of all time. While a request's acceptance
may well be such that drafting pays, probes are made in advance, one after the other: those of the request that seems best, so that
it goes on as long as it wins ("play the winner", Zelen, 1969). Else whatever costs least is probed, and what has not been seen for
long rather than what has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan.adaptive.load import Load
from titan.adaptive.optimum import Costs

PROBE_SHARE = 0.015
"""Share of the time."""

MAX_ADVANCE = 1.0
"""Steps whose time may be spent in advance, or saved."""


@dataclass(slots=True)
class Probes:
    """Chooses what is probed, and keeps account of it."""

    credit: float = 0.0  # seconds
    price: float = 0.0  # seconds of the probe that was last thought of
    advance: float = 0.0  # seconds that may be spent on it in advance

    @property
    def is_due(self) -> bool:
        """Whether there is time for that probe."""
        return self.credit + self.advance >= self.price

    def choose(
        self, load: Load, costs: Costs, num_nodes: Sequence[int], acceptance: Sequence[float], hoped: Sequence[int]
    ) -> int | None:
        """Return the candidate to be probed in a step.

        Args:
            load: of the step.
            costs: of passes and the host.
            num_nodes: that each candidate drafts.
            acceptance: of each candidate, estimated.
            hoped: nodes that each candidate would draft, if acceptance were as high as it may well be.
        """
        candidates = load.candidates
        idle = [i for i, each in enumerate(candidates) if each.max_nodes and not num_nodes[i]]
        if not idle:
            return None
        seconds = self._seconds(load, costs, any(num_nodes))
        hopeful = [i for i in idle if hoped[i]]
        if hopeful:
            probed = max(hopeful, key=lambda i: (acceptance[i], -seconds[i]))
        else:
            probed = min(idle, key=lambda i: seconds[i] * (1 + candidates[i].counts.num_drafts))
        self.price, self.advance = seconds[probed], MAX_ADVANCE * costs.plain_seconds(load) if hopeful else 0.0
        return probed if self.is_due else None

    def observe(self, seconds: float, plain_seconds: float) -> None:
        """Add the time of a step to the account; that of a plain one is the least that can be saved."""
        self.credit = min(self.credit + PROBE_SHARE * seconds, max(self.price, MAX_ADVANCE * plain_seconds))

    def pay(self, saved: float) -> None:
        """Take the probe off the account, except for seconds that it has saved."""
        self.credit -= max(self.price - saved, 0.0)

    def _seconds(self, load: Load, costs: Costs, drafts: bool) -> list[float]:
        """Return what it costs to let each candidate draft a node, beside others or alone."""
        n, context, rows = len(load.candidates), load.num_context_tokens, load.num_rows
        node = costs.target.predict(rows + 1, context) - costs.target.predict(rows, context)
        if drafts or costs.draft is None:
            row_seconds = costs.draft_line(load)[1]
            host = 0.0 if drafts else max(costs.host.predict(True, n) - costs.host.predict(False, n), 0.0)
            return [host + node + each.num_missing * row_seconds for each in load.candidates]
        host = max(costs.host.predict(True, n) - costs.host.predict(False, n), 0.0)
        return [host + node + costs.draft.predict(each.num_missing, context / n) for each in load.candidates]
