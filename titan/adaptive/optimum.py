"""The best number of nodes for each request of a step, as far as costs and acceptance are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from titan.adaptive.cost import HostTime, PassCost
from titan.adaptive.load import Load

MARGIN = 0.01
"""Share by which drafting must be expected to gain."""

GRID_SIZES, GRID_DEPTHS = 16, 8
"""Numbers of nodes, and of depths, up to which all are compared; further ones are a quarter apart."""

DEBT_STEPS = 96
"""Steps over which the cost of feeding the draft what it has missed is spread."""


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
    candidates, n = load.candidates, len(load.candidates)
    weights = np.array([each.weight for each in candidates])
    most = np.array([each.max_nodes for each in candidates])
    longest = int(most.max())
    off_rate = float(weights.sum()) / costs.plain_seconds(load)
    optimum = Optimum([0] * n, off_rate, off_rate)
    if not longest:
        return optimum
    depths = np.arange(1, longest + 1)
    values = np.where(depths <= most[:, None], acceptance[:, None] ** depths * weights[:, None], 0.0)
    order = np.argsort(-values, axis=None, kind="stable")[: int(most.sum())]
    of_request, of_depth = np.divmod(order, longest)
    sorted_values = values.ravel()[order]
    pass_seconds, row_seconds = costs.draft_line(load)
    missing = np.array([1 + (each.num_missing - 1) / DEBT_STEPS for each in candidates])
    sizes = _grid(len(order), GRID_SIZES)
    edges = [*sizes, 2 * sizes[-1]]
    target = np.array([costs.target.predict(load.num_rows + size, load.num_context_tokens) for size in edges])
    host = costs.host.predict(True, n)
    for num_passes in _grid(longest, GRID_DEPTHS):
        kept = of_depth < num_passes
        requests = of_request[kept]
        gains = sorted_values[kept].cumsum()
        rows = np.where(of_depth[kept] == 0, missing[requests], 1.0).cumsum()
        at = np.array([size for size in sizes if size <= len(gains)]) - 1
        rates = (weights.sum() + gains[at]) / (host + num_passes * pass_seconds + row_seconds * rows[at] + target[: len(at)])
        place = int(rates.argmax())
        optimum.on_rate = max(optimum.on_rate, float(rates[place]))
        if rates[place] > max(optimum.rate, off_rate * (1 + MARGIN)):
            counts = np.bincount(requests[: sizes[place]], minlength=n).tolist()
            slope = max(float(target[place + 1] - target[place]), 0.0) / (edges[place + 1] - edges[place])
            optimum = Optimum(counts, float(rates[place]), off_rate, float(rates[place]), slope, row_seconds, pass_seconds)
    return optimum


def _grid(most: int, exact: int) -> list[int]:
    """Return numbers from 1 to ``most``: all up to ``exact``, then those about a quarter apart."""
    numbers = list(range(1, min(most, exact) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] * 5 // 4))
    return numbers
