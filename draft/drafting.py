"""Guards calls to a drafter: a failure warns and costs the drafts of a step, never a request."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TypeVar

from titan.core.checks import missing_members
from titan.core.kv_tensor import KVTensor, Role
from titan.core.proposals import TreeLimits, checked_trees
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees
from titan.draft.base import Drafter, ModelDrafter, ReviewReport, has_cache, runs_model
from titan.kernels.interfaces import Backend

T = TypeVar("T")

NUM_CALLS = 8
"""Most calls that a warning names, the innermost first: a drafter's own line is mostly not that one."""


class Drafting:
    """Calls a drafter for an engine, and checks the trees and reviews that it returns. If a call fails, a neutral answer is given.

    Args:
        drafter: of any kind; if it keeps KV, its cache is attached already.
        backend: of the engine; trees are on its device.
        vocab_size: of the target.

    Raises:
        ValueError: the drafter has a model and a runner, but not all members of `ModelDrafter`.
    """

    def __init__(self, drafter: Drafter, backend: Backend, vocab_size: int) -> None:
        self.drafter = drafter
        _check_members(drafter)
        self.num_failures = 0  # calls that raised, or returned what is not allowed
        self._backend = backend
        self._vocab_size = vocab_size
        self._model = drafter if runs_model(drafter) else None
        self._caching = drafter if has_cache(drafter) else None

    @property
    def is_fed(self) -> bool:
        """Whether the drafter runs a model, which must also be fed the tokens that it has missed."""
        return self._model is not None

    @property
    def max_len(self) -> int:
        """Most tokens of a request that the drafter can take."""
        return sys.maxsize if self._model is None else self._model.max_len

    @property
    def shared_vocabulary(self) -> float | None:
        """Share of the target's tokens that the draft model can propose; ``None``: unknown, or the drafter has no model."""
        return None if self._model is None else self._model.shared_vocabulary

    @property
    def weight_bits(self) -> int | None:
        """Bits to which the draft model's matrices were rounded; ``None``: they were not, or the drafter has no model."""
        return None if self._model is None else self._model.model.weight_bits

    def attach(self, tensors: Mapping[Role, KVTensor]) -> None:
        """Give the drafter its cache of these, if it keeps KV; its errors are passed on."""
        if self._caching is not None:
            self._caching.attach(tensors["draft"])

    def lookahead(self, requests: Sequence[Request], budgets: Sequence[int]) -> Sequence[int]:
        """Return how many slots after its root each request should get: its budget, unless a drafter with KV asks for more."""
        drafter = self._caching
        if drafter is None or not any(budgets):
            return budgets
        rows = zip(requests, budgets, strict=True)
        return self._ask(lambda: [index(drafter.lookahead(each, budget)) if budget else 0 for each, budget in rows], budgets)

    def propose(self, plan: StepPlan) -> DraftTrees:
        """Return the trees of a step, one per row of its plan; all empty if the drafter fails."""
        nothing = DraftTrees.empty(len(plan.requests), self._backend.device)
        if not (plan.drafts_prompts or plan.reviews or any(plan.draft_budgets)):
            return nothing
        may_sample = [not request.params.is_greedy for request in plan.requests]
        limits = TreeLimits(tuple(plan.draft_budgets), may_sample, tuple(plan.num_slots))  # which a drafter cannot write to

        def propose() -> DraftTrees:
            return checked_trees(
                self.drafter.propose(plan),
                limits,
                drafter=self.drafter.name,
                vocab_size=self._vocab_size,
                upload=self._backend.upload,
                device=self._backend.device,
            )

        return self._ask(propose, nothing)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Tell the drafter which nodes were accepted."""
        self._ask(lambda: self.drafter.commit(plan, acceptance), None)

    def review(self, plan: StepPlan) -> ReviewReport:
        """Review the rows that a plan names; the report is empty if there are none, or the drafter fails."""
        drafter, nothing = self._model, ReviewReport(())
        if not plan.reviews or drafter is None:
            return nothing

        def review() -> ReviewReport:
            report = drafter.review([plan.requests[i] for i in plan.reviews])
            report.check(len(plan.reviews))
            return report

        return self._ask(review, nothing)

    def num_reviewable(self, request: Request) -> int | None:
        """Return what `ModelDrafter.num_reviewable` does; ``None`` also if the drafter has no model, or fails."""
        drafter = self._model
        return None if drafter is None else self._ask(lambda: drafter.num_reviewable(request), None)

    def stops_early(self, request: Request) -> bool:
        """Return what `ModelDrafter.stops_early` does; false if the drafter has no model, or fails."""
        drafter = self._model
        return drafter is not None and self._ask(lambda: drafter.stops_early(request), False)

    def _ask(self, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs drafts and no request
            self.num_failures += 1
            calls = traceback.extract_tb(error.__traceback__, limit=-NUM_CALLS)
            message = (
                f"the drafter {self.drafter.name!r} failed, which costs drafts and no request: {type(error).__name__}: {error} "
                f"({', from '.join(f'{call.filename}:{call.lineno}' for call in reversed(calls))})"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return otherwise


def _check_members(drafter: Drafter) -> None:
    lacking = missing_members(drafter, ModelDrafter)
    if lacking and "model" not in lacking and "runner" not in lacking:
        raise ValueError(
            f"the drafter {drafter.name!r} has a model and a runner: allowed is a ModelDrafter, of which it lacks "
            f"{', '.join(lacking)}"
        )
