"""The requests that wait and those that run, and the ways between the two: start and preemption, in the policy's order."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from titan.core.checks import shown
from titan.core.metrics import EngineCounters
from titan.core.options import ScheduleOptions
from titan.core.out_of_memory import is_out_of_memory
from titan.core.policy import SchedulingPolicy
from titan.core.request import Request
from titan.memory.kv_cache import KVCache
from titan.schedule.policies.fair import FairPolicy
from titan.schedule.policies.fcfs import FcfsPolicy
from titan.schedule.policies.priority import PriorityPolicy
from titan.schedule.preemption import SwapRule
from titan.schedule.service import ServiceLog

T = TypeVar("T")

_POLICIES: Mapping[str, Callable[[], SchedulingPolicy]] = {"fcfs": FcfsPolicy, "priority": PriorityPolicy, "fair": FairPolicy}


class RequestQueues:
    """Holds the waiting and the running requests.

    A request enters one of the two before it leaves the other, so that an interrupt loses none.

    Args:
        options: the policy, and what becomes of the KV of preempted requests.
        kv: block tables and KV of all requests.
        counters: totals to update.
        clock: returns seconds, on the clock of the requests' times of arrival.
    """

    def __init__(self, options: ScheduleOptions, kv: KVCache, counters: EngineCounters, clock: Callable[[], float]) -> None:
        self.kv = kv
        self.clock = clock
        policy = options.scheduling_policy
        self.policy = _POLICIES[policy]() if isinstance(policy, str) else policy
        self.swap_rule = SwapRule(options.preemption_mode, options.prefill_chunk_size or options.max_num_batched_tokens)
        self.waiting: dict[Request, None] = {}  # in no particular order: the policy has its own
        self.running: list[Request] = []  # in order of their start
        self.service = ServiceLog()
        self._counters = counters

    def consult(self, ask: Callable[..., T], *args: object) -> T:
        """Return what a method of the policy returns.

        Raises:
            RuntimeError: it failed; the message names the policy.
        """
        try:
            return ask(*args)
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> RuntimeError:
        """Return the error that says that the policy failed."""
        return RuntimeError(f"the scheduling policy {self.policy.name!r} failed: {type(error).__name__}: {error}")

    def tell(self, tell: Callable[[Request], None], request: Request) -> None:
        """Tell the policy of a request that has ended, and goes whatever the policy does: if that fails, warn."""
        try:
            self.consult(tell, request)
        except RuntimeError as error:
            warnings.warn(f"{error}, which ends no request", RuntimeWarning, stacklevel=2)

    def queue(self, request: Request) -> None:
        """Let a request wait.

        Raises:
            RuntimeError: the policy failed.
        """
        self.waiting[request] = None
        self.consult(self.policy.add, request)

    def first(self) -> Request:
        """Return the waiting request that starts next."""
        request = self.consult(self.policy.first, self.clock())
        if request not in self.waiting:
            raise RuntimeError(f"the scheduling policy {self.policy.name!r} starts {shown(request)}, which does not wait")
        return request

    def in_prefill_order(self, prefills: Sequence[Request]) -> Sequence[Request]:
        """Return running requests whose prompts are being computed in the policy's order."""
        if len(prefills) < 2:
            return prefills
        ordered = self.consult(self.policy.prefill_order, prefills, self.clock())
        if Counter(ordered) != Counter(prefills):
            raise RuntimeError(
                f"the scheduling policy {self.policy.name!r} orders prompts as {shown(ordered)}: allowed are {shown(prefills)}, "
                f"each once"
            )
        return ordered

    def victim(self) -> Request:
        """Return the running request that the policy preempts first; `preempt` checks that it runs."""
        return self.consult(self.policy.victim, self.running, self.clock())

    def displaceable(self, request: Request) -> Sequence[Request]:
        """Return the running requests that the policy lets a waiting one displace, the first to go first; see `check_runs`."""
        return self.consult(self.policy.displaceable, request, self.running, self.clock())

    def start(self, request: Request) -> None:
        """Start a waiting request with the KV that is already computed, or without KV while a sibling is computing its prompt."""
        if not request.awaits_sibling:
            self._admit(request)
        self.running.append(request)
        self.consult(self.policy.remove, request)
        del self.waiting[request]

    def ensure_kv(self, request: Request) -> bool:
        """Give a running request that awaited a sibling its KV, if that is computed and there is room; return whether it has KV."""
        if request.block_ids:
            return True
        if request not in self.running or request.awaits_sibling:
            return False
        if self.kv.num_missing_blocks(request, request.num_tokens) > self.kv.pool.num_free:
            return False
        self._admit(request)
        return True

    def check_runs(self, request: object) -> None:
        """Raise a `RuntimeError` if what the policy wants to preempt is no request that runs."""
        if request not in self.running:
            raise RuntimeError(f"the scheduling policy {self.policy.name!r} preempts {shown(request)}, which does not run")

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away and queue it again; its KV goes to the swap space, or is computed again."""
        self.check_runs(request)
        if self.swap_rule.prefers_swap(request) and self._swap_out(request):
            self._counters.num_swapped_out += 1
        else:
            self.kv.free(request)
        request.metrics.num_preemptions += 1
        self._counters.num_preemptions += 1
        self.queue(request)
        self.running.remove(request)

    def _swap_out(self, request: Request) -> bool:
        """Move a request's KV to the swap space; return whether there was room, and memory for the copy."""
        try:
            return self.kv.swap_out(request)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False

    def _admit(self, request: Request) -> None:
        """Give a request the KV that is already computed; without memory for copies, it is computed again."""
        is_swapped = request.is_swapped
        try:
            self.kv.admit(request)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            if is_swapped:
                self._counters.num_swapped_in += 1
                return
        metrics = request.metrics
        num_cached_tokens = request.num_cached_blocks * self.kv.block_size
        self._counters.num_cached_tokens += num_cached_tokens
        self._counters.num_admitted_tokens += request.num_tokens
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = self.clock()
            metrics.num_cached_tokens = num_cached_tokens
            num_prompt_tokens = max(0, request.num_prompt_tokens - request.num_computed_tokens)
            self.consult(self.policy.serve, request, num_prompt_tokens, 0)
            self.service.start(request, num_prompt_tokens, metrics.first_scheduled_time)
