"""The metrics of an engine, read from its parts."""

from __future__ import annotations

from dataclasses import dataclass

from titan.adaptive.policy import BudgetPolicy
from titan.adaptive.profiler import Profiler
from titan.core.metrics import EngineMetrics, Percentiles, TierMetrics, ratio
from titan.core.step_log import StepLog
from titan.draft.drafting import Drafting
from titan.kernels.interfaces import Backend, PassCounts
from titan.memory.block_pool import BlockPool
from titan.memory.kv_cache import KVCache
from titan.models.config import ModelConfig
from titan.models.loader import how_it_runs
from titan.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineMeter:
    """Reads the parts of an engine that stay the same for as long as it lives."""

    model_config: ModelConfig  # the target's
    backend: Backend
    passes: PassCounts
    kv: KVCache
    scheduler: Scheduler
    profiler: Profiler
    log: StepLog

    def read(self, now: float, drafting: Drafting, adaptive: BudgetPolicy | None) -> EngineMetrics:
        """Return a snapshot.

        Args:
            now: seconds, on the engine's clock.
            drafting: the current one.
            adaptive: the current one.
        """
        counters, scheduler, pool, swap_space = self.log.counters, self.scheduler, self.kv.pool, self.kv.swap_space
        target_cost, num_proposed = self.profiler.target, sum(counters.proposed_per_depth)
        return EngineMetrics(
            model_impl=how_it_runs(self.model_config),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_finished_requests=counters.num_finished_requests,
            num_steps=counters.num_steps,
            num_emitted_tokens=counters.num_emitted_tokens,
            mean_batch_size=ratio(counters.num_sequence_steps, counters.num_steps),
            mean_acceptance_length=ratio(counters.num_emitted_tokens, counters.num_sequence_steps),
            proposed_per_depth=list(counters.proposed_per_depth),
            accepted_per_depth=list(counters.accepted_per_depth),
            acceptance_rate=ratio(sum(counters.accepted_per_depth), num_proposed),
            num_preemptions=counters.num_preemptions,
            num_swapped=sum(request.is_swapped for request in scheduler.waiting),
            num_swapped_out=counters.num_swapped_out,
            num_swapped_in=counters.num_swapped_in,
            prefix_cache_hit_rate=ratio(counters.num_cached_tokens, counters.num_admitted_tokens),
            num_admitted_tokens=counters.num_admitted_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_swap_cached_tokens=swap_space.num_hits * self.kv.block_size,
            num_evicted_blocks=pool.num_evicted,
            kv_usage=1 - pool.num_free / pool.num_blocks,
            num_kv_blocks=pool.num_blocks,
            kv_cache=self._tier(pool),
            swap_space=self._tier(swap_space.pool),
            users=scheduler.service.users(scheduler.in_flight),
            queue_s=Percentiles.of(scheduler.service.queue_s),
            utilization=self.backend.utilization(),
            recent=self.log.recent_metrics(now, None if target_cost is None else target_cost.predict),
            draft_coverage=self._draft_coverage(),
            draft=drafting.drafter.name,
            current_draft=self.log.draft_metrics(),
            num_draft_failures=drafting.num_failures,
            draft_vocabulary=drafting.shared_vocabulary,
            draft_weight_bits=drafting.weight_bits,
            graph_hit_rate=self.passes.hit_rate,
            profile_s=self.profiler.seconds,
            speculation=None if adaptive is None else adaptive.metrics(ratio(num_proposed, counters.num_sequence_steps)),
        )

    def _tier(self, pool: BlockPool) -> TierMetrics:
        num_used, num_bytes = pool.num_blocks - pool.num_free, self.kv.bytes_per_block
        return TierMetrics(pool.num_blocks, num_used, pool.num_blocks * num_bytes, num_used * num_bytes)

    def _draft_coverage(self) -> float | None:
        if "draft" not in self.kv.tensors:
            return None
        covered = [request for request in self.scheduler.running if request.params.may_draft]
        num_committed = sum(request.num_computed_tokens for request in covered)
        num_drafted = sum(min(request.num_drafted_context, request.num_computed_tokens) for request in covered)
        return ratio(num_drafted, num_committed) if covered else None
