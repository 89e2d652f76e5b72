"""The law of adaptive speculation: which requests draft in a step, how much, and where growth ends.

A step that drafts is worth its time if it emits more tokens per second than one that does not. With p the probability that a node's
first child is accepted, n requests that emit one token each anyway, and chains that reach depth d with probability p**d::

    rate(L, B) = (n + sum of the B largest p_i**d with d <= L) / (host + draft(L passes, B rows) + target(rows + B, context))

The best L and B say which requests draft. Where the draft's own confidence is known while a tree grows, growth then ends by prices,
which are seconds times that rate (`titan.core.growth.Worth`): at the optimum of a quotient, a part pays as long as its own quotient
is above the whole's (Dinkelbach, "On nonlinear fractional programming", 1967; the marginal value theorem of Charnov, 1976). Where
it is not known, requests draft the nodes that the optimum has of them.

Everything here is a function of what it is given: there is no clock and no device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from titan.adaptive.cost import PassCost
from titan.adaptive.value import estimate_fleet
from titan.core.draft_history import AcceptanceCounts
from titan.core.growth import Worth

DWELL = 8
"""Steps for which an optimum stands if the requests stay the same."""

PRIOR_AGREEMENT, PRIOR_NODES = 0.7, 3.0
"""Accepted nodes as a multiple of those that the draft expects, before any was verified, and how many nodes this counts as."""

PRIOR_CONFIDENCE, PRIOR_DRAFTS = 0.6, 2.0
"""The same of the draft's confidence."""

IDLE_FADE = 0.975
"""Share that counts keep per step of what a request that does not draft has shown: while others draft, and while none does."""

LEAST_DRAFTS = 1.5
"""Number of drafts that what the fleet has ever shown counts as at least."""

PROBE_SHARE = 0.015
"""Share of the time for probes: one node of a request that would not draft, to see whether it would pay."""

OVERDRAFT = 1.0
"""Steps whose time may be spent on probes in advance while they promise something."""

OPTIMISM = 1.0
"""Standard errors by which the draft may turn out better than it seems; while that would make it pay, it is probed at once."""

MAX_WARM = 8

MARGIN = 0.01
"""Share by which drafting must be expected to gain before it begins."""

GRID_SIZES, GRID_DEPTHS = 16, 8
"""Numbers of nodes, and of depths, up to which all are compared; further ones are a quarter apart."""

FIRST_STEPS = 2
"""Steps of a kind after which their host's time counts as known."""

DEBT_STEPS = 96
"""Steps over which the cost of feeding the draft what it has missed is spread."""


class Candidate(NamedTuple):
    """A request that emits tokens in a step."""

    counts: AcceptanceCounts
    max_nodes: int  # that it may draft; 0: none
    num_missing: int  # committed tokens that the draft has not seen, the root included
    stops_early: bool  # whether the draft's confidence may end its tree; else it drafts the nodes that its history says
    weight: float = 1.0  # of its tokens


class Load(NamedTuple):
    """A step without drafts."""

    candidates: Sequence[Candidate]
    num_rows: int  # of the target's pass: the candidates' roots and prefill chunks
    num_context_tokens: int  # before these rows, of all requests


class Decision(NamedTuple):
    """What each candidate drafts."""

    num_nodes: Sequence[int]  # 0: nothing
    worths: Sequence[Worth | None]  # where growth may go on beyond these nodes or end before, by confidence; None: it may not
    is_probe: bool = False

    @property
    def drafts(self) -> bool:
        """Whether any candidate drafts."""
        return any(self.num_nodes)


class Outcome(NamedTuple):
    """What came of a step."""

    num_tokens: int  # emitted
    num_nodes: int  # verified
    num_accepted: int
    num_draft_passes: int
    num_draft_rows: int
    seconds: float  # of the step
    draft_seconds: float
    target_seconds: float


@dataclass(slots=True)
class Optimum:
    """The best of the compared settings of a load, as far as histories say; zero nodes if not drafting is the best."""

    num_nodes: list[int]
    rate: float  # weighted tokens per second
    off_rate: float
    node_seconds: float = 0.0  # of one more node in the target's pass
    row_seconds: float = 0.0  # of one more row in a pass of the draft
    pass_seconds: float = 0.0  # of a pass of the draft, without its rows

    @property
    def drafts(self) -> bool:
        """Whether any request drafts."""
        return any(self.num_nodes)


@dataclass(slots=True)
class HostTime:
    """Seconds of a step beyond its passes, by requests' power of two, with and without drafts."""

    seconds: dict[tuple[bool, int], float] = field(default_factory=dict)
    counts: Counter[tuple[bool, int]] = field(default_factory=Counter)

    def note(self, is_drafting: bool, num_requests: int, seconds: float) -> None:
        """Add a step. Of the first few, which may have been held up by anything, the shortest counts."""
        key = is_drafting, num_requests.bit_length()
        before = self.seconds.get(key, seconds)
        self.counts[key] += 1
        if self.counts[key] <= FIRST_STEPS:
            self.seconds[key] = min(seconds, before)
        else:
            self.seconds[key] = before + (min(seconds, 2 * before) - before) / 8

    def knows(self, is_drafting: bool, num_requests: int) -> bool:
        """Whether a few such steps were seen."""
        return self.counts[is_drafting, num_requests.bit_length()] >= FIRST_STEPS

    def predict(self, is_drafting: bool, num_requests: int) -> float:
        """Return the expected seconds; where only the other kind of step is known, those."""
        octave = num_requests.bit_length()
        known = self.seconds.get((is_drafting, octave))
        return self.seconds.get((not is_drafting, octave), 0.0) if known is None else known


class Controller:
    """Decides, from measured costs and acceptance, what each step drafts.

    Args:
        target: cost of the target's passes.
        draft: cost of the draft's passes; ``None``: it is part of the host's time.
        is_timed: whether the times of passes are known; else only those of steps.
    """

    def __init__(self, target: PassCost, draft: PassCost | None, *, is_timed: bool = True) -> None:
        self.target, self.draft, self._is_timed = target, draft, is_timed
        self.host = HostTime()
        self.fleet = AcceptanceCounts(PRIOR_NODES * PRIOR_AGREEMENT, PRIOR_NODES, PRIOR_CONFIDENCE, PRIOR_DRAFTS)
        self._estimate = estimate_fleet(self.fleet, ())
        self.optimum = Optimum([], 0.0, 0.0)
        self._key: tuple[int, ...] = ()
        self._age = 0
        self._promising: list[int] = []
        self._credit, self._spent = 0.0, 0.0
        self._load: Load = Load((), 0, 0)
        self._decision = Decision((), ())

    def choose(self, load: Load) -> Decision:
        """Decide what the candidates of a step draft."""
        self._load = load
        self._decision = self._decide(load)
        return self._decision

    def _decide(self, load: Load) -> Decision:
        n = len(load.candidates)
        self._spent = 0.0
        if not n or not self.host.knows(False, n):  # a plain step shows what it costs to draft
            return Decision([0] * n, [None] * n)
        key = n, load.num_rows.bit_length(), max(each.max_nodes for each in load.candidates)
        self._age += 1
        if key != self._key or self._age >= DWELL:
            self._key, self._age = key, 0
            self._estimate = estimate_fleet(self.fleet, [each.counts for each in load.candidates])
            mean = np.array([self._estimate.acceptance_of(each.counts) for each in load.candidates])
            spread = np.sqrt(mean * (1 - mean))
            cold = np.array([each.num_missing > MAX_WARM for each in load.candidates])
            sure = np.maximum(mean - cold * spread / np.sqrt(1 + self.fleet.num_drafts), 0.0)
            self.optimum = self.best(load, sure)
            seen = np.array([each.counts.num_drafts for each in load.candidates]) + min(self.fleet.num_drafts, self._estimate.strength)
            self._hope = np.minimum(mean + spread / np.sqrt(1 + seen), 1.0)
            self._promising = self.best(load, self._hope).num_nodes
        best = self.optimum
        num_nodes = [min(count, each.max_nodes) for count, each in zip(best.num_nodes, load.candidates, strict=True)]
        worths = [self._worth(each, best) if count else None for count, each in zip(num_nodes, load.candidates, strict=True)]
        probed = self._probed(load, num_nodes)
        if probed is not None:
            num_nodes[probed] = 1
        return Decision(num_nodes, worths, is_probe=probed is not None)

    def _worth(self, candidate: Candidate, best: Optimum) -> Worth | None:
        if not candidate.stops_early:
            return None
        price = best.rate / candidate.weight
        counts = candidate.counts
        return Worth(
            self._estimate.agreement_of(counts),
            self._estimate.acceptance_of(counts),
            price * best.node_seconds,
            price * best.row_seconds,
            max(price * best.pass_seconds, 1e-9),
        )

    def best(self, load: Load, acceptance: NDArray[np.float64]) -> Optimum:
        """Compare the settings of a load, and return the best.

        Args:
            load: of the step.
            acceptance: of each candidate.
        """
        candidates, n = load.candidates, len(load.candidates)
        weights = np.array([each.weight for each in candidates])
        most = np.array([each.max_nodes for each in candidates])
        longest = int(most.max())
        base = self.target.predict(load.num_rows, load.num_context_tokens)
        off_rate = float(weights.sum()) / (self.host.predict(False, n) + base)
        optimum = Optimum([0] * n, off_rate, off_rate)
        if not longest:
            return optimum
        depths = np.arange(1, longest + 1)
        values = np.where(depths <= most[:, None], acceptance[:, None] ** depths * weights[:, None], 0.0)
        order = np.argsort(-values, axis=None, kind="stable")[: int(most.sum())]
        of_request, of_depth = np.divmod(order, longest)
        sorted_values = values.ravel()[order]
        pass_seconds, row_seconds = self._draft_line(n, load)
        missing = np.array([1 + (each.num_missing - 1) / DEBT_STEPS for each in candidates])
        sizes = _grid(len(order), GRID_SIZES)
        target = np.array([self.target.predict(load.num_rows + size, load.num_context_tokens) for size in [*sizes, 2 * sizes[-1]]])
        for num_passes in _grid(longest, GRID_DEPTHS):
            kept = of_depth < num_passes
            requests = of_request[kept]
            gains = sorted_values[kept].cumsum()
            rows = np.where(of_depth[kept] == 0, missing[requests], 1.0).cumsum()
            at = np.array([size for size in sizes if size <= len(gains)]) - 1
            seconds = self.host.predict(True, n) + num_passes * pass_seconds + row_seconds * rows[at] + target[: len(at)]
            rates = (weights.sum() + gains[at]) / seconds
            place = int(rates.argmax())
            if rates[place] > optimum.rate * (1 + (MARGIN if optimum.rate == off_rate else 0.0)):
                size, above = sizes[place], [*sizes, 2 * sizes[-1]][place + 1]
                counts = np.bincount(requests[:size], minlength=n).tolist()
                slope = max(float(target[place + 1] - target[place]), 0.0) / (above - size)
                optimum = Optimum(counts, float(rates[place]), off_rate, slope, row_seconds, pass_seconds)
        return optimum

    def _draft_line(self, n: int, load: Load) -> tuple[float, float]:
        """Return the seconds of a pass of the draft, whatever its rows, and of each row, near n rows."""
        if self.draft is None:
            return 0.0, 0.0
        context = load.num_context_tokens
        first, second = self.draft.predict(n, context), self.draft.predict(2 * n, context)
        per_row = min(max((second - first) / n, 0.0), first / n)
        return first - n * per_row, per_row

    def _probed(self, load: Load, num_nodes: Sequence[int]) -> int | None:
        """Return the candidate that is to be probed in a step in which others draft so many nodes."""
        able = [i for i, each in enumerate(load.candidates) if each.max_nodes and not num_nodes[i]]
        if not able:
            return None
        n, context = len(load.candidates), load.num_context_tokens
        node_seconds = self.target.predict(load.num_rows + 1, context) - self.target.predict(load.num_rows, context)
        costs = {i: node_seconds + self._feed_seconds(load, i, any(num_nodes)) for i in able}
        promising = [i for i in able if self._promising[i]]
        if promising:
            probed = max(promising, key=lambda i: (self._estimate.acceptance_of(load.candidates[i].counts), -costs[i]))
        else:
            probed = min(able, key=lambda i: costs[i] * (1 + load.candidates[i].counts.num_drafts))
        overdraft = bool(promising) * OVERDRAFT * n / self.optimum.off_rate
        if self._credit + overdraft < costs[probed]:
            return None
        self._spent = costs[probed]
        self._before = load.candidates[probed].counts.num_drafts, self._own(load.candidates[probed].counts)
        return probed

    def _feed_seconds(self, load: Load, i: int, drafts: bool) -> float:
        """Return what it costs to let a candidate draft a node, beside others or alone."""
        n, num_missing = len(load.candidates), load.candidates[i].num_missing
        if drafts:
            return num_missing * self.optimum.row_seconds
        draft = 0.0 if self.draft is None else self.draft.predict(num_missing, load.num_context_tokens / n)
        return draft + max(self.host.predict(True, n) - self.host.predict(False, n), 0.0)

    def _own(self, counts):
        return counts.confidence * min(1.0, (counts.num_accepted + self.fleet.agreement) / (counts.num_expected + 1))

    @property
    def is_probe_due(self) -> bool:
        """Whether there may be a probe in the next step."""
        return any(self._promising) or self._credit > 0

    def observe(self, outcome: Outcome) -> None:
        """Learn from the step that was last decided."""
        load, decision = self._load, self._decision
        n, num_drafting = len(load.candidates), sum(map(bool, decision.num_nodes))
        rows, context = load.num_rows + outcome.num_nodes, load.num_context_tokens
        if not self._is_timed:
            self._note_together(outcome, rows, num_drafting)
        else:
            self.target.note(rows, context, outcome.target_seconds)
        if not n:
            return
        self.host.note(decision.drafts, n, outcome.seconds - outcome.draft_seconds - outcome.target_seconds)
        is_caught_up = all(each.num_missing <= 2 for count, each in zip(decision.num_nodes, load.candidates, strict=True) if count)
        if self.draft is not None and (passes := outcome.num_draft_passes) and is_caught_up:
            per_pass = max(1.0, outcome.num_draft_rows / passes)
            self.draft.note(per_pass, context * num_drafting / n, outcome.draft_seconds / passes)
        self._credit += PROBE_SHARE * outcome.seconds
        if decision.is_probe:
            earned = outcome.num_accepted / self.optimum.off_rate if sum(decision.num_nodes) == 1 else 0.0
            self._credit -= max(self._spent - earned, 0.0)
        if n:
            self._credit = min(self._credit, 2 * n / self.optimum.off_rate if self.optimum.off_rate else 0.0)
        if decision.is_probe:
            if sum(decision.num_nodes) == 1:
                counts = load.candidates[decision.num_nodes.index(1)].counts
                weight, own = self._before
                surprise = abs(self._own(counts) - own) * counts.num_drafts * weight / (weight + 1)
                share = max(0.0, 1 - surprise)
                self.fleet.fade(share)
                for each in load.candidates:
                    if each.counts is not counts:
                        each.counts.fade(share)
        if decision.is_probe:
            if sum(decision.num_nodes) == 1:
                self._key = ()
        drafts = self.optimum.drafts
        for count, candidate in zip(decision.num_nodes, load.candidates, strict=True):
            if not count:
                candidate.counts.fade(IDLE_FADE)
        if not decision.drafts:
            self.fleet.fade(IDLE_FADE, LEAST_DRAFTS)

    def _note_together(self, outcome: Outcome, num_rows: int, num_drafting: int) -> None:
        """Note passes of target and draft, whose time together is known: each as the same multiple of what was expected."""
        context = self._load.num_context_tokens
        target = self.target.predict(num_rows, context)
        if self.draft is None or not num_drafting:
            self.target.note(num_rows, context, outcome.target_seconds)
            return
        of_draft, passes = context * num_drafting / len(self._load.candidates), max(self._decision.num_nodes)
        draft = self.draft.predict(num_drafting, of_draft)
        ratio = outcome.target_seconds / (target + passes * draft)
        self.target.note(num_rows, context, ratio * target)
        self.draft.note(num_drafting, of_draft, ratio * draft)


def _grid(most: int, exact: int) -> list[int]:
    """Return numbers from 1 to ``most``: all up to ``exact``, then those about a quarter apart."""
    numbers = list(range(1, min(most, exact) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] * 5 // 4))
    return numbers
