"""Probes: one node each of some requests that would not draft, to see whether it would pay.

The net cost of all drafts, which is their time less that of the tokens they save, is to be a share of all time at most. While
acceptance may well be such that drafting pays, probes are made in advance, one after the other, of the requests that seem best:
they go on as long as they win ("play the winner", Zelen, 1969). As many are probed at once as tell most for their time, which is
the square root of their number. Else one is probed that costs little, and has not been seen for long. A probe is a few steps in
a row: the first feeds the draft what it has missed, and finds cold caches, so that the others cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from titan.adaptive.costs import COLD_STEPS, Costs
from titan.adaptive.load import Load

PROBE_SHARE = 0.0225
"""Share of the time."""

NUM_STEPS = 3
"""Steps of a probe."""

MAX_ADVANCE = 1.0
"""Steps whose time may be spent in advance, or saved."""

MAX_DEBT = 2.0
"""Steps whose time is owed at most: what drafting loses that seemed to pay says little of the next request."""


@dataclass(slots=True)
class Probes:
    """Chooses what is probed, and keeps account of it."""

    credit: float = 0.0  # seconds
    price: float = 0.0  # seconds of the probe that was last thought of
    advance: float = 0.0  # seconds that may be spent on it in advance
    num_left: int = 0  # steps of the probe that is going on
    num_cold: int = 0  # next steps without drafts that find cold caches

    def forget(self) -> None:
        """Think of another probe, because estimates or requests have changed."""
        self.price = 0.0

    @property
    def is_due(self) -> bool:
        """Whether there is time for that probe."""
        return self.num_left > 0 or not self.price or self.credit + self.advance >= self.price

    def num_steps_until_due(self, seconds: float, most: int) -> int:
        """Return how many steps of this length, none of which drafts, pass until there is time for that probe; at most ``most``."""
        return int(max(0.0, min(most, (self.price - self.credit - self.advance) / (PROBE_SHARE * seconds))))

    def choose(
        self, load: Load, costs: Costs, num_nodes: Sequence[int], acceptance: Sequence[float], hoped: Sequence[int]
    ) -> Sequence[int]:
        """Return the candidates to be probed in a step.

        Args:
            load: of the step.
            costs: of passes and the host.
            num_nodes: that each candidate drafts.
            acceptance: of each candidate, estimated.
            hoped: nodes that each candidate would draft, if acceptance were as high as it may well be.
        """
        if not self.is_due:
            return ()
        candidates = load.candidates
        idle = [i for i, each in enumerate(candidates) if each.max_nodes and not num_nodes[i]]
        if not idle:
            self.price = inf
            return ()
        if self.num_left:
            self.num_left -= 1
            return [i for i in idle if candidates[i].is_fed]
        hopeful = [i for i in idle if hoped[i]]
        if hopeful:
            order = sorted(hopeful, key=lambda i: (-acceptance[i], candidates[i].num_missing))
        else:
            of_pass, of_row = costs.draft_line(load)
            order = [
                min(idle, key=lambda i: (of_pass + of_row * candidates[i].num_missing) * (1 + candidates[i].counts.num_drafts))
            ]
        prices = self._prices(load, costs, num_nodes, order)
        most = max(range(len(order)), key=lambda i: (i + 1) ** 0.5 / prices[i])
        self.price, self.advance = prices[most], MAX_ADVANCE * costs.plain_seconds(load) if hopeful else 0.0
        if self.credit + self.advance < self.price:
            return ()
        self.num_left = 0 if costs.draft is None else NUM_STEPS - 1
        return order[: most + 1]

    def note_doze(self, seconds: float) -> None:
        """Add a step without drafts that was not looked at, and is taken to have been this long."""
        self.credit += PROBE_SHARE * seconds

    def observe(self, seconds: float, plain_seconds: float, num_accepted: int | None, num_requests: int) -> None:
        """Add a step to the account.

        Args:
            seconds: of the step, with deciding on it.
            plain_seconds: that it would have taken without drafts.
            num_accepted: drafted tokens that were accepted; ``None``: nothing was drafted.
            num_requests: that emitted tokens.
        """
        self.credit += PROBE_SHARE * seconds
        if num_accepted is None:
            if self.num_cold:
                self.credit -= max(0.0, min(seconds, 2 * plain_seconds) - plain_seconds)
                self.num_cold -= 1
        else:
            self.num_cold = COLD_STEPS
            saved = (1 + num_accepted / num_requests) * plain_seconds - seconds
            self.credit = min(self.credit + saved, max(self.credit, 0.0))  # gains make up for losses, but are not spent
        self.credit = max(min(self.credit, max(self.price, MAX_ADVANCE * plain_seconds)), -MAX_DEBT * plain_seconds)

    @staticmethod
    def _prices(load: Load, costs: Costs, num_nodes: Sequence[int], order: Sequence[int]) -> list[float]:
        """Return the seconds that a node of the first, the first two, ... of some candidates adds to a step."""
        n, context, target, draft = len(load.candidates), load.num_context_tokens, costs.target, costs.draft
        node_seconds = target.predict(load.num_rows + 1, context) - target.predict(load.num_rows, context)
        drafting = sum(map(bool, num_nodes))
        fixed = -costs.host.predict(n, drafting)
        if draft is not None and drafting:
            fixed -= draft.predict(drafting, context * drafting / n)
        prices, rows = [], drafting
        for i, each in enumerate(order, 1):
            rows += load.candidates[each].num_missing
            fed = 0.0 if draft is None else draft.predict(rows, context * (drafting + i) / n)
            prices.append(max(costs.host.predict(n, drafting + i) + fixed + fed + i * node_seconds, 1e-9))
        return prices
