"""The engine: one step schedules, proposes, verifies and commits for all requests."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from titan.adaptive.controller import Controller
from titan.adaptive.costs import Costs
from titan.adaptive.pace import Pace
from titan.adaptive.policy import BudgetPolicy, lower_budgets
from titan.adaptive.profiler import Profiler
from titan.adaptive.speculation import AdaptiveSpeculation
from titan.claims import check_claim, claim, keep_claims
from titan.core.checks import check_integer
from titan.core.dtypes import dtype_name
from titan.core.growth import GrowthSpec
from titan.core.host_memory import host_memory
from titan.core.kv_tensor import KVLayout, KVTensor, Role
from titan.core.metrics import EngineCounters, EngineMetrics
from titan.core.options import EngineConfig, ModelOptions
from titan.core.out_of_memory import is_out_of_memory
from titan.core.process import check_process
from titan.core.request import Request
from titan.core.step import Acceptance, StepPlan
from titan.core.step_log import StepLog
from titan.core.step_times import Stopwatch
from titan.draft.base import DraftContext, Drafter, NoDrafter, ReviewReport, has_cache
from titan.draft.drafting import Drafting
from titan.draft.feedback import note_review, note_verification
from titan.draft.registry import DraftSpec, is_made_when_opened, open_drafter
from titan.engine_metrics import EngineMeter
from titan.execute.batch import target_batch
from titan.execute.memory_profile import run_largest_pass
from titan.execute.pass_timer import PassTimer
from titan.kernels.backend import choose_backend, choose_device
from titan.kernels.interfaces import Backend, Model, PassCounts, PassLimits, Runner, WarmUp
from titan.memory.kv_cache import KVCache
from titan.memory.sizing import block_bytes, check_swap_space, num_kv_blocks
from titan.models.config import ModelConfig
from titan.models.loader import Checkpoint, load_model, run_dtype
from titan.schedule.admission import RequestLimits
from titan.schedule.scheduler import Scheduler
from titan.verify.accept import accept


class _Passed(NamedTuple):
    """The result of a step's passes."""

    acceptance: Acceptance
    report: ReviewReport  # reviews of `plan.reviews`; empty if reviewing failed


StepObserver = Callable[[StepPlan, Acceptance], None]
"""Called with each verified plan before it is committed; must not change anything."""


class Engine:
    """Owns the target, the drafter, the KV and the scheduler; ``observers`` are called in every step.

    Args:
        config: the options.
        model: from `open_model`, or a decoder that is ready to run on the back end, whose own dtype then applies.
        draft: the drafter; see `titan.draft.registry`.
        tokenizer: the target's transformers tokenizer, which a draft's is compared with; ``None`` = not known.
        backend: the back end to run on; ``None`` = the one for the device in the options.

    Raises:
        ValueError: a model cannot be loaded, the draft shares too few of its tokens, the KV cache has no room, or it
            leaves too little for passes; or another engine uses the policy, or the drafter and its KV.
        RuntimeError: as `check_process`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Checkpoint | Model,
        draft: DraftSpec = None,
        tokenizer: Any | None = None,
        backend: Backend | None = None,
    ) -> None:
        check_process()
        self.config = config
        self.backend = backend or choose_backend(choose_device(config.model.device), config.model.num_threads)
        try:
            with self.backend.active():
                self._assemble(model, draft, tokenizer)
        except BaseException:
            keep_claims(self, ())
            raise

    def _assemble(self, model: Checkpoint | Model, draft: DraftSpec, tokenizer: Any | None) -> None:
        """Load the models, allocate the caches and connect the parts."""
        config, backend, block_size = self.config, self.backend, self.config.memory.block_size
        backend.check_limits(block_size=block_size, max_batch_size=config.schedule.max_batch_size)
        if not isinstance(policy := config.schedule.scheduling_policy, str):
            claim(self, "scheduling_policy", policy)
        self.passes = PassCounts()
        self._tokenizer = tokenizer
        drafter = self._load(model, draft)
        layouts = [self._target.kv_layout.stored_as(config.memory.kv_cache_dtype), *([] if drafter.kv is None else [drafter.kv])]
        num_blocks = self._num_kv_blocks(layouts)
        bytes_per_block = block_bytes(block_size, layouts)
        free_memory = host_memory().available - (num_blocks * bytes_per_block if backend.is_host else 0)
        check_swap_space(config.schedule.swap_space, bytes_per_block, free_memory)
        self.kv = KVCache(num_blocks, block_size, config.memory.enable_prefix_caching, backend.cache)
        self.kv.tensors = {"target": KVTensor(layouts[0], num_blocks, block_size, backend.device, backend.cache.zeros)}
        self.runner = self._prepare_target(self.kv.tensors["target"])
        vocab_size = self.model_config.vocab_size
        _warm_up(config, [*self.runner.warm_up((), vocab_size), *backend.warm_up(vocab_size, self.dtype)])
        self.counters = EngineCounters()
        self.observers: list[StepObserver] = []
        self._log = StepLog(self.counters)
        self._profiler = Profiler(backend, self.kv, config.schedule, self.max_model_len)
        self._use_drafter(drafter, ())
        self._pace = self._make_pace()
        self._timer = PassTimer(backend, runs_ahead=self._pace is None and not backend.is_host)
        prefill_limit = None if self._pace is None else self._pace.prefill_limit
        self.scheduler = Scheduler(config.schedule, self.kv, self.counters, prefill_limit=prefill_limit)
        self._byte_s = 0.0  # of copying a byte of KV out and in again
        if num_host_blocks := config.schedule.swap_space // bytes_per_block:
            self.kv.resize_swap_space(num_host_blocks, ())
            copy_s = self.kv.swap_space.measure_copies(self.kv.tensors, self.kv.pool, backend.download)
            self._byte_s = copy_s / self.kv.bytes_per_block
        self._inform_swap_rule()
        self._meter = EngineMeter(self.model_config, backend, self.passes, self.kv, self.scheduler, self._profiler, self._log)

    def _load(self, model: Checkpoint | Model, draft: DraftSpec) -> Drafter:
        """Check the drafter's options, load the target and return the drafter."""
        config = self.config
        is_drafting = config.speculation.speculation != "off"
        self.model_config = model.config
        self.dtype = run_dtype(config.model.dtype, model, self.backend) if isinstance(model, Checkpoint) else model.dtype
        self.max_model_len = _max_model_len(config.model, self.model_config)
        self._pass_limits = PassLimits(
            num_requests=config.schedule.max_batch_size,
            query_len=1 + (config.speculation.max_draft_tokens if is_drafting else 0),
            num_blocks=-(-self.max_model_len // config.memory.block_size),
            num_tokens=config.schedule.max_num_batched_tokens,
        )
        make_drafter: Callable[[], Drafter] = NoDrafter
        if is_drafting or not is_made_when_opened(draft):
            make_drafter = self._open_drafter(draft)  # may refuse the draft, although nothing is drafted
        if isinstance(model, Checkpoint):
            model = load_model(model, dtype=self.dtype, backend=self.backend, max_positions=self.max_model_len)
        self._target = model
        return make_drafter() if is_drafting else NoDrafter()

    def _num_kv_blocks(self, layouts: Sequence[KVLayout]) -> int:
        """Return the number of KV blocks: as given in the options, or what fits beside the largest pass."""
        limits = self._pass_limits
        num_useful = limits.num_requests * limits.num_blocks
        run = partial(run_largest_pass, self.backend, self._target, self.config, limits, self.max_model_len)
        return num_kv_blocks(self.config.memory, layouts, num_useful, self.backend, run)

    @property
    def limits(self) -> RequestLimits:
        return RequestLimits(self.model_config.vocab_size, self.max_model_len, self.kv.num_blocks, self.kv.block_size)

    @property
    def drafter(self) -> Drafter:
        return self.drafting.drafter

    def step(self) -> list[Request]:
        """Run one step and return the requests whose output changed."""
        watch = Stopwatch(time.perf_counter)
        adaptive, expired = self.adaptive, self.scheduler.expire()
        with self.backend.active(), torch.inference_mode():
            num_drafts = self._max_draft_tokens if adaptive is None else min(adaptive.num_reserved, self._max_draft_tokens)
            plan = self.scheduler.schedule(num_drafts, self.drafting.lookahead, self.drafting.max_len)
            if not plan.requests:
                return expired
            watch.times.schedule += watch.lap()
            if adaptive is not None:
                lower_budgets(adaptive, plan)
            watch.times.adapt += watch.lap()
            changed = self._run(plan, watch)
        self.counters.num_steps += 1
        watch.times.commit += watch.lap()
        self._log.note(watch.last, watch.times, plan.shortage)
        return [*expired, *changed]

    def _run(self, plan: StepPlan, watch: Stopwatch, *, is_repeated: bool = False) -> list[Request]:
        """Run a plan, or smaller parts of it if memory runs out; a request fails only if not even one of its tokens fits.

        Args:
            plan: of the step, with all decisions on drafts.
            watch: of the step.
            is_repeated: whether this repeats passes of the step; estimates do not learn from that.
        """
        try:
            passed = self._pass(plan, watch)
            if any(passed.acceptance.errors):
                is_repeated |= self._repeat_without_drafts(plan, passed.acceptance, watch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        else:
            return self._commit(plan, passed, watch, is_repeated)
        if parts := plan.split():  # outside the except block, which keeps the tensors of the failed pass alive
            return [request for part in parts for request in self._run(part, watch, is_repeated=True)]
        self.scheduler.fail(plan.requests[0], f"out of memory in a pass of one token: {reason}")
        return plan.requests

    def _repeat_without_drafts(self, plan: StepPlan, acceptance: Acceptance, watch: Stopwatch) -> bool:
        """Run the rows with drafts that failed again without these; return whether there were some.

        The KV of a draft that overflows makes the logits of its root NaN as well: attention multiplies what it hides by 0.
        """
        rows = [i for i, error in enumerate(acceptance.errors) if error is not None and plan.draft_budgets[i]]
        if rows:
            again = replace(plan.without_drafts(rows), drafts_prompts=False)  # no drafter is asked twice before a commit
            acceptance.replace_failed(rows, self._pass(again, watch).acceptance)
        return bool(rows)

    def _pass(self, plan: StepPlan, watch: Stopwatch) -> _Passed:
        """Draft, run the target and verify; before the commit, this can be repeated with fewer rows."""
        timer = self._timer
        self.kv.clear_new_blocks()
        watch.times.clear += watch.lap()
        timer.start(plan, watch)
        trees, report = self.drafting.propose(plan), self.drafting.review(plan)
        timer.mark()
        batch = target_batch(plan, trees, block_size=self.kv.block_size)
        timer.mark()
        logits = self.runner.forward(batch)
        timer.mark()
        acceptance = accept(self.backend, plan, trees, batch, logits)
        timer.finish(watch, has_results=len(batch.logits_rows) > 0)
        return _Passed(acceptance, report)

    def _commit(self, plan: StepPlan, passed: _Passed, watch: Stopwatch, is_repeated: bool) -> list[Request]:
        acceptance, report = passed
        adaptive, times = self.adaptive, watch.times
        for observe in self.observers:
            observe(plan, acceptance)
        self.drafting.commit(plan, acceptance)
        fleet = None if adaptive is None else adaptive.fleet
        note_verification(plan, acceptance, fleet)
        for i, review in zip(plan.reviews, report.reviews, strict=False):
            note_review(plan.requests[i], review, fleet)
        self.kv.commit(plan, acceptance)
        changed = self.scheduler.update(plan, acceptance)
        times.commit += watch.lap()
        if is_repeated:
            return changed
        if adaptive is not None:
            adaptive.observe(plan, acceptance, report, times)
            times.adapt += watch.lap()
        if self._pace is not None and not plan.reviews:  # steps that review are not typical
            num_emitting = sum(map(bool, acceptance.token_ids))
            self._pace.note(plan, num_emitting, acceptance.trees.num_nodes, times.recurring, times.target)
        return changed

    def swap_draft(self, draft: DraftSpec) -> None:
        """Replace the drafter between steps, as `titan.LLM.swap_draft` says; the new draft catches up with requests in flight."""
        self.replace_drafter(self.open_draft(draft))

    def open_draft(self, draft: DraftSpec) -> Callable[[], Drafter]:
        """Return what loads a draft, after a look at it, and after a download, if there is one; steps may run meanwhile.

        Raises:
            ValueError: the draft cannot be used.
        """
        if self.config.speculation.speculation == "off":
            raise ValueError("swap_draft() contradicts speculation='off': allowed with 'adaptive' and 'fixed'")
        with self.backend.active():
            return self._open_drafter(draft)

    def replace_drafter(self, load: Callable[[], Drafter]) -> None:
        """Replace the drafter between steps by what `open_draft` has returned."""
        with self.backend.active():
            drafter = load()
            self._check_room(drafter)
            try:
                self._use_drafter(drafter, self.scheduler.in_flight)
            except BaseException:
                if drafter is self.drafter:  # given again, and attached to another cache by now
                    self._return_cache()
                raise
            finally:
                self._inform_swap_rule()
                keep_claims(self, (self.drafter, self.config.schedule.scheduling_policy))
                self._refit_swap_space()

    def _refit_swap_space(self) -> None:
        """Resize the swap space to as many blocks as its bytes hold; without memory for them, warn and do without."""
        num_blocks = self.config.schedule.swap_space // self.kv.bytes_per_block
        try:
            self.kv.resize_swap_space(num_blocks, self.scheduler.in_flight)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = f"the host has no memory for {num_blocks} blocks of swap space any more, so that there is none: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _check_room(self, drafter: Drafter) -> None:
        """Check that the free memory holds a drafter's KV, and the swap space at least one block with it."""
        block_size, swap_space = self.kv.block_size, self.config.schedule.swap_space
        own = [] if drafter.kv is None else [drafter.kv]
        needed, free_memory = self.kv.num_blocks * block_bytes(block_size, own), self._free_memory()
        if needed > free_memory:
            raise ValueError(
                f"the draft {drafter.name!r} takes {needed} bytes for the KV of {self.kv.num_blocks} blocks, and {free_memory} are "
                f"free: allowed are at most these"
            )
        check_swap_space(swap_space, block_bytes(block_size, [self.kv.tensors["target"].layout, *own]))

    def compact_kv_cache(self) -> int:
        """Move all KV blocks with content to the front, each request's in a row; return how many moved. See `KVCache.compact`."""
        with self.backend.active():
            return self.kv.compact(self.scheduler.in_flight)

    def resize_kv_cache(self, num_blocks: int) -> None:
        """Give the KV cache this many blocks between steps, see `titan.LLM.resize_kv_cache`; requests in flight continue.

        Raises:
            Exception: as `KVCache.compact`, or from a drafter that refuses its new cache; the size stays.
        """
        requests, num_blocks = self.scheduler.in_flight, check_integer("num_blocks", num_blocks, 1)
        self._check_resize(num_blocks, requests)
        if num_blocks == self.kv.num_blocks:
            return
        with self.backend.active():
            tensors = {
                role: KVTensor(each.layout, num_blocks, each.block_size, self.backend.device, self.backend.cache.empty)
                for role, each in self.kv.tensors.items()
            }
            runner = self._prepare_target(tensors["target"])
            try:
                self.drafting.attach(tensors)
                self.kv.compact(requests, tensors)
                self.runner = runner
            except Exception:
                self._return_cache()
                raise

    def _return_cache(self) -> None:
        """Attach the present cache to the drafter again; drop a drafter that refuses, since it might write past the cache's end."""
        try:
            self.drafting.attach(self.kv.tensors)
        except BaseException as error:
            name = self.drafter.name
            self.swap_draft(None)
            if not isinstance(error, Exception):
                raise
            message = f"the drafter {name!r} did not take its KV cache back, so there is no speculation: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def end_all(self, error: str) -> None:
        """End all requests in flight with an error, and empty the KV cache and the swap space.

        This puts the engine in order after a step that failed, or after an interrupt in a step or in a change between two. If this
        is interrupted itself, it must be called again.
        """
        with self.backend.active():
            self.kv.lose_content(self.scheduler.in_flight)
            self.scheduler.end_all(error)
            if self.backend.is_host:  # where caches can be resized, which may have been interrupted
                self.runner = self._prepare_target(self.kv.tensors["target"])
                self._return_cache()

    def _check_resize(self, num_blocks: int, requests: Sequence[Request]) -> None:
        if not self.backend.is_host:
            raise ValueError(
                f"num_blocks={num_blocks} is refused: on {self.backend.device} the KV cache cannot be resized, since recorded "
                f"graphs hold its addresses; allowed on a CPU"
            )
        num_allowed = self.kv.num_blocks + self._free_memory() // self.kv.bytes_per_block
        if num_blocks > num_allowed:
            raise ValueError(f"num_blocks={num_blocks} takes more than the free memory: at most {num_allowed} are allowed")
        self.kv.pool.new_ids(num_blocks, [request.block_ids for request in requests])
        self.scheduler.check_num_blocks(num_blocks)

    def _free_memory(self) -> int:
        """Return the bytes that can be allocated, less those that untouched blocks of the caches take once they are written."""
        num_untouched = self.kv.num_blocks - self.kv.pool.num_touched
        return max(0, self.backend.free_memory() - num_untouched * self.kv.bytes_per_block)

    def metrics(self) -> EngineMetrics:
        """Return a snapshot of the engine's totals and state."""
        return self._meter.read(time.perf_counter(), self.drafting, self.adaptive)

    def draft_context(self) -> DraftContext:
        """Return the properties of this engine that drafters depend on."""
        config, backend, limits, passes = self.config, self.backend, self._pass_limits, self.passes

        def prepare(model: Model, kv: KVTensor, specs: Sequence[GrowthSpec], num_proposable: int) -> Runner:
            # does not refer to the engine: in a reference cycle, it would keep its memory until the garbage collector runs
            runner = backend.prepare(model, kv, limits, passes)
            _warm_up(config, runner.warm_up(specs, num_proposable))
            return runner

        return DraftContext(
            target_vocab_size=self.model_config.vocab_size,
            max_draft_tokens=config.speculation.max_draft_tokens,
            draft_tree=config.speculation.draft_tree,
            draft_sampling=config.speculation.draft_sampling,
            is_adaptive=config.speculation.speculation == "adaptive",
            max_num_batched_tokens=config.schedule.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            dtype=str(config.model.draft_dtype or dtype_name(self.dtype)),
            kv_cache_dtype=config.memory.draft_kv_cache_dtype,
            backend=backend,
            model_options=config.model,
            prepare=prepare,
            tokenizer=self._tokenizer,
        )

    def _open_drafter(self, draft: DraftSpec) -> Callable[[], Drafter]:
        if has_cache(draft):
            check_claim(self, "draft_model", draft)
        return open_drafter(draft, self.draft_context())

    def _use_drafter(self, drafter: Drafter, requests: Sequence[Request]) -> None:
        """Replace the drafter; these requests in flight lose their draft KV, and the swap space is dropped.

        If anything raises, the current drafter stays.
        """
        tensors: dict[Role, KVTensor] = {"target": self.kv.tensors["target"]}
        if has_cache(drafter):
            claim(self, "draft_model", drafter)
            tensors["draft"] = KVTensor(
                drafter.kv, self.kv.num_blocks, self.kv.block_size, self.backend.device, self.backend.cache.zeros
            )
            drafter.attach(tensors["draft"])
        drafting = Drafting(drafter, self.backend, self.model_config.vocab_size)
        max_draft_tokens = min(int(drafter.max_draft_tokens), self.config.speculation.max_draft_tokens)
        adaptive = self._make_adaptive(drafting, max_draft_tokens)
        self.kv.forget_draft(requests)
        self.kv.resize_swap_space(0, requests)
        # one statement, which no interrupt can cut: a drafter never has the cache of another
        self.kv.tensors, self.drafting, self.adaptive, self._max_draft_tokens = tensors, drafting, adaptive, max_draft_tokens
        self._log.start_draft()

    def _make_adaptive(self, drafting: Drafting, max_draft_tokens: int) -> BudgetPolicy | None:
        options = self.config.speculation
        if options.speculation != "adaptive" or not max_draft_tokens:
            return None
        costs = self._measure(drafting.drafter, max_draft_tokens, otherwise="speculation='fixed' is used")
        if costs is None:
            return None
        return AdaptiveSpeculation(Controller(costs), drafting, max_draft_tokens, options.speculation_target == "latency")

    def _make_pace(self) -> Pace | None:
        max_step_s = self.config.schedule.max_inter_token_s
        if max_step_s is None:
            return None
        if self._profiler.target is None:
            self._measure(NoDrafter(), self._max_draft_tokens, otherwise="max_inter_token_s bounds nothing")
        target = self._profiler.target
        return None if target is None else Pace(deepcopy(target), max_step_s)

    def _measure(self, drafter: Drafter, max_draft_tokens: int, *, otherwise: str) -> Costs | None:
        """Measure the passes of the models; if that fails, warn and return ``None``."""
        try:
            return self._profiler.measure(self.runner, drafter, max_draft_tokens)
        except (RuntimeError, MemoryError) as error:
            warnings.warn(f"passes could not be measured, so {otherwise}: {error}", stacklevel=3)
            return None

    def _prepare_target(self, kv: KVTensor) -> Runner:
        return self.backend.prepare(self._target, kv, self._pass_limits, self.passes)

    def _inform_swap_rule(self) -> None:
        """Give the swap rule the costs of a block's copies, and of the target's passes, if they have been measured."""
        self.scheduler.queues.swap_rule.block_s = self._byte_s * self.kv.bytes_per_block
        if self._profiler.target is not None:
            self.scheduler.queues.swap_rule.pass_s = self._profiler.target.predict  # adaptive speculation keeps these up to date


def _warm_up(config: EngineConfig, passes: Sequence[WarmUp]) -> None:
    if not passes or not config.model.warm_up:
        return
    try:
        with torch.inference_mode():
            for run in tqdm(passes, desc="Warming up", unit="pass", dynamic_ncols=True):
                run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        schedule = config.schedule
        raise ValueError(
            f"passes of max_batch_size={schedule.max_batch_size} requests and max_num_batched_tokens="
            f"{schedule.max_num_batched_tokens} tokens need more memory than the KV cache leaves: lower these, or give the cache "
            f"less by memory_utilization, kv_cache_memory or num_kv_blocks"
        ) from error


def _max_model_len(options: ModelOptions, model_config: ModelConfig) -> int:
    longest = model_config.max_position_embeddings
    if options.max_model_len is None:
        return longest
    if options.max_model_len > longest:
        raise ValueError(f"max_model_len={options.max_model_len} is more than the model's positions: at most {longest} is allowed")
    return options.max_model_len
