"""Adaptive speculation of an engine: what the controller is told of each step, and what becomes of its decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from titan.adaptive.controller import Candidate, Controller, Decision, Load, Optimum, Outcome
from titan.core.metrics import SpeculationMetrics
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.trees import GrowthReport
from titan.draft.base import ConfidentDrafter, Drafter

RESERVED_NODES = 8
"""Nodes for which room is reserved, as a multiple of those expected: where the draft is sure of itself, trees grow larger."""


class StepTimes(NamedTuple):
    """Seconds of a step and of its parts."""

    whole: float
    draft: float  # proposing; on a device that works on its own, until that is launched
    target: float  # the target's pass; on such a device, until all results are there


@dataclass(slots=True)
class AdaptiveSpeculation:
    """Applies a controller to the steps of an engine."""

    controller: Controller
    drafter: Drafter
    max_nodes: int  # per request
    is_latency: bool = False  # whether a request's tokens count the more, the fewer it gets
    num_reserved: int = 0  # draft tokens of each request for which the next step should reserve room
    _is_reserved: bool = False  # whether this step has room for drafts
    _confident: ConfidentDrafter | None = None
    _rows: list[int] = field(default_factory=list)  # of the plan, those that emit tokens
    _load: Load = field(default_factory=lambda: Load((), 0, 0))
    _decision: Decision = field(default_factory=lambda: Decision((), ()))
    # of the last step in which a request might have drafted
    _shown: tuple[Decision, Optimum] = field(default_factory=lambda: (Decision((), ()), Optimum([], 0.0, 0.0)))

    def __post_init__(self) -> None:
        self._confident = self.drafter if isinstance(self.drafter, ConfidentDrafter) else None

    def decide(self, plan: StepPlan) -> None:
        """Set budgets and worths of a plan's rows."""
        rows, candidates = [], []
        num_rows = num_context = 0
        for i, (request, num_tokens) in enumerate(zip(plan.requests, plan.num_tokens, strict=True)):
            num_rows += num_tokens
            num_context += request.num_computed_tokens
            if plan.reaches_root(i):
                rows.append(i)
                candidates.append(self._candidate(request))
        self._rows, self._load = rows, Load(candidates, num_rows, num_context)
        decision = self._decision = self.controller.choose(self._load)
        if any(each.max_nodes for each in candidates):
            self._shown = decision, self.controller.optimum
        self._is_reserved = self.num_reserved > 0
        self.num_reserved = min(self.max_nodes, RESERVED_NODES * max(decision.num_nodes, default=0))
        for i, count, worth in zip(rows, decision.num_nodes, decision.worths, strict=True):
            if worth is None:
                plan.draft_budgets[i] = min(plan.draft_budgets[i], count)
            else:
                plan.worths[i] = worth
        plan.drafts_prompts = self.controller.optimum.drafts

    def _candidate(self, request: Request) -> Candidate:
        params, history = request.params, request.draft_history
        most = self.max_nodes if params.max_draft_tokens is None else min(self.max_nodes, params.max_draft_tokens)
        return Candidate(
            history.acceptance,
            max(0, min(most, request.num_remaining_tokens - 1)) if params.use_speculative else 0,
            request.num_tokens - request.num_drafted_context,
            self._confident is not None and self._confident.stops_early(request),
            1 / history.tokens_per_step.value if self.is_latency else 1.0,
        )

    def observe(self, plan: StepPlan, acceptance: Acceptance, growth: GrowthReport | None, times: StepTimes) -> None:
        """Learn from a step.

        Args:
            plan: as decided.
            acceptance: of its rows.
            growth: of its trees, if a draft model grew them.
            times: of the step.
        """
        trees = acceptance.trees
        starts, parents, scores = trees.start_loc.tolist(), trees.nodes.parents.tolist(), trees.nodes.scores.tolist()
        first_scores = None if growth is None else growth.first_scores.tolist()
        num_tokens = num_accepted = 0
        for i, candidate in zip(self._rows, self._load.candidates, strict=True):
            request, path, first, end = plan.requests[i], acceptance.paths[i], starts[i], starts[i + 1]
            num_tokens, num_accepted = num_tokens + len(acceptance.token_ids[i]), num_accepted + len(path)
            request.draft_history.tokens_per_step.note(1 + len(path))
            fleets = () if request.params.has_transforms else (self.controller.fleet,)
            counts = candidate.counts, *fleets
            is_confident = candidate.stops_early and first_scores is not None and first_scores[i] == first_scores[i]
            if is_confident or end > first:
                for each in counts:
                    each.note_draft(exp(first_scores[i]) if is_confident and first_scores else 1.0)
            if end > first:
                own = scores[first:end] if is_confident else [0.0] * (end - first)
                for probability, is_accepted in _first_children(parents[first:end], own, path):
                    for each in counts:
                        each.note(probability, is_accepted)
        draft_seconds = times.draft if growth is None else growth.seconds
        outcome = Outcome(
            num_tokens,
            trees.num_nodes,
            num_accepted,
            0 if growth is None else growth.num_passes,
            0 if growth is None else growth.num_rows,
            times.whole,
            draft_seconds,
            times.target,
        )
        if self._is_reserved or not self._decision.drafts:  # else it drafts from the next step on
            self.controller.observe(outcome)
        self.num_reserved = max(self.num_reserved, int(self.controller.is_probe_due))

    def metrics(self, mean_draft_tokens: float) -> SpeculationMetrics:
        """Return what the controller knows and decided.

        Args:
            mean_draft_tokens: per request and step, since the start.
        """
        controller, (decision, optimum) = self.controller, self._shown
        target, draft = controller.target, controller.draft
        return SpeculationMetrics(
            choice="probe" if decision.is_probe else "on" if decision.drafts else "off",
            mean_draft_tokens=mean_draft_tokens,
            off_rate=optimum.off_rate,
            on_rate=optimum.on_rate,
            acceptance=controller.acceptance(controller.fleet),
            agreement=controller.fleet_agreement,
            target_pass={size: target.predict(size, 0) for size in target.sizes},
            target_context_token=target.seconds_per_context_token,
            draft_pass={} if draft is None else {size: draft.predict(size, 0) for size in draft.sizes},
            draft_context_token=0.0 if draft is None else draft.seconds_per_context_token,
        )


def _first_children(parents: list[int], scores: Sequence[float], path: Sequence[int]) -> list[tuple[float, bool]]:
    """Return the draft's probability of the first child of each node that verification reached, and whether it was accepted."""
    found = []
    score, accepted = 0.0, iter([*path, -1])
    for node in (-1, *path):
        child = next(accepted)
        if node not in parents:
            break
        first = parents.index(node)
        found.append((exp(scores[first] - score), first == child))
        score = scores[child]
    return found
