"""The rows of a step: which requests run in it, with how many tokens and drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from titan.core.options import ScheduleOptions
from titan.core.request import Request
from titan.core.step import Shortage, StepPlan
from titan.schedule.admission import max_num_blocks
from titan.schedule.queues import RequestQueues

PrefillLimit = Callable[[int, int, int], int]
"""Returns how many prompt tokens a step may take, at least 1, given the number of requests that decode, the computed tokens of all
running requests, and the maximum."""


class RowChooser:
    """Chooses the rows of one step, and reserves blocks for their tokens and drafts.

    Drafts come last: they take blocks that are still free then, and preempt nobody. If a request is preempted that has a row
    already, the tokens of that row are not given to others in this step.

    Args:
        queues: hold the requests.
        options: how many requests and tokens may run.
        prefill_limit: bounds the prompt tokens of steps in which requests decode; ``None`` = by the options alone.
        max_draft_tokens: maximum draft tokens per request.
        max_draft_len: maximum tokens of a request with its drafts.
    """

    def __init__(
        self,
        queues: RequestQueues,
        options: ScheduleOptions,
        prefill_limit: PrefillLimit | None,
        max_draft_tokens: int,
        max_draft_len: int,
    ) -> None:
        self._queues, self._kv, self._options, self._prefill_limit = queues, queues.kv, options, prefill_limit
        self._max_draft_tokens, self._max_draft_len = max_draft_tokens, max_draft_len
        self._plan = StepPlan(requests=[], num_tokens=[], draft_budgets=[], num_slots=[])
        self._budget = options.max_num_batched_tokens  # tokens left
        self._prompt_budget = 0  # tokens left, of these, for requests that do not decode
        self._has_preempted = False  # since running requests lacked room
        self._num_spare_blocks = 0  # free blocks that running requests do not need, so that others may join
        self._num_needed: dict[Request, int] = {}  # blocks that a waiting request needs to start, cached: slow for long prompts

    def choose(self) -> StepPlan:
        """Return a plan with the rows, whose ``num_slots`` are yet to be set."""
        queues, plan = self._queues, self._plan
        if queues.waiting:
            self._displace()
        for request in [each for each in queues.running if each.num_uncomputed_tokens == 1]:
            self._add_running(request, 1)
        may_join = queues.waiting and len(queues.running) < self._options.max_batch_size
        if may_join:
            self._num_spare_blocks = self._kv.pool.num_free - self._num_missing_blocks(queues.running)
        prefills = queues.in_prefill_order([each for each in queues.running if each.num_uncomputed_tokens > 1])
        wanted = [self._num_wanted(each) for each in prefills]
        num_wanted_after = sum(wanted) + (self._num_wanted_by_waiting() if prefills else 0)
        self._prompt_budget = self._most_prompt_tokens() if prefills or may_join else 0
        for request, num_wanted in zip(prefills, wanted, strict=True):
            num_wanted_after -= num_wanted
            if num_wanted and self._prompt_budget and queues.ensure_kv(request):
                self._add_running(request, self._chunk(request, num_wanted_after))
        plan.shortage = self._join()
        self._add_drafts()
        return plan

    def _num_missing_blocks(self, requests: Sequence[Request]) -> int:
        """Return how many free blocks requests need to the end of their next step, or with "max_tokens" to their own end."""
        if self._options.reservation == "max_tokens":
            return sum([self._kv.num_missing_blocks(each, each.num_prompt_tokens + each.max_tokens) for each in requests])
        return sum([self._kv.num_missing_blocks(each, self._num_slots(each)) for each in requests])

    def _num_slots(self, request: Request) -> int:
        """Return how many slots a request may fill by the end of its next step."""
        return request.num_tokens + self._most_drafts(request)

    def _most_drafts(self, request: Request) -> int:
        return request.most_drafts(self._max_draft_tokens, self._max_draft_len)

    def _num_wanted(self, request: Request) -> int:
        """Return how many tokens a request that does not decode would take if all were for it; 0 while it awaits a sibling."""
        if request.awaits_sibling:
            return 0
        num_tokens = request.num_uncomputed_tokens
        return min(num_tokens, self._options.prefill_chunk_size or num_tokens)

    def _num_wanted_by_waiting(self) -> int:
        """Estimate the tokens for waiting requests that may join: for each as many as for the first; 0 if that lacks blocks."""
        queues = self._queues
        if not queues.waiting or self._shortage(request := queues.first()):
            return 0
        num_places = min(len(queues.waiting), self._options.max_batch_size - len(queues.running))
        return self._num_wanted(request) * (1 if request.siblings else num_places)  # siblings would await it

    def _most_prompt_tokens(self) -> int:
        """Return how many tokens the requests that do not decode may have together.

        It is what the drafts of decoding requests leave, but at least half of what there would be without drafts.
        """
        num_decodes = len(self._plan.requests)
        most, limit = min(self._budget, self._options.max_prefill_tokens or self._budget), self._prefill_limit
        num_drafts = sum([*map(self._most_drafts, self._plan.requests)])
        left = max(self._budget - num_drafts, -(-most // 2))
        if limit is not None and num_decodes and most > 1:
            most = limit(num_decodes, sum([request.num_computed_tokens for request in self._queues.running]), most)
        return min(most, left)

    def _chunk(self, request: Request, num_wanted_after: int) -> int:
        """Return how many tokens a running request that does not decode gets, if the requests after it want ``num_wanted_after``.

        Unless it completes the prompt, they are left up to half of the budget: a long prompt must not stall short ones.
        """
        num_tokens = min(self._num_wanted(request), self._prompt_budget)
        if num_tokens < request.num_uncomputed_tokens:
            num_tokens = min(num_tokens, self._prompt_budget - min(num_wanted_after, self._prompt_budget // 2))
        return num_tokens

    def _add_running(self, request: Request, num_tokens: int) -> None:
        """Add the row of a running request, preempting others as needed, unless it is preempted itself."""
        queues = self._queues
        while request not in queues.waiting:
            if self._kv.reserve(request, request.num_computed_tokens + num_tokens):
                self._add(request, num_tokens)
                return
            victim = queues.victim()
            queues.preempt(victim)
            self._has_preempted = True
            self._plan.remove(victim)

    def _add(self, request: Request, num_tokens: int) -> None:
        self._plan.add(request, num_tokens)
        self._budget -= num_tokens
        self._prompt_budget -= num_tokens

    def _add_drafts(self) -> None:
        """Set the draft budgets of the rows that reach their roots, in order, as far as tokens and free blocks allow."""
        plan = self._plan
        for i in plan.emitting_rows() if self._max_draft_tokens else ():
            request = plan.requests[i]
            if num_drafts := min(self._most_drafts(request), self._budget):
                num_tokens = request.num_tokens
                num_drafts = self._kv.reserve_most(request, num_tokens + num_drafts) - num_tokens
                plan.draft_budgets[i] = num_drafts
                self._budget -= num_drafts

    def _join(self) -> Shortage | None:
        """Start waiting requests as long as there is room for them; return what the next one lacks."""
        queues, pool = self._queues, self._kv.pool
        while queues.waiting:
            request = queues.first()
            if (shortage := self._shortage(request)) is not None:
                return shortage
            is_delayed = request.awaits_sibling or (request.is_swapped and bool(self._plan.requests))
            if self._prompt_budget <= 0 and not is_delayed:
                return "tokens"
            num_free, num_kept = pool.num_free, self._num_blocks_kept_free(request)
            queues.start(request)
            self._num_spare_blocks -= num_free - pool.num_free + self._num_missing_blocks([request]) + num_kept
            if not is_delayed:  # else its KV is copied in during this step's passes, or computed by a sibling
                self._kv.await_copies()
                num_tokens = min(self._num_wanted(request), self._prompt_budget)
                is_reserved = self._kv.reserve(request, request.num_computed_tokens + num_tokens)
                assert is_reserved or len(queues.running) > 1, "a request that runs alone fits: larger ones are refused"
                if is_reserved:  # else memory for copies of its KV was lacking, so that it needs more blocks than were counted
                    self._add(request, num_tokens)
        return None

    def _shortage(self, request: Request) -> Shortage | None:
        """Return what a waiting request lacks to start, tokens aside."""
        queues = self._queues
        if len(queues.running) >= self._options.max_batch_size:
            return "requests"
        if self._has_preempted:
            return "blocks"
        if request not in self._num_needed:
            self._num_needed[request] = self._num_missing_blocks([request]) + self._num_blocks_kept_free(request)
        return "blocks" if queues.running and self._num_needed[request] > self._num_spare_blocks else None

    def _displace(self) -> None:
        """Preempt running requests for the first waiting one, if the policy allows it and the request can then join."""
        queues, kv = self._queues, self._kv
        request = queues.first()
        candidates = queues.displaceable(request)
        if not candidates or self._options.reservation == "max_tokens" or request.awaits_sibling:
            return
        num_lacking = self._num_missing_blocks([*queues.running, request]) - kv.pool.num_free
        num_lacking += self._num_blocks_kept_free(request)
        is_full, victims = len(queues.running) >= self._options.max_batch_size, list[Request]()
        wanted = {*kv.prefixes.found_blocks(request)}
        num_holders = Counter[int]()  # by block: how many victims hold it
        for candidate in candidates:
            if num_lacking <= 0 and (victims or not is_full):
                break
            queues.check_runs(candidate)
            victims.append(candidate)
            num_holders.update(candidate.block_ids)
            own = [each for each in candidate.block_ids if each not in wanted]
            num_lacking -= sum([kv.pool.num_references(each) == num_holders[each] for each in own])
            num_lacking -= self._num_missing_blocks([candidate])
        if num_lacking <= 0:
            for victim in victims:
                queues.preempt(victim)

    def _num_blocks_kept_free(self, request: Request) -> int:
        """Return how many blocks must be free after the next step if a waiting request starts.

        For a request that was preempted, it is one for each request that would run and may need one more block. Otherwise
        requests that grow or draft more would soon preempt another one, and requests would leave and return without progress.
        """
        if not request.metrics.num_preemptions:
            return 0
        size, requests = self._kv.block_size, (*self._queues.running, request)
        return sum([max_num_blocks(each, size) * size >= self._num_slots(each) + size for each in requests])
