"""The best number of nodes for each request of a step, as far as costs and acceptance are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from titan.adaptive.costs import Costs
from titan.adaptive.load import Candidate, Load
from titan.adaptive.value import TreeGain

MARGIN = 0.02
"""Share by which drafting must be expected to gain."""

GRID_SIZES, GRID_DEPTHS = 16, 8
"""Numbers of nodes, and of depths, up to which all are compared; further ones are a quarter apart."""

MIN_VALUE = 0.02
"""Value below which no node is considered."""

DEBT_STEPS, DEBT_SHARE = 96, 0.5
"""Most steps over which the cost of feeding the draft what it has missed is spread, and the share of the tokens yet to come."""


@dataclass(slots=True)
class Optimum:
    """The best of the compared settings of a load; zero nodes if not drafting is the best."""

    num_nodes: list[int]
    rate: float  # weighted tokens per second
    off_rate: float
    on_rate: float = 0.0  # of the best setting that drafts
    node_seconds: float = 0.0  # of one more node in the target's pass
    row_seconds: float = 0.0  # of one more row in a pass of the draft
    pass_seconds: float = 0.0  # of a pass of the draft, without its rows

    @property
    def drafts(self) -> bool:
        """Whether any request drafts."""
        return any(self.num_nodes)


def best(load: Load, acceptance: Sequence[float], costs: Costs, tree_gain: TreeGain | None = None) -> Optimum:
    """Compare the settings of a load, and return the best.

    Args:
        load: of the step, with at least one candidate.
        acceptance: probability that a node's first child is accepted, of each candidate.
        costs: of passes and the host.
        tree_gain: what trees bring beyond chains; ``None`` = nothing.
    """
    candidates, n = load.candidates, len(load.candidates)
    total_weight = sum([each.weight for each in candidates])
    decode = costs.target.predict(n, load.num_context_tokens)  # prefill is paid for anyway: it only makes further rows dearer
    off_rate = total_weight / (costs.host.predict(n) + decode)
    optimum = Optimum([0] * n, off_rate, off_rate)
    nodes = _nodes_by_value(candidates, acceptance)
    if not nodes:
        return optimum
    pass_seconds, row_seconds = costs.draft_line(load)
    missing = [1 + (each.num_missing - 1) / min(DEBT_STEPS, max(1.0, DEBT_SHARE * each.num_remaining)) for each in candidates]
    sizes = sorted({*_grid(len(nodes), GRID_SIZES), *(n * depth for depth in range(1, GRID_DEPTHS + 1) if n * depth <= len(nodes))})
    context = load.num_context_tokens
    prefill = costs.target.predict(load.num_rows, context, True) - costs.target.predict(n, context, True)
    target = {size: costs.target.predict(load.num_rows + size, context, True) - prefill for size in [*sizes, 2 * sizes[-1]]}
    host = {drafting: costs.host.predict(n, 1 << (drafting - 1)) for drafting in range(1, n.bit_length() + 1)}
    best_of = 0, 0
    for num_passes in _grid(max(depth for _, depth, _ in nodes), GRID_DEPTHS):
        fixed = num_passes * pass_seconds
        gain, rows, size, num_drafting = 0.0, 0.0, 0, 0
        for value, depth, i in nodes:
            if depth > num_passes:
                continue
            gain, size = gain + value, size + 1
            rows += missing[i] if depth == 1 else 1.0
            num_drafting += depth == 1
            if size in target:
                of_trees = 1.0 if tree_gain is None else tree_gain.ratio(size / num_drafting)
                seconds = host[num_drafting.bit_length()] + fixed + row_seconds * rows + target[size]
                rate = (total_weight + of_trees * gain) / seconds
                if rate > optimum.on_rate:
                    optimum.on_rate, best_of = rate, (num_passes, size)
    if optimum.on_rate > off_rate * (1 + MARGIN):
        num_passes, size = best_of
        for _, _, i in [each for each in nodes if each[1] <= num_passes][:size]:
            optimum.num_nodes[i] += 1
        above = min((each for each in target if each > size), default=size)
        optimum.rate, optimum.row_seconds, optimum.pass_seconds = optimum.on_rate, row_seconds, pass_seconds
        optimum.node_seconds = max(target[above] - target[size], 0.0) / (above - size)
    return optimum


def _nodes_by_value(candidates: Sequence[Candidate], acceptance: Sequence[float]) -> list[tuple[float, int, int]]:
    """Return the nodes that may be drafted, the likeliest first: value, depth, and candidate."""
    nodes = []
    for i, (each, p) in enumerate(zip(candidates, acceptance, strict=True)):
        value = each.weight
        for depth in range(1, each.max_nodes + 1):
            value *= p
            if value < MIN_VALUE:
                break
            nodes.append((value, depth, i))
    return sorted(nodes, key=itemgetter(0), reverse=True)


def _grid(most: int, exact: int) -> list[int]:
    """Return numbers from 1 to ``most``: all up to ``exact``, then those about a quarter apart."""
    numbers = list(range(1, min(most, exact) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] * 5 // 4))
    return numbers
