"""Adaptive speculation of an engine: what the controller is told of each step, and what becomes of its decisions."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from titan.adaptive.controller import Candidate, Controller, Decision, Load, Outcome
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.draft.base import ConfidentDrafter, Drafter
from titan.kernels.interfaces import GrowthWork


class StepTimes(NamedTuple):
    """Seconds of a step's parts."""

    whole: float
    draft: float  # from the call of the drafter to its return
    target: float  # of the target's pass; on a device that works on its own: from the call of the drafter to the results


class AdaptiveSpeculation:
    """Tells a controller what a step would be, lowers the step's budgets to its decision, and tells it what came of that.

    Args:
        controller: of the target and this drafter.
        drafter: proposes.
        max_nodes: maximum draft tokens per request.
        is_host: whether times of single passes can be measured.
        is_latency: whether each request's tokens count the more, the fewer it gets.
    """

    def __init__(self, controller: Controller, drafter: Drafter, max_nodes: int, *, is_host: bool, is_latency: bool) -> None:
        self.controller, self.max_nodes = controller, max_nodes
        self._confident = drafter if isinstance(drafter, ConfidentDrafter) else None
        self._is_host, self._is_latency = is_host, is_latency
        self._rows: list[int] = []  # of the plan, that emit tokens
        self._stops_early: list[bool] = []
        self._decision = Decision((), ())
        self.may_draft = True
        """Whether room for drafts should be reserved in the next step."""

    def decide(self, plan: StepPlan) -> None:
        """Set what the rows of a plan draft: budgets and worths."""
        rows, candidates = [], []
        num_rows = num_context = 0
        for i, (request, num_tokens) in enumerate(zip(plan.requests, plan.num_tokens, strict=True)):
            num_rows += num_tokens
            num_context += request.num_computed_tokens
            if plan.reaches_root(i):
                rows.append(i)
                candidates.append(self._candidate(request))
        decision = self.controller.choose(Load(candidates, num_rows, num_context))
        for i, count, worth in zip(rows, decision.num_nodes, decision.worths, strict=True):
            if worth is None or not count:
                plan.draft_budgets[i] = min(plan.draft_budgets[i], count)
            plan.worths[i] = worth
        plan.drafts_prompts = self.controller.optimum.drafts
        self._rows, self._decision = rows, decision

    def _candidate(self, request: Request) -> Candidate:
        params = request.params
        most = self.max_nodes if params.max_draft_tokens is None else min(self.max_nodes, params.max_draft_tokens)
        history = request.draft_history
        return Candidate(
            history.acceptance,
            max(0, min(most, request.num_remaining_tokens - 1)) if params.use_speculative else 0,
            request.num_tokens - request.num_drafted_context,
            self._confident is not None and self._confident.stops_early(request),
            1 / history.tokens_per_step.value if self._is_latency else 1.0,
        )

    def observe(self, plan: StepPlan, acceptance: Acceptance, work: GrowthWork | None, times: StepTimes) -> None:
        """Learn from a step.

        Args:
            plan: as decided.
            acceptance: of its rows.
            work: of the draft model's passes; ``None``: there is no draft model.
            times: of the step.
        """
        num_tokens = num_nodes = 0
        for i, candidate in zip(self._rows, self.controller.load.candidates, strict=True):
            num_tokens += len(acceptance.token_ids[i])
        ...
