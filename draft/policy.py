"""What to draft: the shape of each request's tree, and whether its tokens are the most likely ones or drawn.

Everything here depends on the request alone, its options and its own history, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

import numpy as np

from titan.core.request import Request
from titan.core.trees import MAX_NODES, Parents, chain_parents
from titan.draft.shapes import expected_shape, in_main_path_order
from titan.draft.tree_builder import BeamGrowth, ChainGrowth, Growth, ShapeGrowth

CHAIN_CHILDREN = 3
"""Tokens that `auto` looks at behind each node of its chain."""

MAX_CHAIN_NODES = 4
"""Up to so many nodes `auto` grows plain chains: their far end is not worth the search for something better."""

MAX_NARROW_NODES = 8
"""Up to so many nodes `auto` grows along one chain; more are better spread."""

GREEDY_TEMPERATURE = 0.1
"""At which the draft's probabilities are compared at first for greedy requests: so low that trees begin as chains. It soon moves to
where probabilities are acceptances, which is 0.35 to 0.7 on the demo pair and less where the draft is right but never sure."""

COMPARE_EVERY = 8
"""With ``draft_sampling="auto"`` one draft in so many is drawn even where greedy ones do better, to see whether they still do."""

MIN_GREEDY_GAIN = 0.05
"""By so much must greedy proposals have matched better before they are preferred: the averages are noisy."""

Reserve = Callable[[Request, int], bool]
"""Makes room for so many nodes behind the root of a request, if there are free blocks."""


class Kind(Enum):
    """Ways to grow a tree."""

    CHAIN = auto()
    CHAIN_WITH_SIBLINGS = auto()
    BEAM = auto()
    SHAPE = auto()  # known beforehand, of the most likely tokens
    DRAWN = auto()  # known beforehand, of tokens that are drawn


class DraftPolicy:
    """Chooses how the trees of a step are grown.

    Args:
        draft_tree: "chain", "dynamic", "auto", or the int32 parents of a fixed shape.
        draft_sampling: "greedy", "sampled" or "auto".
        max_draft_tokens: most nodes of a tree.
    """

    def __init__(self, draft_tree: str | Sequence[int], draft_sampling: str, max_draft_tokens: int) -> None:
        self.draft_tree = draft_tree
        self.draft_sampling = draft_sampling
        self.fixed_shape = None if isinstance(draft_tree, str) else in_main_path_order(np.array(draft_tree, np.int32))
        self.width = max(2, max_draft_tokens // 8)
        self.beam_depth = min(max_draft_tokens, 6 + max_draft_tokens // 8, 1 + MAX_NODES // self.width)

    def growths(self, requests: Sequence[Request], budgets: Sequence[int], reserve: Reserve) -> list[tuple[list[int], Growth]]:
        """Sort the requests into growths.

        Args:
            requests: those that draft.
            budgets: most nodes of each, at least 1.
            reserve: asked for the room that a beam needs beyond the budget.

        Returns:
            Growths with the indices of their requests.
        """
        members: dict[Kind, list[int]] = {}
        for i, request in enumerate(requests):
            members.setdefault(self._kind(request, budgets[i], reserve), []).append(i)
        return [
            (rows, self._growth(kind, [requests[i] for i in rows], [budgets[i] for i in rows])) for kind, rows in members.items()
        ]

    def _kind(self, request: Request, budget: int, reserve: Reserve) -> Kind:
        if self._is_drawn(request):
            return Kind.DRAWN
        if self.fixed_shape is not None:
            return Kind.SHAPE
        if self.draft_tree == "chain" or budget == 1 or (self.draft_tree == "auto" and budget <= MAX_CHAIN_NODES):
            return Kind.CHAIN
        if self._is_narrow(budget) or not reserve(request, self.width * (min(self.beam_depth, budget) - 1)):
            return Kind.CHAIN_WITH_SIBLINGS
        return Kind.BEAM

    def _is_drawn(self, request: Request) -> bool:
        """Whether to draw the proposal; with "auto", whether drawn ones have matched the target better at this request's roots."""
        if request.params.is_greedy or self.draft_sampling == "greedy":
            return False
        if self.draft_sampling == "sampled":
            return True
        history = request.draft_history
        is_greedy_better = history.greedy_match.value > history.sampled_match.value + MIN_GREEDY_GAIN
        return not is_greedy_better or history.num_drafts % COMPARE_EVERY == 0

    def _is_narrow(self, budget: int) -> bool:
        """Whether one node per depth is expanded."""
        return self.draft_tree == "auto" and budget <= MAX_NARROW_NODES

    def _growth(self, kind: Kind, requests: list[Request], budgets: list[int]) -> Growth:
        if kind in (Kind.SHAPE, Kind.DRAWN):
            shapes = [self._shape(request, budget) for request, budget in zip(requests, budgets, strict=True)]
            return ShapeGrowth(shapes, requests if kind is Kind.DRAWN else None)
        if kind is Kind.CHAIN:
            return ChainGrowth(budgets)
        temperatures = [score_temperature(request) for request in requests]
        if kind is Kind.CHAIN_WITH_SIBLINGS:
            depths = [min(budget, _worthwhile_depth(request)) for request, budget in zip(requests, budgets, strict=True)]
            return BeamGrowth(budgets, depths, 1, CHAIN_CHILDREN, temperatures)
        depths = [min(budget, self.beam_depth) for budget in budgets]
        return BeamGrowth(budgets, depths, self.width, self.width + 1, temperatures)

    def _shape(self, request: Request, budget: int) -> Parents:
        """The shape of a tree whose tokens do not decide it."""
        if self.fixed_shape is not None:
            return self.fixed_shape[:budget]
        if self.draft_tree == "chain":
            return chain_parents(budget)
        acceptance = tuple(round(max(rank.value, 0.01), 2) for rank in request.draft_history.rank_acceptance)
        return expected_shape(acceptance, budget, is_caterpillar=self._is_narrow(budget))


def _worthwhile_depth(request: Request) -> int:
    """How deep to draft: a little deeper than the nodes that were worth keeping of late."""
    depth = request.draft_history.tree_depth
    return MAX_NODES if depth is None else int(depth.value + 3)


def score_temperature(request: Request) -> float:
    """The temperature at which the draft's probabilities are compared: as calibrated, or where calibration starts."""
    return request.draft_history.temperature or request.params.temperature or GREEDY_TEMPERATURE
