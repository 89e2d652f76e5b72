"""A comparison of what a step may draft: the best, and what it goes by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan.adaptive.costs import Costs
from titan.adaptive.load import Load
from titan.adaptive.optimum import MARGIN, Optimum, Prices, best
from titan.adaptive.value import Estimates
from titan.core.draft_history import AcceptanceCounts
from titan.core.growth import Worth


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out, each sequence candidate by candidate."""

    optimum: Optimum
    estimates: Estimates
    counts: Sequence[AcceptanceCounts] = ()  # that the estimates are of
    prices: Prices | None = None  # of the load; None: nothing was compared yet
    hoped: Sequence[int] = ()  # nodes of the optimum if acceptance were a standard error higher
    worths: Sequence[Worth | None] = ()  # where growth ends, by confidence; None: nothing is drafted

    @property
    def gain(self) -> float:
        """Share by which drafting is expected to raise the rate; 0 if it does not pay."""
        return self.optimum.rate / self.optimum.off_rate - 1


NOTHING_COMPARED = Comparison(Optimum([], 0.0), Estimates((), (), ()))


def compare(
    load: Load, costs: Costs, counts: Sequence[AcceptanceCounts], estimates: Estimates, yield_factor: float, *, is_drafting: bool
) -> Comparison:
    """Find the best setting of a load, and that which might be the best.

    Args:
        load: of the step, with at least one candidate.
        costs: of passes and the host.
        counts: of the candidates.
        estimates: of their acceptance.
        yield_factor: tokens that drafts bring, as a multiple of those that chains would.
        is_drafting: whether drafting was the best; it goes on, or begins, where it gains more than a margin less, or more.
    """
    prices = Prices(load, costs)
    optimum = best(estimates.means, prices, yield_factor, 1 - MARGIN if is_drafting else 1 + MARGIN)
    hoped = optimum.num_nodes if all(optimum.num_nodes) else best(estimates.bounds, prices, yield_factor).num_nodes
    worths = [_worth(i, estimates, prices, optimum) if count else None for i, count in enumerate(optimum.num_nodes)]
    return Comparison(optimum, estimates, counts, prices, hoped, worths)


def _worth(i: int, estimates: Estimates, prices: Prices, optimum: Optimum) -> Worth:
    price = optimum.on_rate / prices.load.candidates[i].weight
    return Worth(
        agreement=estimates.agreements[i],
        acceptance=estimates.means[i],
        node_price=price * optimum.node_seconds,
        row_price=price * prices.row_seconds,
        pass_price=max(price * prices.pass_seconds, 1e-9),
    )
