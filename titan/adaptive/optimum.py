"""The best number of nodes for each request of a step, as far as costs and acceptance are known."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from titan.adaptive.cost import HostTime, PassCost
from titan.adaptive.load import Load
from titan.core.arrays import Ints

GRID_SIZES, GRID_DEPTHS = 16, 8
"""Numbers of nodes, and of depths, up to which all are compared; further ones are a quarter apart."""

DEBT_STEPS = 256
"""Steps over which the cost of feeding the draft what it has missed is spread."""


@dataclass(slots=True)
class Optimum:
    """The best of the compared settings of a load; zero nodes if not drafting is the best."""

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


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps are made of."""

    target: PassCost
    draft: PassCost | None  # None: part of the host's time
    host: HostTime

    def plain_seconds(self, load: Load) -> float:
        """Return the seconds of a step without drafts."""
        return self.host.predict(False, len(load.candidates)) + self.target.predict(load.num_rows, load.num_context_tokens)

    def draft_line(self, load: Load) -> tuple[float, float]:
        """Return the seconds of a pass of the draft, whatever its rows, and of each row, near a row for each candidate."""
        if self.draft is None:
            return 0.0, 0.0
        n, context = len(load.candidates), load.num_context_tokens
        first, second = self.draft.predict(n, context), self.draft.predict(2 * n, context)
        per_row = min(max((second - first) / n, 0.0), first / n)
        return first - n * per_row, per_row


def best(load: Load, acceptance: NDArray[np.float64], costs: Costs) -> Optimum:
    """Compare the settings of a load, and return the best.

    Args:
        load: of the step, with at least one candidate.
        acceptance: probability that a node's first child is accepted, of each candidate.
        costs: of passes and the host.
    """
    candidates, n, context = load.candidates, len(load.candidates), load.num_context_tokens
    weights, most, missing = np.array([(each.weight, each.max_nodes, each.num_missing) for each in candidates]).T
    longest, total = int(most.max()), float(weights.sum())
    off_rate = total / costs.plain_seconds(load)
    if not longest:
        return Optimum([0] * n, off_rate, off_rate)
    depths = np.arange(1, longest + 1)
    values = np.where(depths <= most[:, None], acceptance[:, None] ** depths * weights[:, None], 0.0).ravel()
    order = np.argsort(-values, kind="stable")[: int(most.sum())]
    of_request, of_depth = np.divmod(order, longest)
    num_passes, sizes = _grid(longest, GRID_DEPTHS), _grid(len(order), GRID_SIZES)
    is_kept = of_depth < num_passes[:, None]
    rows = np.where(of_depth, 1.0, 1 + (missing[of_request] - 1) / DEBT_STEPS)
    gains, num_rows, num_nodes = (np.cumsum(each * is_kept, axis=1)[:, sizes - 1] for each in (values[order], rows, 1))
    edges = [*sizes.tolist(), 2 * len(order)]
    target = [costs.target.predict(load.num_rows + size, context) for size in edges]
    pass_seconds, row_seconds = costs.draft_line(load)
    seconds = costs.host.predict(True, n) + num_passes[:, None] * pass_seconds + row_seconds * num_rows
    rates = (total + gains) / (seconds + np.interp(num_nodes, edges, target))
    depth, size = divmod(int(rates.argmax()), len(sizes))
    rate = float(rates[depth, size])
    if rate <= off_rate:
        return Optimum([0] * n, off_rate, off_rate)
    chosen = of_request[: sizes[size]][is_kept[depth, : sizes[size]]]
    edge = bisect_right(edges, num_nodes[depth, size])
    node_seconds = max(target[edge] - target[edge - 1], 0.0) / (edges[edge] - edges[edge - 1])
    return Optimum(np.bincount(chosen, minlength=n).tolist(), rate, off_rate, node_seconds, row_seconds, pass_seconds)


@lru_cache(1024)
def _grid(most: int, exact: int) -> Ints:
    """Return numbers from 1 to ``most``: all up to ``exact``, then those about a quarter apart."""
    numbers = list(range(1, min(most, exact) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] * 5 // 4))
    return np.array(numbers)
