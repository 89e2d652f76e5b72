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
from math import ceil
from operator import is_

from titan.adaptive.comparison import NOTHING_COMPARED, compare
from titan.adaptive.costs import COLD_PLAIN_STEPS, Costs
from titan.adaptive.lessons import Lessons
from titan.adaptive.load import Decision, Load, Outcome
from titan.adaptive.optimum import Optimum
from titan.adaptive.probes import Probes
from titan.adaptive.rest import Rest
from titan.adaptive.standing import Standing
from titan.adaptive.value import PastRequests, estimate, own_acceptance
from titan.core.draft_history import AcceptanceCounts

LACKING_FADE = 1 / 4
"""Share that counts keep of all drafts where drafts bring much less than they did: most of them are of before that."""

NUM_PLAIN = COLD_PLAIN_STEPS + 2
"""Steps in a row between drafts that are plain, to see what such steps cost."""

PLAIN_STEPS, PLAIN_GAIN = 24, 0.05
"""Drafting steps before the first of these; twice as many if drafting gains that share, and so on."""

MOST_PLAIN_AFTER = int(PLAIN_STEPS * (1 + 1 / PLAIN_GAIN))
"""Most such steps, as many as where drafting doubles the rate."""

LONG_REPEAT = 1.5
"""Steps that take more than this many times as long as planned are learned from one by one, others that do alike from their sum. If
most do, some are plain next."""

MAX_FEED, FEED_DRAFTS = 1.0, 8.0
"""Plain steps in whose time the draft may be fed in one step what it has missed of several requests; and the number of drafts from
which on it is as much, less in proportion where fewer were seen."""


class Controller:
    """Decides, from measured costs and acceptance, what each step drafts.

    Args:
        costs: of steps, as far as they are known.
    """

    def __init__(self, costs: Costs) -> None:
        self._probes = Probes()
        self._lessons = Lessons(costs, self._probes)
        self.costs, self.past = costs, PastRequests()
        self.compared = NOTHING_COMPARED
        self.has_tried = False  # whether anything was ever drafted or reviewed
        self._standing = Standing()
        self._has_compared = False  # in the last decision
        self.num_repeats = 0  # next steps of the same requests, one token each, that may do as the last one, undecided
        self._num_rested = 0  # steps since anything was decided
        self._rest: Rest | None = None  # that goes on
        self._num_plain_left = 0  # plain steps in a row, the present one included, that show what such steps cost
        self._num_drafting = 0  # steps with drafts since the last of these
        self._plain_after = 0.0  # such steps after which some are to be plain again
        self._load: Load = Load((), 0, 0)
        self._decision = Decision([], (), ())
        self._alike: list[Outcome] = []  # what came of the last decision, and of its repeats

    @property
    def optimum(self) -> Optimum:
        """The best of the settings that were compared last."""
        return self.compared.optimum

    @property
    def fleet(self) -> AcceptanceCounts:
        """Counts of the last drafts of all requests."""
        return self._lessons.fleet

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
        if rest.num_steps:
            self._lessons.learn_rest(rest)

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
        if not _are_same(self.compared.counts, [each.counts for each in load.candidates]):
            self._standing.end()
        if self._num_rested:
            self._lessons.idle(load.candidates, self._num_rested)
            self._num_rested = 0
        self._decision = self._decide(load, has_room)
        return self._decision

    def _decide(self, load: Load, has_room: bool) -> Decision:
        n, is_over, self._has_compared = len(load.candidates), self._standing.num_left <= 0, False
        if is_over:
            self._lessons.learn(self.compared)
        if not n or not self.costs.host.knows(n):  # a plain step shows what it costs to draft
            return Decision.nothing(load)
        if is_over:
            self._compare(load)
        if self.optimum.drafts and (not has_room or self._is_plain_due()):  # none of the steps for which it stands
            return Decision.nothing(load)
        best_nodes = [min(count, each.max_nodes) for count, each in zip(self.optimum.num_nodes, load.candidates, strict=True)]
        probed = self._probes.choose(load, self.costs, best_nodes, self.compared.estimates.means, self.compared.hoped)
        reviewed = [i for i in probed if load.candidates[i].num_reviewable is not None]
        if len(reviewed) < len(probed) and not has_room:
            return Decision.nothing(load)
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
            for worth, count, each in zip(self.compared.worths, planned, load.candidates, strict=True)
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
        counts = [each.counts for each in load.candidates]
        estimates, factor = estimate(self.fleet, self.past, counts), self._lessons.drafting_yield.factor
        self._probes.forget()
        self.compared = compare(load, self.costs, counts, estimates, factor, is_drafting=self.optimum.drafts)
        if not self.optimum.drafts:
            self._num_plain_left = 0
        self._plain_after = min(PLAIN_STEPS * (1 + self.compared.gain / PLAIN_GAIN), MOST_PLAIN_AFTER)
        plain_seconds = self.costs.plain_seconds(load._replace(num_rows=load.num_lasting))
        self._standing.renew(load, self.optimum.num_nodes, self._num_drafts(), plain_seconds)

    def _num_drafts(self) -> float:
        """Return how many drafts tell most: the fleet's, or those of a request, since some teach nothing about others."""
        return max(each.num_drafts for each in (self.fleet, *self.compared.counts))

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
        self._lessons.add(self._load, decision, outcome)
        if decision.probed or not decision.drafts:
            self._lessons.learn(self.compared)
        if decision.is_probe and self._may_pay(decision.probed):
            self._standing.end()

    def _may_pay(self, probed: Sequence[int]) -> bool:
        """Whether drafting may pay after a probe: it was hoped for, or someone showed more than was hoped for."""
        shown = [own_acceptance(self._load.candidates[i].counts, self.fleet.agreement) for i in probed]
        bounds = self.compared.estimates.bounds
        return any(self.compared.hoped) or any(p > bounds[i] for p, i in zip(shown, probed, strict=True))

    def note_repeat(self, outcome: Outcome) -> None:
        """Take note of a step that drafted as the last one that was decided, which is the first of these; it may be the last."""
        self._alike.append(outcome)
        if self._standing.note_drafts(outcome.num_accepted):
            self._lessons.forget(self._load.candidates, LACKING_FADE)
        if self._standing.num_left <= 0 or not (outcome.num_nodes or outcome.num_draft_passes):
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
            self._lessons.add(load, self._decision, Outcome.total(usual), len(usual))
        for each in outcomes:
            if each.seconds > most:
                self._lessons.add(load, self._decision, each)
        if len(usual) < len(outcomes) / 2 and self._num_drafting >= PLAIN_STEPS:  # steps without drafts may have changed, too
            self._num_drafting = MOST_PLAIN_AFTER  # enough, whatever drafting gains


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether two sequences are of the same objects in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))
