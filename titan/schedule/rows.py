"""The rows of a step: which requests run in it, with how many tokens and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan.core.request import Request
from titan.core.step import Shortage, StepPlan
from titan.schedule.admission import max_num_blocks

if TYPE_CHECKING:
    from titan.schedule.scheduler import Scheduler


class RowChooser:
    """Chooses the rows of one step, and reserves blocks for their tokens and drafts.

    The tokens of a row that is taken back, because its request is preempted, are not given to others in this step.

    Args:
        scheduler: whose requests they are of.
        max_draft_tokens: maximum draft tokens per request.
    """

    def __init__(self, scheduler: Scheduler, max_draft_tokens: int) -> None:
        self._scheduler, self._options, self._kv = scheduler, scheduler.options, scheduler.kv
        self._max_draft_tokens = max_draft_tokens
        self._plan = StepPlan([], [], [], [])
        self._budget = scheduler.options.max_num_batched_tokens  # tokens that are left
        self._prompt_budget = 0  # those that requests that do not decode may have, once decodes have theirs

    def choose(self) -> StepPlan:
        """Return a plan with the rows; their slots are yet to be set."""
        scheduler, plan = self._scheduler, self._plan
        if scheduler.waiting:
            self._displace()
        num_preemptions = scheduler.counters.num_preemptions
        decodes, prefills = list[Request](), list[Request]()
        for request in scheduler.running:
            (decodes if request.num_uncomputed_tokens == 1 else prefills).append(request)
        most_prompt_tokens = self._most_prompt_tokens(decodes)
        num_left = len(decodes) + self._prompt_share(prefills, most_prompt_tokens)
        for request in decodes:
            num_left -= 1  # tokens that the drafts leave to the decodes behind, and to prompts
            self._add_running(request, 1, num_left)
        self._prompt_budget = min(most_prompt_tokens, self._budget)
        num_behind = sum([bool(request.block_ids) for request in prefills])  # those without blocks await a sibling
        for request in prefills:
            num_behind -= bool(request.block_ids)
            if self._prompt_budget and scheduler.ensure_kv(request):
                self._add_running(request, self._chunk(request, is_shared=num_behind > 0 or self._may_join()))
        if scheduler.counters.num_preemptions == num_preemptions:
            plan.shortage = self._join()
        else:  # there is no room for the running requests: none joins
            plan.shortage = "blocks"
        return plan

    def num_missing_blocks(self, requests: Sequence[Request]) -> int:
        """Return how many free blocks it takes to run these requests: to their next step's end, or with "max_tokens" to theirs."""
        if self._options.reservation == "max_tokens":
            return sum([self._kv.num_missing_blocks(each, each.num_prompt_tokens + each.max_tokens) for each in requests])
        return sum([self._kv.num_missing_blocks(each, each.num_tokens + self._max_draft_tokens) for each in requests])

    def _most_prompt_tokens(self, decodes: Sequence[Request]) -> int:
        """Return how many tokens the requests that do not decode may have together, if nothing is drafted."""
        num_left = self._budget - len(decodes)
        most, limit = min(num_left, self._options.max_prefill_tokens or num_left), self._scheduler.prefill_limit
        if limit is None or not decodes or most <= 1:
            return most
        return limit(len(decodes), sum([request.num_computed_tokens for request in self._scheduler.running]), most)

    def _prompt_share(self, prefills: Sequence[Request], most: int) -> int:
        """Return how many of the ``most`` tokens for requests that do not decode drafts leave to them.

        It is half of these, or what they want, if that is less; of those that wait only the next one is asked.
        """
        num_wanted = sum([self._first_chunk(request, most) if request.block_ids else 1 for request in prefills])
        if self._may_join():
            num_wanted += self._first_chunk(self._scheduler.first(), most)
        return min(num_wanted, -(-most // 2))

    def _chunk(self, request: Request, *, is_shared: bool) -> int:
        """Return how many tokens a running request that does not decode may have.

        If the budget is shared, a chunk that is not the last leaves half of it: a long prompt must not stall short ones.
        """
        num_tokens = self._first_chunk(request, self._prompt_budget)
        is_long = num_tokens < request.num_uncomputed_tokens
        return min(num_tokens, -(-self._prompt_budget // 2)) if is_shared and is_long else num_tokens

    def _first_chunk(self, request: Request, budget: int) -> int:
        """Return how many tokens of a budget a request that has just started may have."""
        return min(request.num_uncomputed_tokens, self._options.prefill_chunk_size or budget, budget)

    def _may_join(self) -> bool:
        return bool(self._scheduler.waiting) and len(self._scheduler.running) < self._options.max_batch_size

    def _add_running(self, request: Request, num_tokens: int, num_left: int = 0) -> None:
        """Add the row of a running request, preempting others as needed; its drafts leave ``num_left`` tokens."""
        scheduler = self._scheduler
        if request in scheduler.waiting:  # it was preempted in this step
            return
        num_drafts = self._num_drafts(request, num_tokens, num_left)
        while not self._kv.reserve(request, request.num_computed_tokens + num_tokens + num_drafts):
            victim = scheduler.policy.victim(scheduler.running, scheduler.clock())
            scheduler.preempt(victim)
            self._plan.remove(victim)
            if victim is request:
                return
        self._add(request, num_tokens, num_drafts)

    def _add(self, request: Request, num_tokens: int, num_drafts: int) -> None:
        self._budget -= self._plan.add(request, num_tokens, num_drafts)
        self._prompt_budget = min(self._prompt_budget - num_tokens, self._budget)

    def _num_drafts(self, request: Request, num_tokens: int, num_left: int = 0) -> int:
        """Return the number of draft tokens of a request's row; there are drafts only after the root."""
        if num_tokens < request.num_uncomputed_tokens:
            return 0
        num_drafts = min(self._budget - num_left - num_tokens, request.most_drafts(self._max_draft_tokens))
        return num_drafts if num_drafts > 0 else 0

    def _join(self) -> Shortage | None:
        """Start waiting requests as long as there is room for them; return what the next one lacks."""
        scheduler = self._scheduler
        num_missing = self.num_missing_blocks(scheduler.running) if self._may_join() else 0
        while scheduler.waiting:
            if len(scheduler.running) >= self._options.max_batch_size:
                return "requests"
            if self._prompt_budget <= 0:
                return "tokens"
            request = scheduler.first()
            num_lacking = num_missing + self.num_missing_blocks([request]) - self._kv.pool.num_free
            if scheduler.running and num_lacking + self._num_spare_blocks(request) > 0:
                return "blocks"
            is_delayed = self._kv.awaits_sibling(request) or (request.is_swapped and bool(self._plan.requests))
            has_memory = scheduler.start(request)
            if not is_delayed:  # else its KV arrives beside this step's passes, or with later ones
                self._kv.await_copies()
                num_tokens = self._first_chunk(request, self._prompt_budget)
                num_drafts = self._num_drafts(request, num_tokens)
                is_reserved = self._kv.reserve(request, request.num_computed_tokens + num_tokens + num_drafts)
                is_alone = len(scheduler.running) == 1
                assert is_reserved or not (has_memory or is_alone), "a request that runs alone fits: larger ones are refused"
                if is_reserved:
                    self._add(request, num_tokens, num_drafts)
            num_missing += self.num_missing_blocks([request])
        return None

    def _displace(self) -> None:
        """Preempt running requests for the first waiting one, if the policy lets it take their place and it then joins."""
        scheduler, kv = self._scheduler, self._kv
        request = scheduler.first()
        candidates = scheduler.policy.displaceable(request, scheduler.running, scheduler.clock())
        if not candidates or self._options.reservation == "max_tokens" or kv.awaits_sibling(request):
            return
        num_lacking = self.num_missing_blocks([*scheduler.running, request]) - kv.pool.num_free
        num_lacking += self._num_spare_blocks(request)
        is_full, victims = len(scheduler.running) >= self._options.max_batch_size, list[Request]()
        for candidate in candidates:
            if num_lacking <= kv.num_freed_blocks(victims, request) and (victims or not is_full):
                break
            victims.append(candidate)
            num_lacking -= self.num_missing_blocks([candidate])
        if num_lacking <= kv.num_freed_blocks(victims, request):
            for victim in victims:
                scheduler.preempt(victim)

    def _num_spare_blocks(self, request: Request) -> int:
        """Return how many blocks must stay free after the next step when a waiting request starts.

        Where it starts again, it is one for each that then runs and may still need it. Otherwise somebody would give way at once,
        as soon as the others have grown or draft more, and requests would go out and in without getting on.
        """
        if not request.metrics.num_preemptions:
            return 0
        size, most = self._kv.block_size, self._max_draft_tokens
        requests = (*self._scheduler.running, request)
        return sum([max_num_blocks(each, size) * size >= each.num_tokens + most + size for each in requests])
