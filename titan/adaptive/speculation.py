"""Adaptive speculation of an engine: what the controller is told of each step, and what becomes of its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

from titan.adaptive.controller import Controller
from titan.adaptive.load import Candidate, Load, Outcome
from titan.adaptive.optimum import Optimum
from titan.adaptive.rest import Rest
from titan.adaptive.value import own_acceptance
from titan.core.draft_history import AcceptanceCounts, DraftHistory
from titan.core.growth import Worth
from titan.core.metrics import SpeculationMetrics
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.step_times import StepTimes
from titan.draft.base import ReviewReport
from titan.draft.drafting import Drafting

TEMPERATURE_RATE = 1 / 32
"""Weight of one request's temperature, after a step or a token of a review, in the mean that new requests start at."""

RESERVED_NODES = 8
"""Nodes for which room is reserved, as a multiple of those expected: where the draft is sure of itself, trees grow larger."""


@dataclass(slots=True)
class AdaptiveSpeculation:
    """The engine's own `titan.adaptive.policy.BudgetPolicy`: it applies a controller to the steps."""

    controller: Controller
    drafting: Drafting
    max_nodes: int  # per request
    is_latency: bool = False  # whether a request's tokens count the more, the fewer it gets
    num_reserved: int = 0  # draft tokens of each request for which the next step should reserve room
    _log_temperature: float | None = None  # mean over the greedy requests of what their draft's probabilities are compared at
    _rows: list[int] = field(default_factory=list)  # of the plan, those that emit tokens
    _last_histories: list[DraftHistory] = field(default_factory=list)  # of the requests of the last step, if each had one token
    _typical: dict[int, DraftHistory] = field(default_factory=dict)  # by row, of greedy requests without transforms
    _num_unfollowed: int = 0  # repeats with drafts since the temperatures of these were followed
    _budgets: list[int] = field(default_factory=list)  # most nodes of each row of the plan
    _worths: dict[int, Worth] = field(default_factory=dict)  # by row
    _is_repeat: bool = False  # whether the present step does as the one before
    _load: Load = field(default_factory=lambda: Load((), 0, 0))
    _rest: Rest | None = None  # which the present step is part of
    _last_shown: tuple[bool, Optimum] = False, Optimum([], 0.0)  # whether only a probe drafted, when last some might have drafted

    @property
    def fleet(self) -> AcceptanceCounts:
        return self.controller.fleet

    def decide(self, plan: StepPlan) -> None:
        """Set budgets, worths and reviews of a plan's rows."""
        histories = [request.draft_history for request in plan.requests]
        is_alike = histories == self._last_histories and sum(plan.num_tokens) == len(histories)
        is_alike = is_alike and (self._rest is not None or any(plan.draft_budgets))  # a last token is no failure to draft
        self._is_repeat = self.controller.repeat(is_alike)
        if self._is_repeat:
            plan.drafts_prompts = False  # there are none
        else:
            self._decide_anew(plan, histories)
        plan.draft_budgets, plan.worths = list(map(min, plan.draft_budgets, self._budgets)), self._worths

    def _decide_anew(self, plan: StepPlan, histories: list[DraftHistory]) -> None:
        for history in self._typical.values() if self._num_unfollowed else ():
            self._follow_temperature(history, self._num_unfollowed)
        self._num_unfollowed = 0
        rows, num_rows, num_context = plan.emitting_rows(), sum(plan.num_tokens), plan.num_context_tokens
        self._rows, self._budgets, self._worths = rows, [0] * len(plan.requests), {}
        num_new = [plan.requests[i].metrics.first_token_time for i in rows].count(None)
        is_first_try = len(plan.requests) == 1 and not self.controller.has_tried  # a long prompt is too much for a probe
        num_ending = sum([plan.num_tokens[i] for i in rows]) - len(rows)
        self._last_histories = histories if num_rows == len(rows) else []
        load = Load((), num_rows, num_context, num_ending)
        self._rest = self.controller.rest(load, len(rows), num_new)
        if self._rest is not None:
            plan.drafts_prompts = num_rows > len(rows) and self.controller.optimum.drafts
            return
        self._typical = {i: histories[i] for i in rows if (each := plan.requests[i]).params.is_greedy and not each.has_transforms}
        self._load = load._replace(candidates=[self._candidate(plan.requests[i]) for i in rows])
        decision = self.controller.choose(self._load, has_room=self.num_reserved > 0)
        optimum = self.controller.optimum
        plan.drafts_prompts = optimum.drafts or is_first_try
        self.num_reserved = min(self.max_nodes, RESERVED_NODES * max(optimum.num_nodes, default=0))
        if any(each.max_nodes for each in self._load.candidates):
            self._last_shown = decision.is_probe, optimum
        plan.reviews = [rows[i] for i in decision.reviewed]
        for i, most, worth in zip(rows, decision.most_nodes, decision.worths, strict=True):
            self._budgets[i] = most
            if worth is not None:
                self._worths[i] = worth

    def _candidate(self, request: Request) -> Candidate:
        history = request.draft_history
        if history.temperature is None and request.params.is_greedy and self._log_temperature is not None:
            history.start_at(exp(self._log_temperature))
        return Candidate(
            counts=history.acceptance,
            max_nodes=request.most_drafts(self.max_nodes, self.drafting.max_len),
            num_missing=request.num_tokens - request.num_drafted_context if self.drafting.is_fed else 1,
            num_remaining=request.num_remaining_tokens,
            stops_early=self.drafting.stops_early(request),
            weight=1 / history.tokens_per_step.value if self.is_latency else 1.0,
            is_typical=not request.has_transforms,
            num_reviewable=self.drafting.num_reviewable(request),
        )

    def observe(self, plan: StepPlan, acceptance: Acceptance, report: ReviewReport, times: StepTimes) -> None:
        if self.is_latency:
            for i in self._rows:
                plan.requests[i].draft_history.tokens_per_step.note(1 + len(acceptance.paths[i]))
        draft_seconds, passes = 0.0, (0, 0)  # drafting of which no passes are known is a part of the host
        if (growth := acceptance.trees.growth) is not None:
            draft_seconds = times.draft if growth.seconds is None else growth.seconds
            passes = growth.num_passes, growth.num_rows
        if self._rest is not None:
            self._rest.note(times.recurring, times.target, draft_seconds)
            return
        num_nodes, num_accepted = acceptance.trees.num_nodes, sum(map(len, acceptance.paths))
        seconds = (times.recurring, draft_seconds, times.target, times.adapt)
        outcome = Outcome(num_nodes, num_accepted, *passes, *seconds, report.num_rows, report.seconds)
        if self._is_repeat:
            self.controller.note_repeat(outcome)
            self._num_unfollowed += 1
            return
        self.controller.observe(outcome)
        if num_nodes:
            for history in self._typical.values():
                self._follow_temperature(history)
        for i, review in zip(plan.reviews, report.reviews, strict=False):
            if i in self._typical and review.logprobs is not None:
                self._follow_temperature(self._typical[i], len(review.logprobs))
        may_draft_a_node = self.controller.is_probe_due and any(each.num_reviewable is None for each in self._load.candidates)
        self.num_reserved = max(self.num_reserved, int(may_draft_a_node))

    def _follow_temperature(self, history: DraftHistory, num_observed: int = 1) -> None:
        if (temperature := history.temperature) is not None:
            before = log(temperature) if self._log_temperature is None else self._log_temperature
            self._log_temperature = before + (log(temperature) - before) * (1 - (1 - TEMPERATURE_RATE) ** num_observed)

    def metrics(self, mean_draft_tokens: float) -> SpeculationMetrics:
        controller, (is_probe, optimum) = self.controller, self._last_shown
        target, draft = controller.costs.target, controller.costs.draft
        return SpeculationMetrics(
            choice="probe" if is_probe else "on" if optimum.drafts else "off",
            mean_draft_tokens=mean_draft_tokens,
            off_rate=optimum.off_rate / optimum.mean_weight,
            on_rate=optimum.on_rate / optimum.mean_weight,
            acceptance=own_acceptance(controller.fleet, controller.fleet.agreement),
            agreement=controller.fleet.agreement,
            target_pass={size: target.predict(size, 0) for size in target.sizes},
            target_context_token=target.seconds_per_context_token,
            draft_pass={} if draft is None else {size: draft.predict(size, 0) for size in draft.sizes},
            draft_context_token=0.0 if draft is None else draft.seconds_per_context_token,
        )
