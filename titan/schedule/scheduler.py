"""Iteration-level continuous batching: which requests run in a step, with how many tokens, and how they advance.

There is no prefill phase and no decode phase: each step gives a request tokens so that `num_computed_tokens` catches up
with its tokens and draft nodes. Running requests that decode come first, then those that have more to compute, and then waiting
ones join, both in the order of the policy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from titan.core.metrics import EngineCounters
from titan.core.options import ScheduleOptions
from titan.core.outputs import RequestMetrics
from titan.core.request import FinishReason, Request
from titan.core.step import Acceptance, StepPlan
from titan.memory.kv_cache import KVCache
from titan.schedule.admission import max_num_blocks
from titan.schedule.heap import Heap
from titan.schedule.queues import RequestQueues
from titan.schedule.rows import PrefillLimit, RowChooser
from titan.schedule.stopping import append_tokens, fail_if_unreadable, mark_failed

Lookahead = Callable[[Sequence[Request], Sequence[int]], Sequence[int]]
"""Returns how many slots after the root the drafter would like to write for each request, given the number of its draft nodes: at
least as many, more for a beam."""


class Scheduler:
    """Chooses what each step runs, and takes requests in and out.

    A request that ends leaves its queue last of all: so an interrupt loses none.

    Args:
        options: how many requests and tokens may run, how many wait, and in which order.
        kv: block tables and KV of all requests.
        counters: totals to update.
        clock: returns seconds, on the clock of the requests' times of arrival.
        prefill_limit: bounds the prompt tokens of steps in which requests decode; ``None`` = by the options alone.
    """

    def __init__(
        self,
        options: ScheduleOptions,
        kv: KVCache,
        counters: EngineCounters,
        clock: Callable[[], float] = time.monotonic,
        prefill_limit: PrefillLimit | None = None,
    ) -> None:
        self.options = options
        self.kv = kv
        self.counters = counters
        self.queues = queues = RequestQueues(options, kv, counters, clock)
        self.policy, self.waiting, self.running, self.service = queues.policy, queues.waiting, queues.running, queues.service
        self._prefill_limit = prefill_limit
        self._expiries: Heap[Request] = Heap()  # unfinished requests by the time at which they are aborted

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds, as the times of requests are in."""
        return self.queues.clock

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def in_flight(self) -> tuple[Request, ...]:
        """The requests that run or wait."""
        return (*self.running, *self.waiting)

    @property
    def has_room(self) -> bool:
        """Whether another request may be queued."""
        return len(self.waiting) < self.options.max_waiting_requests

    def add(self, request: Request) -> None:
        """Queue a request; it ends at once, with an error, if the policy fails, or the KV cache was resized and it no longer fits.

        Raises:
            ValueError: the queue is full.
        """
        if not self.has_room:
            raise ValueError(
                f"max_waiting_requests={self.options.max_waiting_requests} requests are waiting already: "
                f"request {request.request_id} is refused; add it again after some steps"
            )
        try:
            self.queues.queue(request)
        except RuntimeError as error:  # the policy would never start it
            self._drop(request, str(error))
            del self.waiting[request]
            return
        if request.expiry is not None:
            self._expiries.push(request, request.expiry)
        if (num_blocks := max_num_blocks(request, self.kv.block_size)) > self.kv.num_blocks:
            self.fail(request, f"the KV cache was resized to {self.kv.num_blocks} blocks, and the request may need {num_blocks}")

    def abort(self, request: Request, error: str | None = None) -> None:
        """Abort an unfinished request and release its blocks; it need not have been queued."""
        self._end(request, FinishReason.ABORT, error)

    def fail(self, request: Request, error: str) -> None:
        """End a request with an error, and release its blocks; it need not have been queued, and may have ended before."""
        if request.is_finished:
            mark_failed(request, error)
        else:
            self._end(request, FinishReason.ERROR, error)

    def _end(self, request: Request, reason: FinishReason, error: str | None) -> None:
        assert not request.is_finished
        request.finish_reason, request.error = reason, error
        if request in self.waiting:
            self.queues.tell(self.policy.remove, request)
        elif request not in self.running:
            self._count_finished(request)
            return
        self._finish(request)

    def end_all(self, error: str) -> None:
        """End all requests with an error, after an interrupt anywhere; the KV cache must have lost its content before.

        Requests that the interrupted step has finished end with the error, too: their outputs may be incomplete.
        """
        for request in dict.fromkeys(self.in_flight):
            self._drop(request, error)
        self._expiries = Heap()
        self.waiting.clear()
        self.running.clear()

    def _drop(self, request: Request, error: str) -> None:
        """End a request with an error, whose blocks are free, and which is yet to leave."""
        mark_failed(request, error)
        self._count_finished(request)
        for tell in (self.policy.remove, self.policy.end) if request in self.waiting else (self.policy.end,):
            with suppress(Exception):  # it may have been told already, or be what failed
                tell(request)

    def expire(self) -> list[Request]:
        """Abort the requests that have not finished within their ``timeout_s``, and return them."""
        expired = []
        while self._expiries and (entry := self._expiries.top())[1] <= self.clock():
            self.time_out(entry[0])
            expired.append(entry[0])
        return expired

    def time_out(self, request: Request) -> None:
        """Abort an unfinished request whose ``timeout_s`` is over; it need not have been queued."""
        state = "running" if request in self.running else "waiting"
        self.abort(
            request,
            f"timeout_s={request.terms.timeout_s:g} is over: the request has {request.num_output_tokens} tokens of output and "
            f"was {state}",
        )

    def check_num_blocks(self, num_blocks: int) -> None:
        """Check that a KV cache of another size has room for what was admitted.

        Raises:
            ValueError: a request may need more blocks, or more are reserved for the running ones with "max_tokens".
        """
        if not self.has_unfinished:
            return
        largest = max(self.in_flight, key=lambda request: max_num_blocks(request, self.kv.block_size))
        if (num_needed := max_num_blocks(largest, self.kv.block_size)) > num_blocks:
            raise ValueError(
                f"num_blocks={num_blocks} is too few for request {largest.request_id}, which may need {num_needed}: at least "
                f"these are needed until it has finished"
            )
        if self.options.reservation != "max_tokens":
            return
        num_missing = sum([self.kv.num_missing_blocks(each, each.num_prompt_tokens + each.max_tokens) for each in self.running])
        num_reserved = self.kv.num_blocks - self.kv.pool.num_free + num_missing
        if num_reserved > num_blocks:
            raise ValueError(
                f"num_blocks={num_blocks} is too few for reservation='max_tokens': at least {num_reserved} are needed until a "
                f"running request has finished"
            )

    def schedule(self, max_draft_tokens: int, lookahead: Lookahead, max_draft_len: int = sys.maxsize) -> StepPlan:
        """Choose the rows of the next step and reserve the slots they write.

        Args:
            max_draft_tokens: maximum draft tokens per request that the current drafter proposes.
            lookahead: of the same drafter; slots beyond the drafts are reserved only if blocks are free, and preempt nobody.
            max_draft_len: longest context that the same drafter takes, a request's tokens with its drafts.
        """
        self.kv.await_copies()
        plan = RowChooser(self.queues, self.options, self._prefill_limit, max_draft_tokens, max_draft_len).choose()
        wanted = lookahead(plan.requests, plan.draft_budgets)
        for request, budget, num_slots in zip(plan.requests, plan.draft_budgets, wanted, strict=True):
            is_more = num_slots > budget and self.kv.reserve(request, request.num_tokens + num_slots)
            plan.num_slots.append(num_slots if is_more else budget)
        return plan

    def update(self, plan: StepPlan, acceptance: Acceptance) -> list[Request]:
        """Advance counters, append tokens, and finish the requests that ended.

        Returns:
            The requests whose output changed.
        """
        changed = list[Request]()
        proposed, accepted = list[int](), list[int]()  # depths of draft tokens
        num_sequences = num_drafted = num_tokens = 0
        self.counters.num_context_tokens += plan.num_context_tokens
        now = self.clock()
        depths, first_nodes = acceptance.trees.nodes.depths.tolist(), acceptance.trees.start_loc.tolist()
        rows = zip(plan.requests, acceptance.token_ids, acceptance.paths, acceptance.errors, strict=True)
        for i, (request, token_ids, path, error) in enumerate(rows):
            if token_ids or error is not None:
                changed.append(request)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs += acceptance.prompt_logprobs.get(i, ())
            if token_ids:
                num_emitted = append_tokens(request, token_ids)
                try:  # in place: by `consult`, each row would take three times as long
                    self.policy.serve(request, 0, num_emitted)
                except Exception as fault:
                    raise self.queues.failed(fault) from fault
                if request.logprobs is not None:
                    request.add_logprobs(acceptance.logprobs[i][:num_emitted])
                if request.metrics.first_token_time is None:
                    request.metrics.first_token_time = now
                own_proposed = depths[first_nodes[i] : first_nodes[i + 1]]
                own_accepted = range(1, min(len(path), num_emitted) + 1)
                _count(request.metrics, 1, num_emitted, own_proposed, own_accepted)
                num_sequences += 1
                num_drafted += bool(own_proposed)
                num_tokens += num_emitted
                proposed += own_proposed
                accepted += own_accepted
            if error is not None:
                request.finish_reason, request.error = FinishReason.ERROR, error
            if request.error is None:
                request.commit(plan.num_tokens[i] + len(path))
                self.kv.roll_back(request)
                self.kv.cache_full_blocks(request)
        finished = [request for request in changed if request.is_finished]
        if finished:
            changed += self._share_prompts([each for each in finished if each.error is None])
            for request in finished:
                self._finish(request)
        self.counters.num_rows += sum(plan.num_tokens) + acceptance.trees.num_nodes
        _count(self.counters, num_sequences, num_tokens, proposed, accepted)
        self.counters.num_drafted_steps += num_drafted
        return changed

    def _share_prompts(self, finished: Sequence[Request]) -> list[Request]:
        """Give siblings without KV the prompts of finished requests before their blocks are released; return those that failed."""
        failed = list[Request]()
        families = {id(request.siblings) for request in finished if request.siblings}
        if not families:
            return failed
        for sibling in [each for each in self.running if not each.block_ids and id(each.siblings) in families]:
            try:
                self.queues.ensure_kv(sibling)
            except Exception as error:  # noqa: BLE001 - whatever ends one request, the others' outputs are returned
                self.fail(sibling, f"{type(error).__name__}: {error}")
                failed.append(sibling)
        return failed

    def _finish(self, request: Request) -> None:
        """Release what a request held, and let it leave; of one that failed, for whatever reason, no prefix stays cached."""
        self._expiries.discard(request)
        self._count_finished(request)
        if request.finish_reason is FinishReason.ERROR:  # by KV that is not finite, maybe
            self.kv.forget_prefix(request)
        self.kv.free(request)
        if request.detokenizer is not None and not isinstance(request.stop_reason, str):
            with fail_if_unreadable(request):
                request.detokenizer.finish()  # text truncated at a stop string is already complete
        self.queues.tell(self.policy.end, request)
        if request in self.waiting:
            del self.waiting[request]
        else:
            self.running.remove(request)

    def _count_finished(self, request: Request) -> None:
        """Note when a request has ended, and count it: once, though its end may be interrupted and `end_all` ends it again."""
        if request.metrics.finished_time is None:
            request.metrics.finished_time = self.clock()
            self.counters.num_finished_requests += 1
            self.service.end(request)


def _count(
    counts: RequestMetrics | EngineCounters, num_sequences: int, num_emitted: int, proposed: Sequence[int], accepted: Sequence[int]
) -> None:
    """Count verifications, and draft tokens by depth; accepted ones only if they were emitted, not after a stop."""
    counts.num_sequence_steps += num_sequences
    counts.num_emitted_tokens += num_emitted
    _count_depths(counts.proposed_per_depth, proposed)
    _count_depths(counts.accepted_per_depth, accepted)


def _count_depths(counts: list[int], depths: Sequence[int]) -> None:
    """Add one to ``counts[d - 1]`` for each depth d."""
    num_depths = len(counts)
    for depth in depths:
        if depth > num_depths:
            counts.extend([0] * (depth - num_depths))
            num_depths = depth
        counts[depth - 1] += 1
