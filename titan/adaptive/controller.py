"""The law of adaptive speculation: which requests draft in a step, how much, and where growth ends.

A step that drafts is worth its time if it emits more tokens per second than one that does not. With p the probability that a node's
first child is accepted, n requests that emit one token each anyway, and chains that reach depth d with probability p**d::

    rate(L, B) = (n + sum of the B largest p_i**d with d <= L) / (host + draft(L passes, B rows) + target(rows + B, context))

The best L and B say which requests draft. Where the draft's own confidence is known while a tree grows, growth then ends by prices,
which are seconds times that rate (`titan.core.growth.Worth`): at the optimum of a quotient, a part pays as long as its own quotient
is above the whole's (Dinkelbach, "On nonlinear fractional programming", 1967; the marginal value theorem of Charnov, 1976). Where
it is not known, requests draft the nodes that the optimum has of them.

Estimates of p age by steps. A request whose drafts would pay if p were a standard error higher is probed.

Everything here is a function of what it is given: there is no clock and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from operator import is_
from typing import NamedTuple

from titan.adaptive.costs import COLD_PLAIN_STEPS, Costs
from titan.adaptive.load import Candidate, Load, Outcome
from titan.adaptive.optimum import MARGIN, Optimum, Prices, best
from titan.adaptive.probes import Probes
from titan.adaptive.rest import Rest
from titan.adaptive.standing import Standing
from titan.adaptive.value import PastRequests, Yield, estimate, own_acceptance
from titan.core.draft_history import AcceptanceCounts
from titan.core.growth import Worth

PRIOR = AcceptanceCounts(num_accepted=2.1, num_expected=3.0, confidence=0.6, num_drafts=2.0)
"""What is known of drafts before there is one."""

IDLE_FADE = 0.975
"""Share that counts keep of a request's drafts per step in which it does not draft, and of all drafts if none does."""

LACKING_FADE = 1 / 4
"""Share that counts keep of all drafts where drafts bring much less than they did: most of them are of before that."""

NUM_PLAIN = COLD_PLAIN_STEPS + 2
"""Steps in a row between drafts that are plain, to see what such steps cost."""

PLAIN_STEPS, PLAIN_GAIN = 24, 0.05
"""Drafting steps before the first of these; twice as many if drafting gains that share, and so on."""

MOST_PLAIN_AFTER = int(PLAIN_STEPS * (1 + 1 / PLAIN_GAIN))
"""Most such steps, as many as where drafting doubles the rate."""

LEAST_DRAFTS = 4.0
"""Number of drafts that what was ever seen counts as at least."""

LEAST_MORE, MOST_LONGER = 0.01, 4.0
"""Share by which drafting must be expected to lengthen a step for its yield to be noted; and how many times as much, or as little,
it may then have been."""

LONG_REPEAT = 1.5
"""Steps that take more than this many times as long as planned are learned from one by one, others that do alike from their sum. If
most do, some are plain next."""

MAX_FEED, FEED_DRAFTS = 1.0, 8.0
"""Plain steps in whose time the draft may be fed in one step what it has missed of several requests; and the number of drafts from
which on it is as much, less in proportion where fewer were seen."""


class Decision(NamedTuple):
    """What each candidate drafts."""

    num_nodes: list[int]  # 0: nothing
    most_nodes: Sequence[int]  # up to which growth may go on, if it is worth it
    worths: Sequence[Worth | None]  # where growth ends, by confidence; None: at `num_nodes`
    probed: Sequence[int] = ()  # candidates that show whether it would pay, by a node of their own or by a review
    reviewed: Sequence[int] = ()  # those of them that are reviewed
    is_probe: bool = False  # whether a probe is all that there is
    is_steady: bool = False  # whether it may be repeated: some draft, the draft was fed all of these, and none is probed

    @property
    def drafts(self) -> bool:
        """Whether any candidate drafts."""
        return any(self.num_nodes)


class Controller:
    """Decides, from measured costs and acceptance, what each step drafts.

    Args:
        costs: of steps, as far as they are known.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs, self.drafting_yield, self._probes = costs, Yield(), Probes()
        self.fleet, self.past = replace(PRIOR), PastRequests()
        self.optimum = Optimum([], 0.0)
        self.has_tried = False  # whether anything was ever drafted or reviewed
        self._prices: Prices | None = None  # of the last comparison
        self._worths: Sequence[Worth | None] = ()  # of its candidates; None: they draft nothing
        self._standing = Standing()
        self._has_compared = False  # in the last decision
        self.num_repeats = 0  # next steps of the same requests, one token each, that may do as the last one, undecided
        self._num_rested = 0  # steps since anything was decided
        self._rest: Rest | None = None  # that goes on
        self._num_plain_left = 0  # plain steps in a row, the present one included, that show what such steps cost
        self._num_drafting = 0  # steps with drafts since the last of these
        self._plain_after = 0.0  # such steps after which some are to be plain again
        self._estimates = estimate(self.fleet, self.past, (AcceptanceCounts(),))
        self._hoped: list[int] = []
        self._compared: Sequence[AcceptanceCounts] = ()  # of the candidates of the last comparison
        self._load: Load = Load((), 0, 0)
        self._decision = Decision([], (), ())
        self._alike: list[Outcome] = []  # what came of the last decision, and of its repeats
        # steps that were not learned from yet: those that did alike, the total of what came of them, and their number
        self._unlearned: list[tuple[Load, Decision, Outcome, int]] = []

    @property
    def is_probe_due(self) -> bool:
        """Whether there may be a probe in the next step."""
        return self._probes.is_due

    def repeat(self, is_alike: bool) -> bool:
        """Return whether a step does as the last one that was decided.

        What is allowed is used up even if nothing is noted of a step, as of one that runs in parts.

        Args:
            is_alike: whether it is of the same requests as the last step, with a token each.
        """
        is_repeat = is_alike and self.num_repeats > 0
        if is_repeat:
            self.num_repeats -= 1
        return is_repeat

    def rest(self, load: Load, num_requests: int, num_new: int = 0) -> Rest | None:
        """Return the rest that begins with a step, in which nothing is drafted whoever the requests are; ``None``: `choose`.

        That is so while it stands that nothing pays, and no probe is due; and where drafting pays, in the plain steps in a row that
        show what such steps cost.

        Args:
            load: of the step, without candidates.
            num_requests: that emit tokens.
            num_new: requests among them that emit their first one.
        """
        self._end_rest()
        self.num_repeats = 0
        if not self._standing.begin(num_requests, load.num_lasting, num_new):
            self._standing.end()
        elif self._num_plain_left > 1 if self.optimum.drafts else not self._probes.is_due:
            self._count_rests(1)
            plain_seconds = self.costs.plain_seconds(load, num_requests)
            self._rest = Rest(load, num_requests, LONG_REPEAT * plain_seconds)
            if load.num_rows == num_requests:
                self.num_repeats = self._rest.num_allowed = self._num_resting(plain_seconds)
        return self._rest

    def _num_resting(self, plain_seconds: float) -> int:
        """Return how many more steps of this time are rests, of which all find cold caches, or none."""
        if self.optimum.drafts:
            most = self._num_plain_left - 1
        else:
            most = max(0, self._probes.num_steps_until_due(plain_seconds, self._standing.num_left + 1) - 1)
        num_cold = self._probes.num_cold
        return min(most, num_cold - 1) if num_cold else most

    def _end_rest(self) -> None:
        """Learn from the last rest."""
        rest, self._rest = self._rest, None
        if rest is None:
            return
        self._count_rests(rest.num_allowed - self.num_repeats)
        if self.optimum.drafts and self._num_plain_left <= 1:
            self._standing.end()  # what plain steps cost is known anew
        if not rest.num_steps:
            return
        load, n, num_steps = rest.mean_load, rest.num_requests, rest.num_steps
        self._probes.observe(rest.seconds, self.costs.plain_seconds(load, n), None, n, num_steps=num_steps)
        self.costs.note_plain(load, n, *rest.typical_seconds, num_steps)

    def _count_rests(self, num_steps: int) -> None:
        self._num_rested += num_steps
        if self.optimum.drafts:  # these are none of the steps for which it stands
            self._num_plain_left -= num_steps
        else:
            self._standing.pass_steps(num_steps)

    def choose(self, load: Load, *, has_room: bool = True) -> Decision:
        """Decide what the candidates of a step draft.

        Args:
            load: of the step.
            has_room: whether room is reserved for drafts; without it, nothing is drafted in this step.
        """
        if self._alike:
            self._end_repeats()
        self._load, self.num_repeats = load, 0
        if not _are_same(self._compared, [each.counts for each in load.candidates]):
            self._standing.end()
        if self._num_rested:
            self._idle(load.candidates, self._num_rested)
            self._num_rested = 0
        self._decision = self._decide(load, has_room)
        return self._decision

    def _decide(self, load: Load, has_room: bool) -> Decision:
        n, is_over, self._has_compared = len(load.candidates), self._standing.num_left <= 0, False
        if is_over:
            self._learn()
        if not n or not self.costs.host.knows(n):  # a plain step shows what it costs to draft
            return _nothing(load)
        if is_over:
            self._compare(load)
        if self.optimum.drafts and (not has_room or self._is_plain_due()):  # none of the steps for which it stands
            return _nothing(load)
        best_nodes = [min(count, each.max_nodes) for count, each in zip(self.optimum.num_nodes, load.candidates, strict=True)]
        probed = self._probes.choose(load, self.costs, best_nodes, self._estimates.means, self._hoped)
        reviewed = [i for i in probed if load.candidates[i].num_reviewable is not None]
        if len(reviewed) < len(probed) and not has_room:
            return _nothing(load)
        self._standing.pass_steps(1)
        return self._decision_for(load, self._delay(load, best_nodes), probed, reviewed)

    def _decision_for(self, load: Load, planned: list[int], probed: Sequence[int], reviewed: Sequence[int]) -> Decision:
        """Return the decision by which candidates draft what is planned, and some are probed.

        Args:
            load: of the step.
            planned: nodes of each candidate, probes left out.
            probed: candidates that are probed, which draft nothing else.
            reviewed: those of them that are reviewed.
        """
        worths = [
            worth if count and each.stops_early else None
            for worth, count, each in zip(self._worths, planned, load.candidates, strict=True)
        ]
        num_nodes = [1 if i in probed and i not in reviewed else count for i, count in enumerate(planned)]
        most_nodes = [  # of a probe, which has no worth: its node
            count if worth is None else min(each.max_nodes, count + self.optimum.slack)
            for count, worth, each in zip(num_nodes, worths, load.candidates, strict=True)
        ]
        is_probe = bool(probed) and not any(planned)
        is_fed = [each.is_fed for count, each in zip(planned, load.candidates, strict=True) if count]
        is_steady = bool(is_fed) and not probed and all(is_fed)
        return Decision(num_nodes, most_nodes, worths, probed, reviewed, is_probe, is_steady)

    def _is_plain_due(self) -> bool:
        """Whether a step without drafts should show what such steps cost: the more often, the less drafting gains."""
        if self._num_plain_left:
            self._num_plain_left -= 1
        else:
            self._num_drafting += 1
            if self._num_drafting >= self._plain_after:
                self._num_drafting, self._num_plain_left = 0, NUM_PLAIN
        return self._num_plain_left > 0

    def _delay(self, load: Load, num_nodes: list[int]) -> list[int]:
        """Let requests wait, those that owe most, and never all, while feeding the draft would take longer than it may.

        Returns:
            The nodes of each candidate: none of those that wait.
        """
        owing = [i for i, count in enumerate(num_nodes) if count and not load.candidates[i].is_fed]
        if self.costs.draft is None or not owing:
            return num_nodes
        most = MAX_FEED * min(self._num_drafts() / FEED_DRAFTS, 1.0) * self.costs.plain_seconds(load)
        first, *others = sorted(owing, key=lambda i: load.candidates[i].num_missing)
        num_rows, waiting = load.candidates[first].num_missing, set[int]()
        for i in others:
            num_rows += load.candidates[i].num_missing
            if self.costs.draft.predict(num_rows, load.num_context_tokens) > most:
                waiting.add(i)
        return [0 if i in waiting else count for i, count in enumerate(num_nodes)]

    def _compare(self, load: Load) -> None:
        """Find the best setting, and that which might be the best."""
        self._has_compared = True
        self.past.follow([each.counts for each in load.candidates if each.is_typical], self.fleet.agreement)
        self._compared = [each.counts for each in load.candidates]
        estimates = self._estimates = estimate(self.fleet, self.past, self._compared)
        prices = self._prices = Prices(load, self.costs)
        plain_seconds = self.costs.plain_seconds(load._replace(num_rows=load.num_lasting))
        self._probes.forget()
        least = 1 - MARGIN if self.optimum.drafts else 1 + MARGIN
        self.optimum = best(estimates.means, prices, self.drafting_yield.factor, least)
        if not self.optimum.drafts:
            self._num_plain_left = 0
        gain = self.optimum.rate / self.optimum.off_rate - 1
        self._plain_after = min(PLAIN_STEPS * (1 + gain / PLAIN_GAIN), MOST_PLAIN_AFTER)
        self._worths = [self._worth(i, prices) if self.optimum.num_nodes[i] else None for i, each in enumerate(load.candidates)]
        self._hoped = self.optimum.num_nodes
        if not all(self._hoped):
            self._hoped = best(estimates.bounds, prices, self.drafting_yield.factor).num_nodes
        self._standing.renew(load, self.optimum.num_nodes, self._num_drafts(), plain_seconds)

    def _num_drafts(self) -> float:
        """Return how many drafts tell most: the fleet's, or those of a request, since some teach nothing about others."""
        return max(each.num_drafts for each in (self.fleet, *self._compared))

    def _worth(self, i: int, prices: Prices) -> Worth:
        estimates, price = self._estimates, self.optimum.on_rate / prices.load.candidates[i].weight
        return Worth(
            agreement=estimates.agreements[i],
            acceptance=estimates.means[i],
            node_price=price * self.optimum.node_seconds,
            row_price=price * prices.row_seconds,
            pass_price=max(price * prices.pass_seconds, 1e-9),
        )

    def observe(self, outcome: Outcome) -> None:
        """Take note of what came of the step that was last decided.

        While drafting pays, steps are learned from before the next comparison, which is the first to go by what they say, but for
        the account of probes: all at once, this takes a quarter of the time that it takes step by step, each with cold caches.
        """
        decision = self._decision
        self.has_tried |= decision.drafts or bool(decision.reviewed)
        if self._has_compared:
            self._standing.note_comparison(outcome.deciding_seconds)
        if decision.is_steady:
            num_until_plain = ceil(self._plain_after - self._num_drafting) - 1
            self.num_repeats = max(0, min(self._standing.num_left, num_until_plain))
            self.note_repeat(outcome)
            return
        self._unlearned.append((self._load, decision, outcome, 1))
        if decision.probed or not decision.drafts:
            self._learn()
        if decision.is_probe and self._may_pay(decision.probed):
            self._standing.end()

    def _may_pay(self, probed: Sequence[int]) -> bool:
        """Whether drafting may pay after a probe: it was hoped for, or someone showed more than was hoped for."""
        shown = [own_acceptance(self._load.candidates[i].counts, self.fleet.agreement) for i in probed]
        return any(self._hoped) or any(p > self._estimates.bounds[i] for p, i in zip(shown, probed, strict=True))

    def note_repeat(self, outcome: Outcome) -> None:
        """Take note of a step that drafted as the last one that was decided, which is the first of these; it may be the last."""
        self._alike.append(outcome)
        if self._standing.note_drafts(outcome.num_accepted):
            self._forget(self._load.candidates, LACKING_FADE)
        if self._standing.num_left <= 0 or not outcome.num_nodes:
            self.num_repeats = 0

    def _end_repeats(self) -> None:
        """Let the last decision be learned from together with all steps that repeated it."""
        outcomes, self._alike = self._alike, []
        num_repeats, num_tokens = len(outcomes) - 1, sum([len(self._load.candidates) + each.num_accepted for each in outcomes])
        self._standing.pass_steps(num_repeats)
        self._num_drafting += num_repeats
        load = self._load._replace(num_context_tokens=self._load.num_context_tokens + num_tokens // 2)
        most = LONG_REPEAT * self.optimum.seconds
        usual = [each for each in outcomes if each.seconds <= most]
        if usual:
            self._unlearned.append((load, self._decision, Outcome.total(usual), len(usual)))
        self._unlearned += [(load, self._decision, each, 1) for each in outcomes if each.seconds > most]
        if len(usual) < len(outcomes) / 2 and self._num_drafting >= PLAIN_STEPS:  # steps without drafts may have changed, too
            self._num_drafting = MOST_PLAIN_AFTER  # enough, whatever drafting gains

    def _learn(self) -> None:
        """Learn from the steps that were observed."""
        for each in self._unlearned:  # before the costs that they were planned by change
            self._note_yield(*each)
        for each in self._unlearned:
            self._learn_from(*each)
        self._unlearned.clear()

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

    def _note_yield(self, load: Load, decision: Decision, total: Outcome, num_steps: int) -> None:
        """Compare what steps brought with what was planned, if they had nothing else to do, and the plan was for such steps."""
        planned, prices, n = self.optimum, self._prices, len(load.candidates)
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
        chains = [(decision.num_nodes[i] * share, self._estimates.means[i]) for i in drafting]
        promised = num_steps * sum([p * (1 - p**count) / (1 - p) if p < 1 else count for count, p in chains])
        self.drafting_yield.note(total.num_accepted, promised, num_steps)

    def _age_counts(self, load: Load, decision: Decision, num_steps: int) -> None:
        """Let older drafts count less."""
        if not decision.drafts and not decision.reviewed:
            self._idle(load.candidates, num_steps)
            return
        fade, reviewed = IDLE_FADE**num_steps, decision.reviewed
        for i, (count, candidate) in enumerate(zip(decision.num_nodes, load.candidates, strict=True)):
            if not count and i not in reviewed:
                candidate.counts.fade(fade)

    def _idle(self, candidates: Sequence[Candidate], num_steps: int) -> None:
        """Let drafts count less after steps without any."""
        fade = IDLE_FADE**num_steps
        self._forget(candidates, fade)
        self.drafting_yield.fade(num_steps)

    def _forget(self, candidates: Sequence[Candidate], share: float) -> None:
        """Let the drafts of these and of all count for this share of what they did."""
        for each in candidates:
            each.counts.fade(share)
        self.fleet.fade(share, LEAST_DRAFTS)


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether two sequences are of the same objects in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))


def _nothing(load: Load) -> Decision:
    """Return the decision that no candidate drafts."""
    nobody = [0] * len(load.candidates)
    return Decision(nobody, nobody, [None] * len(load.candidates))
