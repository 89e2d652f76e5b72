"""Probes: some requests that would not draft show whether it would pay.

Where the drafter can **review** a request, it is fed the tokens that the request emitted without it, and says which of the last it
would have proposed: one pass of the draft tells of many tokens, and the target has none to verify. Else a request drafts a node.

The net cost of all drafts, which is their time less that of the tokens they save, is to be a share of all time at most. While
acceptance may well be such that drafting pays, probes are made in advance, one after the other, of the requests that seem best:
they go on as long as they win ("play the winner", Zelen, 1969). As many are probed at once as tell most for their time, which is
the square root of the number of tokens. Else one is probed of which a token costs little, and that has not been seen for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import cbrt, inf

from titan.adaptive.costs import COLD_PLAIN_STEPS, Costs
from titan.adaptive.load import Candidate, Load

PROBE_SHARE = 0.01
"""Share of the time."""

LEAST_REVIEWED = 6
"""Tokens from which on a request is worth a review."""

MAX_ADVANCE = 1.0
"""Steps whose time may be spent in advance."""

MAX_SAVED = 1.25
"""Most that is saved for the next probe, as a multiple of its price: once there is enough, that may have risen a little."""

MAX_LOSS = 3.0
"""What a probe is taken to cost at most, as a multiple of what was expected or of a step: anything may hold it up."""

MAX_DEBT = 1.0
"""Steps whose time is owed at most: what drafting loses that seemed to pay says little of the next request."""


@dataclass(slots=True)
class Probes:
    """Chooses what is probed, and keeps account of it."""

    credit: float = 0.0  # seconds
    price: float | None = None  # seconds of the probe that was last thought of; inf: nobody is idle; None: there is none yet
    advance: float = 0.0  # seconds that may be spent on it in advance
    num_waiting: int = 0  # next steps in which no request has emitted enough for a review
    num_cold: int = 0  # next steps without drafts that find cold caches

    def forget(self) -> None:
        """Think of another probe, because estimates or requests have changed."""
        self.price = None

    @property
    def is_due(self) -> bool:
        """Whether there is time for that probe."""
        return not self.num_waiting and (self.price is None or self.credit + self.advance >= self.price)

    def num_steps_until_due(self, seconds: float, most: int) -> int:
        """Return how many steps of this length, none of which drafts, pass until there is time for that probe; at most ``most``."""
        lacking = (self.price or 0.0) - self.credit - self.advance
        return int(max(0.0, min(most, max(self.num_waiting, lacking / (PROBE_SHARE * seconds)))))

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
        self.num_waiting = min([_num_lacking(candidates[i]) for i in idle])
        ready = idle if self.num_waiting else [i for i in idle if not _num_lacking(candidates[i])]
        hopeful = [i for i in ready if hoped[i]]
        if hopeful:
            order = sorted(hopeful, key=lambda i: (-acceptance[i], candidates[i].num_missing))
        else:
            of_pass, of_row = costs.draft_line(load)

            def price(i: int) -> float:
                each = candidates[i]
                return (of_pass + of_row * each.num_missing) * cbrt(1 + each.counts.num_drafts) / _num_shown(each)

            order = [min(ready, key=price)]
        prices, num_shown = self._prices(load, costs, num_nodes, order), [*accumulate(_num_shown(candidates[i]) for i in order)]
        most = max(range(len(order)), key=lambda i: num_shown[i] ** 0.5 / prices[i])
        self.price, self.advance = prices[most], MAX_ADVANCE * costs.decode_seconds(load) if hopeful else 0.0
        return order[: most + 1] if self.is_due else ()

    def add_time(self, seconds: float, num_steps: int = 1) -> None:
        """Add steps of this length: a share of it may be spent, and each request has emitted one token more in each."""
        self.credit, self.num_waiting = self.credit + PROBE_SHARE * seconds, max(0, self.num_waiting - num_steps)

    def observe(
        self,
        seconds: float,
        plain_seconds: float,
        num_accepted: int | None,
        num_requests: int,
        *,
        is_probe: bool = False,
        num_steps: int = 1,
    ) -> None:
        """Add steps to the account.

        Args:
            seconds: of the steps, with deciding on them.
            plain_seconds: that each would have taken without drafts.
            num_accepted: drafted tokens that were accepted; ``None``: nothing was drafted or reviewed.
            num_requests: that emitted tokens.
            is_probe: whether a probe was all that there was; what drafting loses that seemed to pay is not owed without end.
            num_steps: number of the steps.
        """
        self.add_time(seconds, num_steps)
        before = self.credit
        if num_accepted is None:
            if self.num_cold:
                self.credit -= num_steps * max(0.0, min(seconds / num_steps, 2 * plain_seconds) - plain_seconds)
                self.num_cold = max(0, self.num_cold - num_steps)
        else:
            self.num_cold = COLD_PLAIN_STEPS
            saved = (num_steps + num_accepted / num_requests) * plain_seconds - seconds
            if is_probe:
                saved = max(saved, -MAX_LOSS * max(self.price or 0.0, plain_seconds))
            self.credit = min(self.credit + saved, max(self.credit, 0.0))  # gains make up for losses, but are not spent
        if self.price is not None:
            self.credit = min(self.credit, MAX_SAVED * self.price)
        if not is_probe:
            self.credit = max(self.credit, min(before, -MAX_DEBT * plain_seconds))

    @staticmethod
    def _prices(load: Load, costs: Costs, num_nodes: Sequence[int], order: Sequence[int]) -> list[float]:
        """Return the seconds that a probe of the first, the first two, ... of some candidates adds to a step."""
        n, context, target, draft = len(load.candidates), load.num_context_tokens, costs.target, costs.draft
        node_seconds = target.predict(load.num_rows + 1, context) - target.predict(load.num_rows, context)
        drafting = sum(map(bool, num_nodes))

        def of_draft(num_rows: int, num_requests: int) -> float:
            return draft.predict(num_rows, context * num_requests / n) if draft is not None and num_requests else 0.0

        prices, before = list[float](), costs.host.predict(n, drafting) + of_draft(drafting, drafting)
        num_grown, grown_rows, num_reviewed, reviewed_rows = drafting, drafting, 0, 0
        for each in map(load.candidates.__getitem__, order):
            if each.num_reviewable is None:
                num_grown, grown_rows = num_grown + 1, grown_rows + each.num_missing
            else:
                num_reviewed, reviewed_rows = num_reviewed + 1, reviewed_rows + each.num_missing - 1 + _num_lacking(each)
            host = costs.host.predict(n, num_grown + num_reviewed)
            passes = of_draft(grown_rows, num_grown) + of_draft(reviewed_rows, num_reviewed)
            prices.append(max(host + passes + (num_grown - drafting) * node_seconds - before, 1e-9))
        return prices


def _num_shown(candidate: Candidate) -> int:
    """Return of how many tokens a probe of a request tells, at least once it is time for one."""
    return 1 if candidate.num_reviewable is None else max(candidate.num_reviewable, _least_reviewed(candidate))


def _num_lacking(candidate: Candidate) -> int:
    """Return how many tokens a request has yet to emit before it is time for a review."""
    return 0 if candidate.num_reviewable is None else max(0, _least_reviewed(candidate) - candidate.num_reviewable)


def _least_reviewed(candidate: Candidate) -> int:
    """Return how many tokens a review should tell of; fewer of a request that soon ends."""
    return min(LEAST_REVIEWED, candidate.num_remaining)
