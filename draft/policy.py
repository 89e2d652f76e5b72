"""The drafting policy: the shape of each request's tree, and whether its tokens are the most likely ones or sampled.

Everything here depends on the request, its options and its own history, except for what leaves greedy tokens as they are: `worth`,
`chain_budget`, the free slots behind which a wide beam becomes a narrow one, and the temperature at which a history begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from titan.core.growth import BeamSpec, GrowthSpec, ShapePlan, ShapeSpec, Worth, chain_spec, main_path_order, shape_plan
from titan.core.limits import MAX_NODES
from titan.core.options import SpeculationOptions
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.trees import Parents
from titan.draft.shapes import expected_shape

CHAIN_CHILDREN = 3
"""Candidate tokens that `auto` considers after each node of its chain."""

MAX_CHAIN_NODES = 4
"""Largest budget for which `auto` grows plain chains: replacing their far end by better nodes does not pay."""

MAX_NARROW_NODES = 8
"""Largest budget for which `auto` grows all nodes along one chain; a larger tree is better spread out."""

LARGEST_BUDGETS = {"chain": (MAX_NODES, MAX_NODES), "auto": (MAX_CHAIN_NODES, MAX_NARROW_NODES), "dynamic": (1, 0)}
"""By ``draft_tree``, the largest budgets for which it is a plain chain, and for which all nodes grow along one chain."""

GREEDY_TEMPERATURE = 0.1
"""Initial temperature of the draft's probabilities in greedy requests: so low that trees start as chains. Calibration soon moves it
to where probabilities match acceptance: 0.35 to 0.7 with the demo pair, less for a draft that is right but never sure."""


class DraftPolicy:
    """Chooses how the trees of a step grow.

    Args:
        draft_tree: "chain", "dynamic", "auto", or the int32 parents of a fixed shape.
        draft_sampling: "greedy", "sampled" or "auto".
        max_draft_tokens: maximum nodes of a tree, those of a fixed shape if that has fewer.
        stops_early: whether trees end where they do not pay; chains then are beams, whose scores tell.

    Raises:
        ValueError: one of these is not allowed.
    """

    def __init__(
        self, draft_tree: str | Sequence[int], draft_sampling: str, max_draft_tokens: int, *, stops_early: bool = False
    ) -> None:
        SpeculationOptions(draft_tree=draft_tree, draft_sampling=draft_sampling, max_draft_tokens=max_draft_tokens)  # checks them
        self.draft_tree = draft_tree
        self.draft_sampling = draft_sampling
        self.fixed_shape: Parents | None = None
        if not isinstance(draft_tree, str):
            self.fixed_shape = main_path_order(draft_tree).parents
            max_draft_tokens = len(self.fixed_shape)
        self.max_draft_tokens = max_draft_tokens
        self._stops_early = stops_early
        self._most_in_chain, self._most_narrow = LARGEST_BUDGETS["dynamic" if self.fixed_shape is not None else str(draft_tree)]
        self.width = max(2, max_draft_tokens // 8)
        self.beam_depth = min(max_draft_tokens, 6 + max_draft_tokens // 8, 1 + MAX_NODES // self.width)
        of_beams = [self._beam(budget, 1.0).num_slots for budget in range(1, max_draft_tokens + 1)]
        self._wide_slots = [0, *of_beams]  # of wide beams, by budget

    def stops_early(self, request: Request) -> bool:
        """Whether a request's trees have scores, by which they may end where they do not pay."""
        return self._stops_early and self.fixed_shape is None and not self.is_sampled(request)

    def is_sampled(self, request: Request) -> bool:
        """Whether a request's drafts are sampled; this never changes during a request.

        With "auto", a request with its own seed is drafted greedily, so that its tokens depend on nothing but itself.
        """
        if self.draft_sampling == "greedy" or request.params.is_greedy:
            return False
        return self.draft_sampling == "sampled" or request.params.seed is None

    def chain_budget(self, request: Request, budget: int) -> int:
        """Return as many nodes as grow as a chain, where that would be faster than a larger tree.

        That is less than the budget only at temperature 0 and with "auto": otherwise it could change the tokens of a seed, or
        override the shape that was asked for.
        """
        return min(budget, MAX_CHAIN_NODES) if self.draft_tree == "auto" and request.params.is_greedy else budget

    def spec(self, request: Request, budget: int, num_slots: int, worth: Worth | None = None) -> GrowthSpec:
        """Return the spec of one request's tree.

        Args:
            request: the request.
            budget: maximum nodes, at least 1.
            num_slots: slots reserved after the root.
            worth: ends the tree where it does not pay, if it stops early; ``None``: it grows up to the budget.
        """
        if self.is_sampled(request):
            return ShapeSpec(self._shape(request, budget), request.params, request.seed)
        if self.fixed_shape is not None:
            return ShapeSpec(self._shape(request, budget))
        if budget <= self._most_in_chain and not self._stops_early:
            return chain_spec(budget)
        temperature = score_temperature(request)
        if budget > self._most_narrow and (beam := self._beam(budget, temperature, worth)).num_slots <= num_slots:
            return beam
        num_children = 1 if self.draft_tree == "chain" else CHAIN_CHILDREN
        return BeamSpec(budget, budget, 1, num_children, temperature, worth)

    def largest_specs(self) -> list[GrowthSpec]:
        """Return the largest spec of each kind along a chain that `spec` may return, greedy or sampled, and a wide beam."""
        most = self.max_draft_tokens
        if self.fixed_shape is not None:
            most = int(np.cumprod(self.fixed_shape == np.arange(-1, len(self.fixed_shape) - 1)).sum())
        specs: list[GrowthSpec] = []
        if self.draft_sampling != "greedy":
            specs.append(replace(chain_spec(most), params=SamplingParams()))
        if self.fixed_shape is not None:
            return [*specs, chain_spec(most)]
        specs.append(chain_spec(min(most, self._most_in_chain)))
        if most > self._most_in_chain:  # a wide beam becomes narrow where slots are short
            specs.append(BeamSpec(most, most, 1, CHAIN_CHILDREN, GREEDY_TEMPERATURE))
        if most > self._most_narrow:
            specs.append(self._beam(most, GREEDY_TEMPERATURE))
        return specs

    def lookahead(self, request: Request, budget: int) -> int:
        """Return how many slots after the root a request's tree needs to grow best; for a wide beam, more than its budget."""
        if budget <= self._most_narrow or self.fixed_shape is not None or self.is_sampled(request):
            return budget
        return max(budget, self._wide_slots[budget])

    def _beam(self, budget: int, temperature: float, worth: Worth | None = None) -> BeamSpec:
        return BeamSpec(budget, min(budget, self.beam_depth), self.width, self.width + 1, temperature, worth)

    def _shape(self, request: Request, budget: int) -> ShapePlan:
        """Return the plan of a fixed shape, or of a sampled tree, which must not depend on its tokens."""
        if self.fixed_shape is not None:
            return shape_plan(self.fixed_shape[:budget])
        if self.draft_tree == "chain":
            return chain_spec(budget).plan
        acceptance = tuple(round(max(rank.value, 0.01), 2) for rank in request.draft_history.rank_acceptance)
        return shape_plan(expected_shape(acceptance, budget, is_caterpillar=budget <= self._most_narrow))


def score_temperature(request: Request) -> float:
    """Return the temperature of the draft's probabilities in scores: the calibrated one, else the initial one."""
    return request.draft_history.temperature or request.params.temperature or GREEDY_TEMPERATURE
