"""Made-up machines: engines are told what their steps would take on them, so that what they decide is the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from titan.adaptive.measure import Subject
from titan.adaptive.pass_cost import PassCost
from titan.adaptive.speculation import AdaptiveSpeculation
from titan.core.step import Acceptance, StepPlan
from titan.core.step_times import StepTimes
from titan.draft.base import ReviewReport


class Machine:
    """A processor on which a pass of the draft may take longer from some step on."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        drafts: dict[int, float] = {0: 0.01},  # noqa: B006
        target: Callable[[float], float] = lambda _: 1.0,
    ) -> None:
        """With the milliseconds of a pass: of the draft by step, of the target by rows."""
        self.target, self.drafts, self.choices = target, drafts, list[str]()
        monkeypatch.setattr("titan.adaptive.profiler.measure", self.curves)
        observe = AdaptiveSpeculation.observe

        def timed(
            own: AdaptiveSpeculation,
            plan: StepPlan,
            accepted: Acceptance,
            report: ReviewReport,
            _: StepTimes,
        ) -> None:
            seconds = target(sum(plan.num_tokens) + accepted.trees.num_nodes) / 1e3
            # a drafter without a model takes as long as a pass
            growth = accepted.trees.growth
            num_drafts = accepted.trees.num_nodes > 0 if growth is None else growth.num_passes
            of_draft = num_drafts * self.draft_milliseconds / 1e3
            if growth is not None:
                accepted = replace(accepted, trees=replace(accepted.trees, growth=growth._replace(seconds=of_draft)))
            of_review = bool(report.num_rows) * self.draft_milliseconds / 1e3
            report, of_draft = report._replace(seconds=of_review), of_draft + of_review
            observe(own, plan, accepted, report, StepTimes(draft=of_draft, target=seconds, commit=1e-4))
            self.choices.append(own.metrics(0.0).choice)

        monkeypatch.setattr(AdaptiveSpeculation, "observe", timed)

    @property
    def draft_milliseconds(self) -> float:
        return self.drafts[max(step for step in self.drafts if step <= len(self.choices))]

    def curves(self, subjects: Sequence[Subject], *_: Any) -> list[PassCost]:
        """In place of `titan.adaptive.measure.measure`; only a draft is fed."""
        sizes, draft_seconds = (1, 2, 4, 8, 16, 32, 64, 128), self.draft_milliseconds / 1e3
        of_target, of_draft = [self.target(size) / 1e3 for size in sizes], [draft_seconds] * len(sizes)
        return [PassCost(sizes, of_draft if subject.num_fed else of_target) for subject in subjects]
