"""Iteration-level continuous batching: which requests run in a step, with how many tokens, and how they advance.

There is no prefill phase and no decode phase: each step gives a request tokens so that `num_computed_tokens` catches up
with its tokens and draft nodes. Running requests come first, in order of arrival; then waiting ones join.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from titan.core.metrics import EngineCounters
from titan.core.options import ScheduleOptions
from titan.core.outputs import RequestMetrics
from titan.core.request import FinishReason, Request
from titan.core.step import Acceptance, StepPlan
from titan.memory.kv_cache import KVCache
from titan.schedule.admission import max_num_blocks
from titan.schedule.preemption import SwapRule
from titan.schedule.stopping import append_tokens

Lookahead = Callable[[Request, int], int]
"""Returns the slots after the root that drafting this many nodes would like to write: at least as many, more for a beam."""


class Scheduler:
    """Holds the waiting and the running requests.

    Args:
        options: how many requests and tokens may run, and how many wait.
        kv: block tables and KV of all requests.
        counters: totals to update.
    """

    def __init__(self, options: ScheduleOptions, kv: KVCache, counters: EngineCounters) -> None:
        self.options = options
        self.kv = kv
        self.counters = counters
        self.swap_rule = SwapRule(options.preemption_mode, options.prefill_chunk_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def is_full(self) -> bool:
        """Whether no more requests may wait."""
        return len(self.waiting) >= self.options.max_waiting_requests

    def add(self, request: Request) -> None:
        """Queue a request; one that was admitted, but no longer fits since the KV cache was resized, ends at once, with an error.

        Raises:
            ValueError: the queue is full.
        """
        if self.is_full:
            raise ValueError(
                f"max_waiting_requests={self.options.max_waiting_requests} requests are waiting already: "
                f"request {request.request_id} is refused; add it again after some steps"
            )
        self.waiting.append(request)
        if (num_blocks := max_num_blocks(request, self.kv.block_size)) > self.kv.num_blocks:
            self.abort(request, f"the KV cache was resized to {self.kv.num_blocks} blocks, and the request may need {num_blocks}")

    def abort(self, request: Request, error: str | None = None) -> None:
        """Abort a waiting or running request and release its blocks."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.error = error
        self._finish(request, FinishReason.ABORT)

    def schedule(self, max_draft_tokens: int, lookahead: Lookahead) -> StepPlan:
        """Choose the rows of the next step and reserve the slots they write.

        Args:
            max_draft_tokens: maximum draft tokens per request that the current drafter proposes.
            lookahead: of the same drafter; slots beyond the drafts are reserved only if blocks are free, and preempt nobody.
        """
        plan = StepPlan([], [], [], [])
        self.kv.await_copies()
        self._choose_rows(plan, max_draft_tokens)
        for request, budget in zip(plan.requests, plan.draft_budgets, strict=True):
            num_slots = lookahead(request, budget) if budget else 0
            is_more = num_slots > budget and self.kv.reserve(request, request.num_tokens + num_slots)
            plan.num_slots.append(num_slots if is_more else budget)
        return plan

    def _choose_rows(self, plan: StepPlan, max_draft_tokens: int) -> None:
        """Add rows to the plan, and reserve blocks for their tokens and drafts."""
        budget = self.options.max_num_batched_tokens
        num_preemptions = self.counters.num_preemptions
        index = 0
        while budget > 0 and index < len(self.running):  # preemption shortens the list from its end
            request = self.running[index]
            num_tokens, num_drafts = self._row(request, budget, max_draft_tokens)
            if self._reserve_by_preemption(request, request.num_computed_tokens + num_tokens + num_drafts):
                budget -= plan.add(request, num_tokens, num_drafts)
            index += 1
        if self.counters.num_preemptions > num_preemptions:
            return  # no room for the running requests: none joins
        while budget > 0 and self.waiting and len(self.running) < self.options.max_batch_size:
            request = self.waiting[0]
            if self.kv.awaits_sibling(request) or (self.running and not self._has_room(request, max_draft_tokens)):
                break
            is_swapped = request.is_swapped
            self._start(request)
            if is_swapped and plan.requests:
                continue  # its KV arrives beside this step's passes
            self.kv.await_copies()
            num_tokens, num_drafts = self._row(request, budget, max_draft_tokens)
            is_reserved = self.kv.reserve(request, request.num_computed_tokens + num_tokens + num_drafts)
            assert is_reserved, "a request that runs alone fits: larger ones are refused when they are added"
            budget -= plan.add(request, num_tokens, num_drafts)

    def update(self, plan: StepPlan, acceptance: Acceptance) -> list[Request]:
        """Advance counters, append tokens, and finish the requests that ended.

        Returns:
            The requests whose output changed.
        """
        changed, proposed, accepted = [], list[int](), list[int]()  # requests, depths of draft tokens
        num_rows = num_tokens = 0
        now = time.monotonic()
        depths, first_nodes = acceptance.trees.nodes.depths.tolist(), acceptance.trees.start_loc.tolist()
        for i, request in enumerate(plan.requests):
            if acceptance.token_ids[i] or acceptance.errors[i] is not None:
                changed.append(request)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs += acceptance.prompt_logprobs.get(i, ())
            if acceptance.token_ids[i]:
                num_emitted = append_tokens(request, acceptance.token_ids[i])
                if request.logprobs is not None:
                    request.logprobs += acceptance.logprobs[i][:num_emitted]
                if request.metrics.first_token_time is None:
                    request.metrics.first_token_time = now
                own = depths[first_nodes[i] : first_nodes[i + 1]], range(1, min(len(acceptance.paths[i]), num_emitted) + 1)
                _count(request.metrics, 1, num_emitted, *own)
                num_rows += 1
                num_tokens += num_emitted
                proposed += own[0]
                accepted += own[1]
            if acceptance.errors[i] is not None and not request.is_finished:  # after a stop it does not matter
                self.abort(request, acceptance.errors[i])
                continue
            request.commit(plan.num_tokens[i] + len(acceptance.paths[i]))
            self.kv.cache_full_blocks(request)
        finished = [request for request in changed if request.is_finished and request.finish_reason is not FinishReason.ABORT]
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
            for request in finished:
                assert request.finish_reason is not None
                self._finish(request, request.finish_reason)
        self.counters.num_steps += 1
        _count(self.counters, num_rows, num_tokens, proposed, accepted)
        return changed

    def _has_room(self, request: Request, max_draft_tokens: int) -> bool:
        """Whether a waiting request fits beside the running ones, drafts included; if not, one would soon be preempted."""
        num_missing = sum(self.kv.num_missing_blocks(each, each.num_tokens + max_draft_tokens) for each in (*self.running, request))
        return num_missing <= self.kv.pool.num_free

    def _row(self, request: Request, budget: int, max_draft_tokens: int) -> tuple[int, int]:
        """Return the numbers of committed and draft tokens of a request's row.

        There are drafts only after the root, at most one fewer than the tokens still to be emitted: the final token needs none.
        """
        num_tokens = min(request.num_tokens - request.num_computed_tokens, self.options.prefill_chunk_size, budget)
        params = request.params
        if not params.use_speculative or request.num_computed_tokens + num_tokens < request.num_tokens:
            return num_tokens, 0
        own = max_draft_tokens if params.max_draft_tokens is None else params.max_draft_tokens
        return num_tokens, max(0, min(own, max_draft_tokens, budget - num_tokens, request.num_remaining_tokens - 1))

    def _reserve_by_preemption(self, request: Request, num_slots: int) -> bool:
        """Reserve slots for a running request, preempting the most recent ones as needed; False if it was preempted itself."""
        while not self.kv.reserve(request, num_slots):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks away and put it first in the queue; its KV goes to the swap space, or is computed again."""
        if self.swap_rule.prefers_swap(request) and self.kv.swap_out(request):
            self.counters.num_swapped_out += 1
        else:
            self.kv.free(request)
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.metrics.num_preemptions += 1
        self.counters.num_preemptions += 1

    def _start(self, request: Request) -> None:
        """Start the first waiting request, at the end of what is already computed of it."""
        is_swapped = request.is_swapped
        self.kv.admit(request)
        self.waiting.popleft()
        self.running.append(request)
        if is_swapped:
            self.counters.num_swapped_in += 1
            return
        metrics = request.metrics
        self.counters.num_cached_tokens += metrics.num_cached_tokens
        self.counters.num_admitted_tokens += request.num_tokens
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.detokenizer is not None and not isinstance(request.stop_reason, str):
            request.detokenizer.finish()  # text truncated at a stop string is already complete
        self.counters.num_finished_requests += 1
        request.metrics.finished_time = time.monotonic()
        self.kv.free(request)


def _count(
    counts: RequestMetrics | EngineCounters, num_rows: int, num_emitted: int, proposed: Sequence[int], accepted: Sequence[int]
) -> None:
    """Count verifications, and draft tokens by depth; accepted ones only if they were emitted, not after a stop."""
    counts.num_sequence_steps += num_rows
    counts.num_emitted_tokens += num_emitted
    _count_depths(counts.proposed_per_depth, proposed)
    _count_depths(counts.accepted_per_depth, accepted)


def _count_depths(counts: list[int], depths: Sequence[int]) -> None:
    """Add one to ``counts[d - 1]`` for each depth d."""
    if len(counts) < (deepest := max(depths, default=0)):
        counts.extend([0] * (deepest - len(counts)))
    for depth in depths:
        counts[depth - 1] += 1
