"""The end of a step and the plan of the next, in a scheduler without an engine, with as many requests as a busy server has."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from titan.core.metrics import EngineCounters
from titan.core.options import SCHEDULING_POLICIES, ScheduleOptions
from titan.core.outputs import RequestMetrics
from titan.core.proposals import placeholder_chains
from titan.core.request import Request
from titan.core.sampling_params import SamplingParams
from titan.core.step import Acceptance, StepPlan
from titan.core.terms import PRIORITIES, RequestTerms
from titan.kernels.interfaces import CacheOps
from titan.memory.kv_cache import KVCache
from titan.schedule.scheduler import Scheduler

NUM_RUNNING, NUM_WAITING, NUM_USERS = 256, 2000, 50
PROMPT_LEN, MAX_TOKENS, BLOCK_SIZE = 128, 256, 16
NUM_DRAFTS, NUM_ACCEPTED = 4, 2
pytestmark = pytest.mark.benchmark(group="host")


class Backlog:
    """Requests of all classes and of many users, of which one arrives for each that finishes; each step accepts half of the drafts.

    Args:
        policy: name of the scheduling policy.
    """

    def __init__(self, policy: str) -> None:
        self._random = Random(0)
        self._numbers = count()
        options = ScheduleOptions(
            max_batch_size=NUM_RUNNING,
            max_num_batched_tokens=NUM_RUNNING * (1 + NUM_DRAFTS) + 2048,
            scheduling_policy=policy,
            max_waiting_requests=NUM_RUNNING + NUM_WAITING,
        )
        num_blocks = NUM_RUNNING * -(-(PROMPT_LEN + MAX_TOKENS + NUM_DRAFTS) // BLOCK_SIZE)
        kv = KVCache(num_blocks, BLOCK_SIZE, enable_prefix_caching=True, ops=Mock(spec=CacheOps))
        self._now = 0.0
        self.scheduler = Scheduler(options, kv, EngineCounters(), lambda: self._now)
        self._add(NUM_RUNNING + NUM_WAITING)
        self._plan = self._schedule()
        while self.scheduler.counters.num_finished_requests < NUM_RUNNING:  # by then they are at all stages
            self.run(self.verify())

    def verify(self) -> Acceptance:
        """Return what the verification of the planned step might say, and let requests arrive for those that have finished."""
        self._now += 0.05
        self._add(NUM_RUNNING + NUM_WAITING - len(self.scheduler.running) - len(self.scheduler.waiting))
        plan = self._plan
        trees = placeholder_chains(plan.draft_budgets, lambda arrays: list(map(torch.from_numpy, arrays)), torch.device("cpu"))
        paths = [list(range(min(budget, NUM_ACCEPTED))) for budget in plan.draft_budgets]
        tokens = [[7] * (len(path) + 1) if plan.reaches_root(i) else [] for i, path in enumerate(paths)]
        return Acceptance(trees, paths, tokens, [None] * len(paths))

    def run(self, acceptance: Acceptance) -> None:
        """Update the scheduler after the planned step, and plan the next."""
        self.scheduler.update(self._plan, acceptance)
        self._plan = self._schedule()

    def _schedule(self) -> StepPlan:
        return self.scheduler.schedule(NUM_DRAFTS, lambda _, budgets: budgets)

    def _add(self, num_requests: int) -> None:
        for _ in range(num_requests):
            params = SamplingParams(max_tokens=self._random.randint(1, MAX_TOKENS), ignore_eos=True)
            assert params.max_tokens is not None
            prompt = [self._random.randrange(100) for _ in range(self._random.randint(1, PROMPT_LEN))]
            terms = RequestTerms(priority=self._random.choice(PRIORITIES), user=str(self._random.randrange(NUM_USERS)))
            metrics, name = RequestMetrics(self._now), str(next(self._numbers))
            request = Request(name, None, prompt, params, 0, params.max_tokens, frozenset(), metrics, None, terms=terms)
            self.scheduler.add(request)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_update_and_schedule(benchmark: Any, policy: str) -> None:
    """With 256 running requests and 2,000 waiting ones."""
    backlog = Backlog(policy)
    benchmark.pedantic(backlog.run, setup=lambda: ((backlog.verify(),), {}), rounds=200)
