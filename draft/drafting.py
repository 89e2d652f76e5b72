"""What an engine asks of its drafter, and what becomes of answers that are none: a warning, since a step needs no drafts."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from operator import index
from typing import TypeVar

from titan.core.kv_tensor import KVTensor
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import DraftTrees, TreeLimits
from titan.draft.base import CachingDrafter, Drafter, ModelDrafter, ReviewReport
from titan.kernels.interfaces import Backend

T = TypeVar("T")


class Drafting:
    """Asks a drafter what it can be asked, and checks its trees and reviews; what it raises costs drafts and no request.

    Args:
        drafter: of any kind; one with KV has its cache, without which a draft model has no runner yet.
        backend: whose device trees are on.
        vocab_size: of the target.
    """

    def __init__(self, drafter: Drafter, backend: Backend, vocab_size: int) -> None:
        self.drafter = drafter
        self.num_failures = 0  # times that it was asked in vain
        self._backend, self._vocab_size = backend, vocab_size
        self._model = drafter if isinstance(drafter, ModelDrafter) else None
        self._caching = drafter if isinstance(drafter, CachingDrafter) and drafter.kv is not None else None

    @property
    def is_fed(self) -> bool:
        """Whether drafting takes passes of a model, over what it has missed as well."""
        return self._model is not None

    @property
    def max_len(self) -> int:
        """Maximum tokens of a request that the drafter can be fed."""
        return sys.maxsize if self._model is None else self._model.max_len

    @property
    def shared_vocabulary(self) -> float | None:
        """Share of the target's tokens that a draft model can propose; ``None``: the drafter is none, or nobody compared."""
        return None if self._model is None else self._model.shared_vocabulary

    @property
    def weight_bits(self) -> int | None:
        """Bits to which a draft model's matrices were rounded; ``None``: they were not, or the drafter is none."""
        return None if self._model is None else self._model.model.weight_bits

    def attach(self, kv: KVTensor) -> None:
        """Give a drafter with KV another cache; what it raises is raised."""
        if self._caching is not None:
            self._caching.attach(kv)

    def lookahead(self, requests: Sequence[Request], budgets: Sequence[int]) -> Sequence[int]:
        """Return how many slots after their roots requests would like, which is what they draft unless the drafter has KV."""
        drafter = self._caching
        if drafter is None or not any(budgets):
            return budgets
        rows = zip(requests, budgets, strict=True)
        return self._ask(lambda: [index(drafter.lookahead(*row)) if row[1] else 0 for row in rows], budgets)

    def propose(self, plan: StepPlan) -> DraftTrees:
        """Return the trees of a step, one per row."""
        nothing = DraftTrees.empty(len(plan.requests), self._backend.device)
        if plan.is_plain:
            return nothing
        may_sample = [not request.params.is_greedy for request in plan.requests]
        limits = TreeLimits(plan.draft_budgets, may_sample, plan.num_slots)

        def propose() -> DraftTrees:
            return DraftTrees.of(
                self.drafter.propose(plan),
                limits,
                drafter=self.drafter.name,
                vocab_size=self._vocab_size,
                upload=self._backend.upload,
                device=self._backend.device,
            )

        return self._ask(propose, nothing)

    def commit(self, plan: StepPlan, acceptance: Acceptance) -> None:
        """Tell the drafter what was kept."""
        self._ask(lambda: self.drafter.commit(plan, acceptance), None)

    def review(self, plan: StepPlan) -> ReviewReport:
        """Review the rows of a plan that are to be; the report is of none if that fails."""
        drafter, nothing = self._model, ReviewReport(())
        if not plan.reviews or drafter is None:
            return nothing

        def review() -> ReviewReport:
            report = drafter.review([plan.requests[i] for i in plan.reviews])
            report.check(len(plan.reviews))
            return report

        return self._ask(review, nothing)

    def num_reviewable(self, request: Request) -> int | None:
        """Return as `ModelDrafter.num_reviewable`; ``None`` also where the drafter is none."""
        drafter = self._model
        return None if drafter is None else self._ask(lambda: drafter.num_reviewable(request), None)

    def stops_early(self, request: Request) -> bool:
        """Return as `ModelDrafter.stops_early`; no if the drafter is none."""
        drafter = self._model
        return drafter is not None and self._ask(lambda: drafter.stops_early(request), False)

    def _ask(self, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it costs drafts and no request
            self.num_failures += 1
            [frame] = traceback.extract_tb(error.__traceback__, limit=-1)  # the innermost
            message = (
                f"the drafter {self.drafter.name!r} failed, which costs drafts and no request: {type(error).__name__}: {error} "
                f"({frame.filename}:{frame.lineno})"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return otherwise
