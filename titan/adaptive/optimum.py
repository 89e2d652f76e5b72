"""The best number of nodes for each request of a step, as far as costs and acceptance are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from titan.adaptive.costs import Costs
from titan.adaptive.load import Candidate, Load
from titan.core.limits import MAX_NODES

MARGIN = 0.015
"""Share by which drafting must be expected to gain."""

GRID_SIZES, GRID_DEPTHS = 16, 8
"""Numbers of nodes, and of depths, up to which all are compared; further ones are a quarter apart."""

MIN_VALUE = 0.02
"""Probability to be accepted below which no node is considered."""

DEBT_STEPS, DEBT_SHARE = 64, 0.5
"""Most steps over which the cost of feeding the draft what it has missed is spread, and the share of the tokens yet to come."""


@dataclass(slots=True)
class Optimum:
    """The best of the compared settings of a load; zero nodes if not drafting is the best."""

    num_nodes: list[int]
    off_rate: float  # weighted tokens per second without drafts
    mean_weight: float = 1.0  # of a token without drafts
    on_rate: float = 0.0  # of the best setting that drafts
    seconds: float = 0.0  # of a step with that setting
    node_seconds: float = 0.0  # of a node in the target's pass, near their number; at a step of the curve, before it
    slack: int = MAX_NODES  # further nodes at about that price; beyond, one costs more than the last of the optimum is worth

    @property
    def drafts(self) -> bool:
        """Whether any request drafts."""
        return any(self.num_nodes)

    @property
    def rate(self) -> float:
        """Weighted tokens per second."""
        return self.on_rate if self.drafts else self.off_rate


class Prices:
    """What the parts of a load's step cost, each worked out once.

    Args:
        load: of the step, with at least one candidate.
        costs: of passes and the host.
    """

    def __init__(self, load: Load, costs: Costs) -> None:
        n, self.load, self._costs, self._target = len(load.candidates), load, costs, dict[float, float]()
        # of a pass of the draft, without its rows, and of one row more
        self.pass_seconds, self.row_seconds = costs.draft_line(load)
        self.total_weight = sum([each.weight for each in load.candidates])
        self.plain_seconds = costs.decode_seconds(load)  # prefill is paid for anyway: it only makes further rows more expensive
        self.off_rate = self.total_weight / self.plain_seconds
        missing_row_seconds = costs.missing_row_seconds(load)
        # of a candidate's first row in the draft's pass, as the debts of those that the draft has not been fed are spread
        self.first_seconds = [
            self.row_seconds
            + missing_row_seconds * (each.num_missing - 1) / min(DEBT_STEPS, max(1.0, DEBT_SHARE * each.num_remaining))
            for each in load.candidates
        ]
        self.host = [0.0, *[costs.host.predict(n, 1 << octave) for octave in range(n.bit_length())]]  # by octaves of drafting ones
        self._prefill = self._pass(0) - costs.target.predict(n, load.num_context_tokens)

    def target(self, num_nodes: float) -> float:
        """Return the seconds of the target's pass with these nodes, prefill left out."""
        seconds = self._target.get(num_nodes)
        if seconds is None:
            seconds = self._target[num_nodes] = self._pass(num_nodes) - self._prefill
        return seconds

    def step(self, num_drafting: int, num_passes: float, rows_seconds: float, num_nodes: float) -> float:
        """Return the seconds of a step, prefill left out.

        Args:
            num_drafting: candidates that draft, at least 1.
            num_passes: of the draft.
            rows_seconds: of all rows of these passes.
            num_nodes: that are verified.
        """
        of_draft = num_passes * self.pass_seconds + rows_seconds
        return self.host[num_drafting.bit_length()] + of_draft + self.target(num_nodes)

    def slope(self, low: int, high: int) -> float:
        """Return the seconds of a node in the target's pass, between two numbers of nodes."""
        return max(self.target(high) - self.target(low), 0.0) / (high - low)

    def _pass(self, num_nodes: float) -> float:
        return self._costs.target.predict(self.load.num_lasting + num_nodes, self.load.num_context_tokens)


def best(acceptance: Sequence[float], prices: Prices, yield_factor: float = 1.0, least: float = 1 + MARGIN) -> Optimum:
    """Compare the settings of a load, and return the best.

    Args:
        acceptance: probability that a node's first child is accepted, of each candidate.
        prices: of the load.
        yield_factor: tokens that drafts bring, as a multiple of those that chains would.
        least: rate with drafts, as a multiple of that without, from which on to draft.
    """
    candidates, off_rate = prices.load.candidates, prices.off_rate
    n = len(candidates)
    optimum = Optimum([0] * n, off_rate, prices.total_weight / n)
    nodes = _nodes_by_value(candidates, acceptance)
    if not nodes:
        return optimum
    sizes = {*_grid(len(nodes), GRID_SIZES), *range(n, min(n * GRID_DEPTHS, len(nodes)) + 1, n)}
    drafted, most_tokens = nodes, prices.total_weight + yield_factor * sum([value for value, _, _ in nodes])
    for num_passes in _grid(max(depth for _, depth, _ in nodes), GRID_DEPTHS):
        if most_tokens <= optimum.on_rate * prices.step(1, num_passes, 0.0, num_passes):  # not even all would be worth the passes
            break
        reached = [each for each in nodes if each[1] <= num_passes]
        tokens, rows_seconds, num_drafting, is_deep = prices.total_weight, 0.0, 0, False
        for size, (value, depth, i) in enumerate(reached, 1):
            tokens += yield_factor * value
            rows_seconds += prices.first_seconds[i] if depth == 1 else prices.row_seconds
            num_drafting += depth == 1
            is_deep |= depth == num_passes  # with fewer nodes, the last pass is for nothing
            if is_deep and (size in sizes or size == len(reached)):
                seconds = prices.step(num_drafting, num_passes, rows_seconds, size)
                if tokens > optimum.on_rate * seconds:
                    optimum.on_rate, optimum.seconds, drafted = tokens / seconds, seconds, reached[:size]
    if optimum.on_rate > off_rate * least:
        for _, _, i in drafted:
            optimum.num_nodes[i] += 1
        least_value = yield_factor * drafted[-1][0] / optimum.on_rate
        optimum.node_seconds, optimum.slack = _node_price(prices, sorted(sizes), len(drafted), least_value)
    return optimum


def _node_price(prices: Prices, sizes: Sequence[int], size: int, least_value: float) -> tuple[float, int]:
    """Return the seconds of a node, and for how many more than the optimum has they hold.

    Where the target's curve has a step, the next node may cost more than all those before it together, and these are worth it.

    Args:
        prices: of the load.
        sizes: numbers of nodes to look at, ascending.
        size: nodes of the optimum.
        least_value: seconds that the last of them may cost at most.
    """
    pairs = pairwise([size, *[each for each in (*sizes, 2 * sizes[-1]) if each > size]])
    slack = next((low - size for low, high in pairs if prices.slope(low, high) > least_value), MAX_NODES)
    return prices.slope(size // 2, size + min(size, slack)), slack


def _nodes_by_value(candidates: Sequence[Candidate], acceptance: Sequence[float]) -> list[tuple[float, int, int]]:
    """Return the nodes that may be drafted, the likeliest first: value, depth, and candidate."""
    nodes = []
    for i, (each, p) in enumerate(zip(candidates, acceptance, strict=True)):
        value = each.weight
        for depth in range(1, each.max_nodes + 1):
            value *= p
            if value < MIN_VALUE * each.weight:
                break
            nodes.append((value, depth, i))
    return sorted(nodes, key=itemgetter(0), reverse=True)


def _grid(most: int, exact: int) -> list[int]:
    """Return numbers from 1 to ``most``: all up to ``exact``, then those about a quarter apart."""
    numbers = list(range(1, min(most, exact) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] * 5 // 4))
    return numbers
