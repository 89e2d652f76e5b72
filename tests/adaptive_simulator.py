"""A simulated engine for the controller: made-up texts and costs, no clock and no model."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log
from typing import Any, NamedTuple, Protocol

import numpy as np

from titan.adaptive.controller import Controller
from titan.adaptive.costs import Costs
from titan.adaptive.load import Candidate, Decision, Load, Outcome
from titan.adaptive.pass_cost import PassCost
from titan.adaptive.rest import Rest
from titan.core.draft_history import AcceptanceCounts
from titan.core.growth import Worth
from titan.draft.draft_model import MAX_REVIEWED

Cost = Callable[[float, float], float]  # seconds of rows and context tokens
LENGTHS = (1, 2, 3, 4, 6)

MEAN_CONTEXT = 191.5
"""Of a text, in tokens."""
NOISE, OUTLIERS, OUTLIER = 0.03, 0.01, 2.0
"""Of the times of passes; the share of those that take several times as long, and how long these take."""
MEAN_NOISE = exp(NOISE**2 / 2) * (1 + OUTLIERS * (OUTLIER - 1))

COLD_MEMORY = 0.8
"""Share of what drafts leave of cold caches that a step without drafts leaves."""

FIRST_DRAFT = 1.5
"""How many times as long the host takes in the first step of all that drafts, whose caches are cold."""


@dataclass(frozen=True)
class Machine:
    """True times of passes."""

    name: str
    target: Cost
    draft: Cost
    host: Callable[[int, int], float]  # of requests, and of those that draft
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    is_padded: bool = False
    warm: float = 1.0  # time of steps without drafts where all are, as a multiple: small models then stay in the caches
    deciding: float = 1e-5  # seconds of a decision with which the last one stands
    comparing: tuple[float, float] = (1e-4, 2e-5)  # of one that compares: whatever the requests, and of each of them

    def __str__(self) -> str:
        return self.name

    def curve(self, cost: Cost) -> PassCost:
        """As profiled: without context, and one length of context."""
        per_token = (cost(8, 8 * 512) - cost(8, 0)) / (8 * 512)
        return PassCost(self.sizes, [cost(size, 0) for size in self.sizes], per_token, is_padded=self.is_padded)


def through(points: dict[int, float], per_token: float) -> Cost:
    """A line through measured points, in milliseconds, and a cost per context token."""
    sizes, times = list(points), [time / 1e3 for time in points.values()]
    slopes = [(times[i + 1] - times[i]) / (sizes[i + 1] - sizes[i]) for i in range(len(sizes) - 1)]

    def cost(rows: float, context: float) -> float:
        i = min(bisect_right(sizes, rows, 1) - 1, len(slopes) - 1)
        return times[i] + (max(rows, sizes[0]) - sizes[i]) * slopes[i] + per_token * context

    return cost


def stairs(base: float, per_step: float, step: int, compute: float, per_token: float) -> Cost:
    """A GPU: passes are padded to a multiple of ``step``; memory-bound until compute exceeds it."""
    return lambda rows, context: max(base, compute * -(-rows // step) * step) + per_step * -(-rows // step) + per_token * context


@dataclass(eq=False)
class Text:
    """One request: how often the draft is right, how that varies from token to token, and how well the draft knows it."""

    acceptance: float
    spread: float = 2.0  # of Beta: a + b
    honesty: float = 1.0  # power of the draft's confidence: below 1 it is too sure of itself, at 0 always sure
    stretch: float = 0.0  # mean length in tokens of easy and hard stretches; 0: none
    weight: float = 1.0
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    context: int = 128
    num_missing: int = 128
    num_tokens: int = 0
    is_easy: bool = True
    num_left: int | None = None  # tokens until it ends; None: it never does
    num_prefill: int = 0  # rows of its prompt that the next step runs
    unseen: deque[float] = field(init=False, default_factory=partial(deque, maxlen=MAX_REVIEWED))  # means of tokens to review

    def __str__(self) -> str:
        return f"{self.acceptance}, honesty {self.honesty}"

    @property
    def mean(self) -> float:
        """Probability of the next draft token to be accepted, on average over such tokens."""
        swing = 0.8 * min(self.acceptance, 1 - self.acceptance) if self.stretch else 0.0
        return min(max(self.acceptance + (swing if self.is_easy else -swing), 0.005), 0.995)

    def draw(self, mean: float, rng: np.random.Generator, *, is_confident: bool) -> tuple[float, float]:
        """Of a token: its probability to be accepted, and what the draft takes that for."""
        p = float(rng.beta(mean * self.spread, (1 - mean) * self.spread))
        if not is_confident:
            return p, 1.0
        q = min(max(p, 1e-6), 1 - 1e-6)
        return p, q if self.honesty == 1.0 else q**self.honesty

    def advance(self, num_tokens: int, is_fed: bool, rng: np.random.Generator) -> None:
        """Append emitted tokens."""
        self.num_tokens += num_tokens
        self.num_prefill = 0
        self.num_left = None if self.num_left is None else self.num_left - num_tokens
        self.context = 128 + (self.context + num_tokens) % 128  # as if requests ended and others began
        self.num_missing = 1 if is_fed else min(self.num_missing + num_tokens, self.context)
        if is_fed:
            self.unseen.clear()
        else:
            self.unseen.extend([self.mean] * num_tokens)
        if self.stretch and rng.random() < num_tokens / self.stretch:
            self.is_easy = not self.is_easy


class Policy(Protocol):
    """What decides in a step: the controller, or a rule to compare it with."""

    fleet: AcceptanceCounts

    def repeat(self, is_alike: bool) -> bool: ...

    def rest(self, load: Load, num_requests: int, num_new: int) -> Rest | None: ...

    def choose(self, load: Load) -> Decision: ...

    def observe(self, outcome: Outcome) -> None: ...

    def note_repeat(self, outcome: Outcome) -> None: ...


class Fixed:
    """Each request drafts as many nodes in each step; the last number is that of all further requests."""

    def __init__(self, *num_nodes: int) -> None:
        self.num_nodes, self.fleet = num_nodes, AcceptanceCounts()

    def repeat(self, is_alike: bool) -> bool:
        return False

    def rest(self, load: Load, num_requests: int, num_new: int) -> None:
        return None

    def choose(self, load: Load) -> Decision:
        n = len(load.candidates)
        counts = [self.num_nodes[min(i, len(self.num_nodes) - 1)] for i in range(n)]
        num_nodes = [min(count, each.max_nodes) for count, each in zip(counts, load.candidates, strict=True)]
        return Decision(num_nodes, num_nodes, [None] * n)

    def observe(self, outcome: Outcome) -> None:
        pass

    def note_repeat(self, outcome: Outcome) -> None:
        raise NotImplementedError


class Run(NamedTuple):
    """What came of some steps."""

    num_tokens: int
    seconds: float
    nodes: list[float]  # per request, of each step

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@dataclass
class Fleet:
    """Requests that run for ever."""

    machine: Machine
    texts: list[Text]
    max_nodes: int = 6
    stops_early: bool = True
    seed: int = 0
    noise: float = NOISE
    outliers: float = OUTLIERS
    outlier: float = OUTLIER
    chunk: int = 0  # rows of prefill in each step
    may_review: bool = True  # whether the draft can be compared with what was emitted without it
    has_drafted: bool = False
    coldness: float = 1.0  # of the caches, for a step without drafts
    before: list[Text] = field(default_factory=list)  # those of the last step, if each had one row
    rest: Rest | None = None  # that the last step was part of
    decision: Decision = field(default_factory=lambda: Decision([], [], []))  # that goes for the last step, if it was none
    policy: Policy | None = None  # of the last step

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        for text in self.texts:
            text.context += int(self.rng.integers(128))
            text.num_missing = text.context

    def run(self, policy: Policy, num_steps: int) -> Run:
        """Make steps."""
        tokens, seconds, nodes = 0, 0.0, []
        for _ in range(num_steps):
            step = self.step(policy)
            tokens, seconds = tokens + step[0], seconds + step[1]
            nodes.append(step[2] / len(self.texts))
        return Run(tokens, seconds, nodes)

    def step(self, policy: Policy) -> tuple[int, float, int]:
        """Make a step; return emitted tokens, seconds, nodes."""
        texts, machine, n = self.texts, self.machine, len(self.texts)
        context = sum(text.context for text in texts)
        num_ending = sum(text.num_prefill for text in texts)
        num_rows = n + self.chunk + num_ending
        is_alike = self.before == texts and num_rows == n
        is_alike = is_alike and (self.rest is not None or any(map(self._most, texts)))
        is_repeat = policy.repeat(is_alike and self.policy is policy)
        self.policy = policy
        self.before = texts[:] if num_rows == n else []
        optimum = getattr(policy, "optimum", None)
        if not is_repeat:
            load = Load((), num_rows, context, num_ending)
            self.rest = policy.rest(load, n, sum(text.num_prefill > 0 for text in texts))
            if self.rest is None:
                self.decision = policy.choose(load._replace(candidates=[self._candidate(text) for text in texts]))
        if self.rest is not None:
            warmth = self._warmth(is_plain=True)
            target_seconds = warmth * self._noisy(machine.target(num_rows, context))
            seconds = warmth * self._noisy(machine.host(n, 0)) + target_seconds
            for text in texts:
                text.advance(1, False, self.rng)
            self.rest.note(seconds, target_seconds)
            return n, seconds, 0
        decision = self.decision
        deciding = 0.0
        if isinstance(policy, Controller):
            compares = optimum is not policy.optimum
            deciding = machine.comparing[0] + n * machine.comparing[1] if compares else machine.deciding
        most = [min(count, self._most(text)) for count, text in zip(decision.most_nodes, texts, strict=True)]
        worths = decision.worths
        chains, num_passes, draft_rows, draft_seconds = self._grow(most, worths, context)
        trees = [
            chain if worth is None else [node for node in chain if node[2] >= worth.node_price]
            for chain, worth in zip(chains, worths, strict=True)
        ]
        total = sum(map(len, trees))
        num_drafting = sum(map(bool, chains)) + len(decision.reviewed)
        warmth = self._warmth(is_plain=not num_drafting)
        target_seconds = warmth * self._noisy(machine.target(num_rows + total, context))
        review = self._review(decision.reviewed, policy.fleet)
        host_seconds = warmth * machine.host(n, num_drafting) * (FIRST_DRAFT if total and not self.has_drafted else 1.0)
        self.has_drafted |= total > 0
        seconds = self._noisy(host_seconds) + draft_seconds + target_seconds + review[1]
        emitted = 0
        for text, tree, chain in zip(texts, trees, chains, strict=True):
            length = 0
            if chain:
                text.counts.note_draft(chain[0][1])
                policy.fleet.note_draft(chain[0][1])
            for p, q, _ in tree:
                is_accepted = bool(self.rng.random() < p)
                text.counts.note(q, is_accepted)
                policy.fleet.note(q, is_accepted)
                if not is_accepted:
                    break
                length += 1
            emitted += 1 + length
            text.advance(1 + length, bool(chain), self.rng)
        passes = num_passes, draft_rows
        outcome = Outcome(total, emitted - n, *passes, seconds, draft_seconds, target_seconds, deciding, *review)
        if is_repeat:
            policy.note_repeat(outcome)
        else:
            policy.observe(outcome)
        return emitted, seconds + deciding, total

    def _most(self, text: Text) -> int:
        return self.max_nodes if text.num_left is None else max(0, min(self.max_nodes, text.num_left - 1))

    def _candidate(self, text: Text) -> Candidate:
        num_left = 256 if text.num_left is None else text.num_left
        num_reviewable = len(text.unseen) if self.may_review else None
        return Candidate(
            text.counts, self._most(text), text.num_missing, num_left, self.stops_early, text.weight, num_reviewable=num_reviewable
        )

    def _review(self, rows: Sequence[int], fleet: AcceptanceCounts) -> tuple[int, float]:
        """Rows and seconds of the draft's pass."""
        num_fed, context = 0, 0
        for text in map(self.texts.__getitem__, rows):
            drawn = [text.draw(mean, self.rng, is_confident=self.stops_early) for mean in text.unseen]
            labels = [bool(self.rng.random() < p) for p, _ in drawn]
            for counts in (text.counts, fleet):
                for (_, q), is_right in zip(drawn, labels, strict=True):
                    counts.note_draft(q)
                    counts.note(q, is_right)
            num_fed, context = num_fed + text.num_missing - 1, context + text.context
            text.unseen.clear()
            text.num_missing = 1
        return num_fed, self._noisy(self.machine.draft(num_fed, context)) if rows else 0.0

    def _grow(
        self, most: Sequence[int], worths: Sequence[Worth | None], context: int
    ) -> tuple[list[list[tuple[float, float, float]]], int, int, float]:
        """Chains of (p, q, value) by the law of `Worth`; passes, rows and seconds of the draft."""
        chains: list[list[tuple[float, float, float]]] = [[] for _ in most]
        open_chains = [i for i, count in enumerate(most) if count]
        scores, num_passes, num_rows, seconds, per_request = [0.0] * len(most), 0, 0, 0.0, context / len(most)
        means = [text.mean for text in self.texts] if open_chains else []
        while open_chains:
            rows = sum(self.texts[i].num_missing for i in open_chains) if not num_passes else len(open_chains)
            seconds += self._noisy(self.machine.draft(rows, per_request * len(open_chains)))
            num_passes, num_rows = num_passes + 1, num_rows + rows
            profit, going_on = 0.0, []
            for i in open_chains:
                text = self.texts[i]
                p, q = text.draw(means[i], self.rng, is_confident=self.stops_early)
                scores[i] += log(q)
                worth = worths[i]
                depth = len(chains[i]) + 1
                value = 1.0 if worth is None else worth.agreement**depth * exp(scores[i])
                chains[i].append((p, q, value))
                if depth >= most[i]:
                    continue
                gain = float("inf") if worth is None else value * worth.acceptance - worth.node_price - worth.row_price
                if gain > 0:
                    profit += gain / (worth.pass_price if worth else 1.0)
                    going_on.append(i)
            open_chains = going_on if profit > 1 else []
        return chains, num_passes, num_rows, seconds

    def _warmth(self, *, is_plain: bool) -> float:
        """Time of a step as a multiple of that with cold caches."""
        warmth = self.machine.warm ** (1 - self.coldness) if is_plain else 1.0
        self.coldness = COLD_MEMORY * self.coldness if is_plain else 1.0
        return warmth

    def _noisy(self, seconds: float) -> float:
        return seconds * exp(self.noise * self.rng.standard_normal()) * (self.outlier if self.rng.random() < self.outliers else 1.0)


def controller_of(machine: Machine) -> Controller:
    """With costs as profiled."""
    return Controller(Costs(machine.curve(machine.target), machine.curve(machine.draft)))


# measured on two cores of an AMD EPYC (Zen 5): float32 and bfloat16, milliseconds by rows
MACHINES = {
    "demo float32": Machine(
        "demo float32",
        through({1: 0.5, 7: 0.65, 9: 0.8, 16: 1.13, 32: 2.0, 64: 3.78, 128: 7.36, 256: 14.8}, 3e-7),
        through({1: 0.06, 16: 0.08, 32: 0.11, 64: 0.2, 128: 0.34, 256: 0.6}, 7e-8),
        lambda n, drafting: (0.25 + 0.012 * n + (drafting > 0) * 0.15 + 0.01 * drafting) / 1e3,
    ),
    "150M float32": Machine(
        "150M float32",
        through({1: 4.9, 4: 5.7, 7: 6.8, 9: 8.4, 16: 12.0, 32: 21.8, 64: 41.6, 128: 72.4, 256: 150.0}, 3e-6),
        through({1: 1.33, 8: 1.5, 16: 1.83, 32: 2.68, 64: 4.36, 128: 7.5, 256: 15.1}, 1.15e-6),
        lambda n, drafting: (0.25 + 0.012 * n + (drafting > 0) * 0.15 + 0.01 * drafting) / 1e3,
    ),
    "150M bfloat16": Machine(
        "150M bfloat16",
        through({1: 6.2, 8: 7.0, 16: 8.4, 32: 13.4, 64: 23.8, 128: 44.0, 256: 85.6}, 1.6e-6),
        through({1: 1.05, 8: 1.1, 16: 1.31, 32: 1.79, 64: 2.72, 128: 4.7, 256: 8.9}, 5.7e-7),
        lambda n, drafting: (0.25 + 0.012 * n + (drafting > 0) * 0.15 + 0.01 * drafting) / 1e3,
    ),
    # on two cores of an AMD EPYC (Zen 3), whose registers hold the sums of six rows: the seventh was a step
    "demo AVX2": Machine(
        "demo AVX2",
        through({1: 1.0, 2: 1.3, 4: 1.4, 6: 1.55, 7: 2.2, 8: 2.25, 12: 2.8, 16: 3.7, 24: 5.3, 32: 7.2, 48: 10.1, 64: 13.5}, 3.5e-7),
        through({1: 0.1, 8: 0.12, 32: 0.2, 56: 0.3}, 1e-7),
        lambda n, drafting: (0.37 + 0.012 * n + (drafting > 0) * 0.5 + 0.01 * drafting) / 1e3,
        sizes=(*range(1, 9), 12, 16, 24, 32, 48, 64, 128, 256),
    ),
    # shapes of GPU curves, not measurements: memory-bound passes, padded to captured sizes
    "GPU, 8 B and 1 B": Machine(
        "GPU, 8 B and 1 B",
        stairs(4.2e-3, 1e-5, 16, 2.2e-5, 2e-9),
        stairs(0.75e-3, 4e-6, 16, 3e-6, 5e-10),
        lambda n, drafting: (0.3 + 0.012 * n + (drafting > 0) * 0.2 + 0.01 * drafting) / 1e3,
        sizes=tuple(range(16, 513, 16)),
        is_padded=True,
    ),
}
# as found on the first of these: after twelve steps without drafts, passes take three quarters of what they take between drafts
MACHINES["demo warm"] = replace(MACHINES["demo float32"], name="demo warm", warm=0.75)


def compare(
    machine: Machine, texts: Sequence[Text], make: Callable[[], Policy], num_steps: int = 300, seeds: int = 3, **fleet: Any
) -> float:
    """Tokens per second as a multiple of those without drafts: the median over seeds."""
    options = {"stops_early": not machine.is_padded} | fleet
    rates = [Fleet(machine, _fresh(texts), seed=seed, **options).run(make(), num_steps).rate for seed in range(seeds)]
    return float(np.median(rates)) / expected_rate(machine, texts, 0, chunk=fleet.get("chunk", 0))


def gain_of_fixed(machine: Machine, texts: Sequence[Text], *num_nodes: int) -> float:
    """What `compare` finds of `Fixed` in the mean, which no seeds are needed for."""
    return expected_rate(machine, texts, *num_nodes) / expected_rate(machine, texts, 0)


def expected_rate(machine: Machine, texts: Sequence[Text], *num_nodes: int, num_steps: int = 300, chunk: int = 0) -> float:
    """Tokens per second with `Fixed`, if texts have no stretches: what a step yields and takes in the mean."""
    n = len(texts)
    counts = [num_nodes[min(i, len(num_nodes) - 1)] for i in range(n)]
    tokens = sum(text.mean**depth for text, count in zip(texts, counts, strict=True) for depth in range(count + 1))
    rows = [sum(count > depth for count in counts) for depth in range(max(counts))]  # of the draft's passes
    drafting = [machine.draft(num_rows, MEAN_CONTEXT * num_rows) for num_rows in rows]
    host = machine.host(n, rows[0] if rows else 0)
    seconds = host + sum(drafting) + machine.target(n + chunk + sum(counts), MEAN_CONTEXT * n)
    # what the first steps take besides: with drafts, one feeds the draft all context; without, caches are cold
    if sum(counts):
        first = (FIRST_DRAFT - 1) * host + machine.draft(MEAN_CONTEXT * rows[0], MEAN_CONTEXT * rows[0]) - drafting[0]
    else:
        first = seconds * sum(machine.warm ** (1 - COLD_MEMORY**i) - machine.warm for i in range(num_steps))
        seconds *= machine.warm
    return tokens / ((seconds + first / num_steps) * MEAN_NOISE)


def _fresh(texts: Sequence[Text]) -> list[Text]:
    """The same texts, of which nothing is known."""
    return [replace(text, counts=AcceptanceCounts()) for text in texts]


FIRST, ALL = 100, 600
"""Steps at the start, and those with what follows, in the grid."""

RUNS, MORE_RUNS = 9, 63
"""Runs of which the median counts; and those of cells that are near a bound after so few."""

OFF_BOUND, FIXED_BOUND, NEAR = 0.97, 0.95, 0.02
"""Of what rates shall be at least: of no speculation, and of the best fixed number; and what is near these."""


class GridCell(NamedTuple):
    """A cell of the grid; rates as multiples of that without speculation."""

    first: float  # of the first steps
    rate: float  # of all
    fixed: dict[int, float]  # with fixed numbers of draft tokens

    @property
    def of_best(self) -> float:
        """Rate as a multiple of that of the best fixed number, or of none."""
        return self.rate / max(1.0, *self.fixed.values())

    @property
    def is_near(self) -> bool:
        """Whether a rate is near its bound, or below it."""
        return min(self.first - OFF_BOUND, self.rate - OFF_BOUND, self.of_best - FIXED_BOUND) < NEAR


def main() -> None:
    """Print the whole grid, which takes minutes: all steps as a multiple of off, of the best fixed number, and the first of off."""
    cells = []
    with ProcessPoolExecutor() as pool:
        for machine in MACHINES:
            of_machine = []
            for n in (1, 2, 4, 8, 16, 32, 64):
                row = list(pool.map(partial(grid_cell, machine, n), (0.2, 0.35, 0.5, 0.65, 0.8, 0.95)))
                texts = (f"{each.rate:.3f} ({each.of_best:.3f}, {each.first:.3f})" for each in row)
                print(f"{machine:18s}{n:3d}  " + "  ".join(texts), flush=True)
                of_machine += row
            rate, of_best, first = (min(getattr(each, name) for each in of_machine) for name in ("rate", "of_best", "first"))
            print(f"least: {rate:.3f} of off ({first:.3f} in the first {FIRST} steps), {of_best:.3f} of the best fixed")
            cells += of_machine
    single = max(1.0, *(geometric_mean([each.fixed[length] for each in cells]) for length in LENGTHS))
    print(f"mean: {geometric_mean([each.rate for each in cells]) / single:.3f} of the best single fixed")


def grid_cell(machine: str, num_texts: int, acceptance: float) -> GridCell:
    """Run a cell of the grid."""
    simulated, texts = MACHINES[machine], [Text(acceptance)] * num_texts
    off = expected_rate(simulated, texts, 0)
    fixed = {length: expected_rate(simulated, texts, length, num_steps=ALL) / off for length in LENGTHS}
    runs = list[tuple[float, float]]()
    for num_runs in (RUNS, MORE_RUNS):
        runs += [_rates(simulated, texts, seed) for seed in range(len(runs), num_runs)]
        first, rate = np.median(runs, axis=0) / off
        cell = GridCell(float(first), float(rate), fixed)
        if not cell.is_near:
            break
    return cell


def _rates(machine: Machine, texts: Sequence[Text], seed: int) -> tuple[float, float]:
    """Tokens per second of the first steps of an adaptive run, and of all."""
    fleet, controller = Fleet(machine, _fresh(texts), seed=seed, stops_early=not machine.is_padded), controller_of(machine)
    first, rest = fleet.run(controller, FIRST), fleet.run(controller, ALL - FIRST)
    return first.rate, (first.num_tokens + rest.num_tokens) / (first.seconds + rest.seconds)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return float(np.exp(np.mean(np.log(values))))


if __name__ == "__main__":
    main()
