"""The costs of an engine's models, each measured when it is first needed."""

from __future__ import annotations

import time
from contextlib import ExitStack

from titan.adaptive.costs import Costs
from titan.adaptive.measure import Extent, Subject, measure
from titan.adaptive.pass_cost import PassCost
from titan.core.options import ScheduleOptions
from titan.draft.base import Drafter, runs_model
from titan.kernels.interfaces import Backend, Runner
from titan.memory.kv_cache import KVCache

MAX_PROFILED_BLOCKS = 1024
"""Most KV blocks on which passes are measured."""

MAX_PROFILED_FEED = 256
"""Tokens that a draft model may lack of a request, up to which its passes are measured in any case."""


class Profiler:
    """Measures the target's passes once, and a draft's when it comes.

    The target's are measured on blocks that the KV cache lends. A draft's cache is new then: nothing is lost, whosever blocks these
    are.

    Args:
        backend: that runs the passes.
        kv: the KV cache.
        schedule: the options that bound passes.
        max_model_len: most tokens of a request.
    """

    def __init__(self, backend: Backend, kv: KVCache, schedule: ScheduleOptions, max_model_len: int) -> None:
        self._backend, self._kv, self._schedule, self._max_model_len = backend, kv, schedule, max_model_len
        self.target: PassCost | None = None
        """Cost of the target's passes, which adaptive speculation follows; ``None``: not measured yet."""
        self.seconds = 0.0
        """Of the last measurement, warm-up included."""

    def measure(self, runner: Runner, drafter: Drafter, max_draft_tokens: int) -> Costs:
        """Measure the passes of the target, if they were not yet, and of the draft model, if there is one.

        Args:
            runner: of the target.
            drafter: which may have a model.
            max_draft_tokens: per request.

        Raises:
            RuntimeError: the device has too little memory (torch.OutOfMemoryError).
        """
        schedule, kv, subjects, begin = self._schedule, self._kv, list[Subject](), time.perf_counter()
        max_rows = schedule.max_num_batched_tokens
        if schedule.max_inter_token_s is None:  # prompts do not matter
            max_rows = min(max_rows, schedule.max_batch_size * (1 + max_draft_tokens))
        with ExitStack() as stack:
            if self.target is None:
                block_ids = stack.enter_context(kv.lend_blocks(MAX_PROFILED_BLOCKS))
                subjects.append(Subject(runner, max_draft_tokens, block_ids, self._max_model_len))
            if runs_model(drafter):
                any_blocks, max_len = range(min(kv.num_blocks, MAX_PROFILED_BLOCKS)), min(self._max_model_len, drafter.max_len)
                num_fed = min(MAX_PROFILED_FEED, schedule.max_num_batched_tokens)
                subjects.append(Subject(drafter.runner, 0, any_blocks, max_len, num_fed, self._backend.is_host))
            stack.enter_context(self._backend.active())  # as in steps, now that the back end knows the models
            costs = measure(subjects, self._backend, Extent(kv.block_size, schedule.max_batch_size, max_rows))
        if subjects:
            self.seconds = time.perf_counter() - begin
        if self.target is None:
            self.target = costs.pop(0)
        return Costs(self.target, costs[0] if costs else None)
