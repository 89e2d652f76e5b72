"""How many prompt tokens fit into a step that must not take longer than a target."""

from __future__ import annotations

from bisect import bisect_right

from titan.adaptive.host_time import HostTime
from titan.adaptive.pass_cost import PassCost
from titan.core.step import StepPlan

MIN_PROMPT_TOKENS = 16
"""Prompt tokens that a step takes in any case, if there are as many, so that prompts get on."""

DRAFT_RATE = 1 / 8
"""Weight of a step in the mean number of draft tokens, and in the share of steps that have any."""


class Pace:
    """Bounds the prompt tokens of steps by the expected time of these steps.

    A step takes the time of its pass and, measured apart, that of the rest of it: drafting and the host's work.

    Args:
        cost: of the target's passes; followed from here on.
        max_step_s: seconds that a step should take at most.
    """

    def __init__(self, cost: PassCost, max_step_s: float) -> None:
        self._cost, self._max_step_s = cost, max_step_s
        self._rest = HostTime()
        self._num_drafts = 0.0  # per request that emits tokens
        self._drafting = 0.0  # share of the steps with drafts

    def prefill_limit(self, num_decodes: int, num_context_tokens: int, most: int) -> int:
        """Return the largest number of prompt tokens with which a step is expected to take no longer than the target.

        Args:
            num_decodes: requests that decode, at least 1.
            num_context_tokens: tokens computed before, of all requests.
            most: bound of the result, which is otherwise at least `MIN_PROMPT_TOKENS`.
        """
        num_rows = num_decodes * (1 + self._num_drafts)
        plain, drafting = (self._rest.predict(num_decodes, count) for count in (0, num_decodes))
        seconds = self._max_step_s - plain - self._drafting * (drafting - plain)
        fitting = bisect_right(
            range(1, most + 1), seconds, key=lambda count: self._cost.predict(num_rows + count, num_context_tokens)
        )
        return min(max(fitting, MIN_PROMPT_TOKENS), most)

    def note(self, plan: StepPlan, num_emitting: int, num_drafts: int, step_s: float, pass_s: float) -> None:
        """Learn from a step.

        Args:
            plan: of the step.
            num_emitting: requests that emitted tokens.
            num_drafts: draft tokens of all its requests.
            step_s: seconds of all of it.
            pass_s: seconds of the target's pass.
        """
        self._cost.note(sum(plan.num_tokens) + num_drafts, plan.num_context_tokens, pass_s)
        if num_emitting:
            self._num_drafts += DRAFT_RATE * (num_drafts / num_emitting - self._num_drafts)
            self._drafting += DRAFT_RATE * ((num_drafts > 0) - self._drafting)
            self._rest.note(num_emitting, num_emitting * (num_drafts > 0), step_s - pass_s)
