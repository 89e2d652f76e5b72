"""The seam of how much is drafted: what an engine asks of the policy that decides it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from titan.core.draft_history import AcceptanceCounts
from titan.core.metrics import SpeculationMetrics
from titan.core.step import Acceptance, StepPlan
from titan.core.step_times import StepTimes
from titan.draft.base import ReviewReport


class BudgetPolicy(Protocol):
    """Decides how much each step drafts; the engine's own is `titan.adaptive.speculation.AdaptiveSpeculation`.

    ``num_reserved`` is the number of draft tokens of each request for which the next step reserves room; more than the drafter
    proposes are not reserved. A subclass need have only this and `decide`. An error fails the step.
    """

    num_reserved: int

    @property
    def fleet(self) -> AcceptanceCounts | None:
        """Counts of acceptance that all requests share, kept up to date like each request's own; ``None``: neither are kept."""
        return None

    @abstractmethod
    def decide(self, plan: StepPlan) -> None:
        """Lower the budgets of a plan, for which room is reserved; worths and reviews may be set as well."""

    def observe(self, plan: StepPlan, acceptance: Acceptance, report: ReviewReport, times: StepTimes) -> None:  # noqa: ARG002
        """Learn from a step whose tokens have been appended; not called for one of which passes had to run again.

        Args:
            plan: as decided.
            acceptance: of its rows.
            report: of its reviews; of none where they failed.
            times: of the step.
        """
        return  # else type checkers take this for abstract

    def metrics(self, mean_draft_tokens: float) -> SpeculationMetrics | None:  # noqa: ARG002
        """Return what is known and decided.

        Args:
            mean_draft_tokens: per request and step, since the start.
        """
        return None


def lower_budgets(policy: BudgetPolicy, plan: StepPlan) -> None:
    """Let a policy lower the budgets of a plan.

    Raises:
        ValueError: it left a row without one, or raised one: slots beyond those that are reserved may be another request's.
    """
    reserved = [*plan.draft_budgets]
    policy.decide(plan)
    left = plan.draft_budgets
    if len(left) != len(reserved) or not all(0 <= budget <= most for budget, most in zip(left, reserved, strict=True)):
        name = type(policy).__name__
        raise ValueError(f"{name}.decide() left draft_budgets={left}, which is not allowed: each is from 0 to that of {reserved}")
